/* Levels that weights choose together, for the type of real.h: the codes of four or eight
 * neighbours are a point of a table (the lattices of GGUF). Code c stands for scale * book[c] -
 * offset. Of IQ2 and IQ3 the first half of the book are magnitudes, the second half the same,
 * negated: signs are free, or of each eight an even number. Of IQ1 a point's codes are all of one
 * half, whose numbers are moved one way or the other; or there is one half, and the offset moves it.
 *
 * A unit, all weights that depend on each other, becomes the one for which
 *
 *     sum (w - level)^2 / U[i,i]^2
 *
 * is least: what its errors cost but for what weights of a unit compensate for each other. Every point
 * is looked at. Coordinate by coordinate a cost depends on one number alone, so that the sums of
 * either half of a point's coordinates are worked out once for all points. Where the weights have
 * an odd number of signs and may not, one weight takes the other sign: (|w| + m)^2 is 4 |w| m more
 * than (|w| - m)^2, and the least of these is part of the sums. Of equal points, and of halves, the
 * first is taken. */

typedef struct {
    int32_t points, coordinates, numbers, unit, second; /* numbers: of a half of the book */
    REAL book[2][MOST_NUMBERS];
    uint8_t half[2][MOST_POINTS]; /* which of the sums */
    uint32_t packed[MOST_POINTS]; /* four bits a coordinate */
} T(lattice);

/* What the kernel needs to know of a table; 0 where it is none. */
static int T(read_lattice)(const qt_sweep *sweep, T(lattice) *l)
{
    int32_t n = sweep->coordinates, second = sweep->second, sums = 1;
    int32_t parts = second == QT_SECOND_NONE ? 1 : 2, count = sweep->levels / parts;
    *l = (T(lattice)){.points = sweep->points, .coordinates = n, .numbers = count};
    if ((n != 4 && n != 8) || count < 1 || count > MOST_NUMBERS || sweep->points < 1 ||
        sweep->points > MOST_POINTS || second < QT_SECOND_ANY || second > QT_SECOND_NONE ||
        (second <= QT_SECOND_EVEN && sweep->offset))
        return 0;
    for (int32_t i = 0; i < n / 2; i++)
        sums *= count;
    if (sums > MOST_SUMS)
        return 0;
    l->second = second;
    l->unit = second == QT_SECOND_EVEN ? UNIT : n;
    for (int32_t c = 0; c < parts * count; c++)
        l->book[c / count][c % count] = (REAL)sweep->book[c];
    for (int32_t k = 0; k < l->points; k++) {
        const uint8_t *point = sweep->point + k * n;
        for (int32_t i = n - 1; i >= 0; i--) {
            if (point[i] >= count)
                return 0;
            uint8_t *half = &l->half[i >= n / 2][k];
            *half = (uint8_t)(*half * count + point[i]);
            l->packed[k] |= (uint32_t)point[i] << 4 * i;
        }
    }
    return 1;
}

static inline VI T(select_whole)(VI mask, VI yes, VI no)
{
    return (yes & mask) | (no & ~mask);
}

/* The least of the sums over all points, and where: [0] with the signs that there are, [1], for
 * `even`, with one other sign. book: a half of it; size, cost: of each coordinate. */
static inline void T(near_points)(const T(lattice) *l, const REAL *book, const V *size,
                                  const REAL *cost, int even, V least[2], VI at[2])
{
    V kept[2][MOST_SUMS], turned[2][MOST_SUMS], most = T(splat)((REAL)0x1p127);
    int32_t count = l->numbers, each = l->coordinates / 2;
    for (int half = 0; half < 2; half++) {
        V *sum = kept[half], *turn = turned[half];
        sum[0] = (V){0};
        turn[0] = most;
        int32_t n = 1;
        for (int32_t i = half * each; i < (half + 1) * each; i++, n *= count)
            for (int32_t c = count - 1; c >= 0; c--) {
                REAL m = book[c];
                V off = size[i] - m, term = cost[i] * off * off;
                V more = (4 * m * cost[i]) * size[i];
                for (int32_t k = 0; k < n; k++) {
                    sum[c * n + k] = sum[k] + term;
                    if (even)
                        turn[c * n + k] = T(min)(turn[k], more);
                }
            }
        for (int32_t k = 0; even && k < n; k++)
            turn[k] += sum[k];
    }
    /* Either half of the points by itself, so that one comparison need not wait for another; where
     * they are odd in number, both look at the middle one. */
    V best[2][2] = {{most, most}, {most, most}};
    VI where[2][2] = {{{0}, {0}}, {{0}, {0}}};
    int32_t second = l->points / 2;
    for (int32_t first = 0; first < l->points - second; first++)
        for (int part = 0; part < 2; part++) {
            int32_t k = first + part * second;
            const V *low = kept[0] + l->half[0][k], *high = kept[1] + l->half[1][k];
            V sum = *low + *high;
            VI less = sum < best[part][0], here = (VI){0} + k;
            best[part][0] = T(select)(less, sum, best[part][0]);
            where[part][0] = T(select_whole)(less, here, where[part][0]);
            if (!even)
                continue;
            sum = T(min)(turned[0][l->half[0][k]] + *high, *low + turned[1][l->half[1][k]]);
            less = sum < best[part][1];
            best[part][1] = T(select)(less, sum, best[part][1]);
            where[part][1] = T(select_whole)(less, here, where[part][1]);
        }
    for (int turn = 0; turn <= even; turn++) {
        VI less = best[1][turn] < best[0][turn];
        least[turn] = T(select)(less, best[1][turn], best[0][turn]);
        at[turn] = T(select_whole)(less, where[1][turn], where[0][turn]);
    }
}

/* The numbers of some of a half of the book that codes stand for. */
static inline V T(numbers)(const T(lattice) *l, int half, VI code)
{
    V number = T(splat)(l->book[half][0]);
    for (int32_t c = 1; c < l->numbers; c++)
        number = T(select)(code == c, T(splat)(l->book[half][c]), number);
    return number;
}

/* Codes and levels of some weights at a point: [coordinate][PANEL], of the second half of the book
 * where `minus` is set. In the lanes of `turn` one of the signs changes, where that costs least. */
static inline void T(put_point)(const T(lattice) *l, VI at, VI turn, V scale, V offset,
                                const V *size, VI *minus, const REAL *cost, REAL *level,
                                uint8_t *codes)
{
    VI packed = {0}, where = {0};
    V number[UNIT], least = {0};
    for (int lane = 0; lane < LANES; lane++)
        packed[lane] = l->packed[at[lane]];
    for (int32_t i = 0; i < l->coordinates; i++) {
        number[i] = T(numbers)(l, 0, packed >> 4 * i & 15);
        V more = (4 * cost[i]) * size[i] * number[i];
        VI less = i ? more < least : ~(VI){0};
        least = T(select)(less, more, least);
        where = T(select_whole)(less, (VI){0} + i, where);
    }
    for (int32_t i = 0; i < l->coordinates; i++) {
        minus[i] ^= turn & (where == (VI){0} + i);
        VI code = packed >> 4 * i & 15;
        V other = l->second == QT_SECOND_ALL ? T(numbers)(l, 1, code) : -number[i];
        V exact = SINGLE(scale * T(select)(minus[i], other, number[i]));
        T(store)(level + i * PANEL, SINGLE(exact - offset));
        VCODE byte = __builtin_convertvector(code + (minus[i] & l->numbers), VCODE);
        memcpy(codes + i * PANEL, &byte, sizeof byte);
    }
}

/* Codes and levels of a unit of the columns w [unit][PANEL], whose cost is that of each column. */
static void T(choose_unit)(const T(lattice) *l, const REAL *w, V scale, V offset, const REAL *cost,
                           REAL *level, uint8_t *codes)
{
    int32_t n = l->coordinates, even = l->second == QT_SECOND_EVEN;
    VI has_signs = (VI){0} - (l->second <= QT_SECOND_EVEN);
    V size[UNIT], least[2][2];
    VI minus[UNIT], at[2][2], odd = {0}, turn[2] = {{0}, {0}};
    for (int32_t i = 0; i < l->unit; i++) {
        V x = (T(load)(w + i * PANEL) + offset) / scale;
        x = T(select)(scale == (REAL)0, (V){0}, x);
        minus[i] = (x < (REAL)0) & has_signs;
        size[i] = T(select)(minus[i], -x, x);
        odd ^= minus[i];
    }
    for (int32_t k = 0; k * n < l->unit; k++) {
        if (even)
            T(near_points)(l, l->book[0], size + k * n, cost + k * n, 1, least[k], at[k]);
        else
            T(near_points)(l, l->book[0], size + k * n, cost + k * n, 0, least[k], at[k]);
    }
    if (even && n == UNIT) {
        turn[0] = odd;
    } else if (even) {
        VI second = least[0][0] + least[1][1] < least[0][1] + least[1][0];
        turn[0] = odd & ~second;
        turn[1] = odd & second;
    } else if (l->second == QT_SECOND_ALL) {
        T(near_points)(l, l->book[1], size, cost, 0, least[1], at[1]);
        VI second = least[1][0] < least[0][0];
        at[0][0] = T(select_whole)(second, at[1][0], at[0][0]);
        for (int32_t i = 0; i < n; i++)
            minus[i] = second;
    }
    for (int32_t k = 0; k * n < l->unit; k++)
        T(put_point)(l, T(select_whole)(turn[k], at[k][1], at[k][0]), turn[k], scale, offset,
                     size + k * n, minus + k * n, cost + k * n, level + k * n * PANEL,
                     codes + k * n * PANEL);
}
