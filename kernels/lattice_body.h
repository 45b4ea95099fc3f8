/* Levels that weights choose together, for the type of real.h: the magnitudes of four or eight
 * neighbours are the codes of a point of a table, signs are free, or of each eight an even number
 * (the lattices of GGUF). Code c stands for scale * book[c]; the second half of the book are the
 * same magnitudes, negated.
 *
 * A unit, all weights that depend on each other, becomes the one for which
 *
 *     sum (w - level)^2 / U[i,i]^2
 *
 * is least: what its errors cost but for what weights of a unit make up for each other. Every point
 * is looked at. Coordinate by coordinate a cost depends on one magnitude alone, so that the sums of
 * either half of a point's coordinates are worked out once for all points. Where the weights have
 * an odd number of signs and may not, one weight takes the other sign: (|w| + m)^2 is 4 |w| m more
 * than (|w| - m)^2, and the least of these is part of the sums. Of equal points the first is taken. */

typedef struct {
    int32_t points, coordinates, magnitudes, unit, even;
    REAL magnitude[MOST_MAGNITUDES];
    uint8_t half[2][MOST_POINTS]; /* which of the sums */
    uint32_t packed[MOST_POINTS]; /* four bits a coordinate */
} T(lattice);

/* What the kernel needs to know of a table; 0 where it is none. */
static int T(read_lattice)(const qt_sweep *sweep, T(lattice) *l)
{
    int32_t n = sweep->coordinates, count = sweep->levels / 2, halves = 1;
    *l = (T(lattice)){.points = sweep->points, .coordinates = n, .magnitudes = count};
    if ((n != 4 && n != 8) || count < 1 || count > MOST_MAGNITUDES || sweep->points < 1 ||
        sweep->points > MOST_POINTS)
        return 0;
    for (int32_t i = 0; i < n / 2; i++)
        halves *= count;
    if (halves > MOST_HALVES)
        return 0;
    l->even = sweep->even_signs != 0;
    l->unit = l->even ? UNIT : n;
    for (int32_t c = 0; c < count; c++)
        l->magnitude[c] = (REAL)sweep->book[c];
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

/* The least of the sums over all points, and where: [0] with the signs that there are, [1] with one
 * other sign. size, cost: of each coordinate. */
static inline void T(near_points)(const T(lattice) *l, const V *size, const REAL *cost, int even,
                                  V least[2], VI at[2])
{
    V kept[2][MOST_HALVES], turned[2][MOST_HALVES], most = T(splat)((REAL)0x1p127);
    int32_t count = l->magnitudes, each = l->coordinates / 2;
    for (int half = 0; half < 2; half++) {
        V *sum = kept[half], *turn = turned[half];
        sum[0] = (V){0};
        turn[0] = most;
        int32_t n = 1;
        for (int32_t i = half * each; i < (half + 1) * each; i++, n *= count)
            for (int32_t c = count - 1; c >= 0; c--) {
                REAL m = l->magnitude[c];
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
    least[0] = least[1] = most;
    at[0] = at[1] = (VI){0};
    for (int32_t k = 0; k < l->points; k++) {
        const V *low = kept[0] + l->half[0][k], *high = kept[1] + l->half[1][k];
        V sum = *low + *high;
        VI less = sum < least[0], here = (VI){0} + k;
        least[0] = T(select)(less, sum, least[0]);
        at[0] = T(select_whole)(less, here, at[0]);
        if (even) {
            sum = T(min)(turned[0][l->half[0][k]] + *high, *low + turned[1][l->half[1][k]]);
            less = sum < least[1];
            least[1] = T(select)(less, sum, least[1]);
            at[1] = T(select_whole)(less, here, at[1]);
        }
    }
}

/* Codes and levels of some weights at a point: [coordinate][PANEL]. In the lanes of `turn` one of
 * the signs changes, where that costs least. */
static inline void T(put_point)(const T(lattice) *l, VI at, VI turn, V scale, const V *size,
                                VI *minus, const REAL *cost, REAL *level, uint8_t *codes)
{
    VI packed = {0}, where = {0};
    V magnitude[UNIT], least = {0};
    for (int lane = 0; lane < LANES; lane++)
        packed[lane] = l->packed[at[lane]];
    for (int32_t i = 0; i < l->coordinates; i++) {
        VI code = packed >> 4 * i & 15;
        magnitude[i] = T(splat)(l->magnitude[0]);
        for (int32_t c = 1; c < l->magnitudes; c++)
            magnitude[i] = T(select)(code == c, T(splat)(l->magnitude[c]), magnitude[i]);
        V more = (4 * cost[i]) * size[i] * magnitude[i];
        VI less = i ? more < least : ~(VI){0};
        least = T(select)(less, more, least);
        where = T(select_whole)(less, (VI){0} + i, where);
    }
    for (int32_t i = 0; i < l->coordinates; i++) {
        minus[i] ^= turn & (where == (VI){0} + i);
        VI code = (packed >> 4 * i & 15) + (minus[i] & l->magnitudes);
        V signed_magnitude = T(select)(minus[i], -magnitude[i], magnitude[i]);
        T(store)(level + i * PANEL, SINGLE(scale * signed_magnitude));
        VCODE byte = __builtin_convertvector(code, VCODE);
        memcpy(codes + i * PANEL, &byte, sizeof byte);
    }
}

/* Codes and levels of a unit of the columns w [unit][PANEL], whose cost is that of each column. */
static void T(choose_unit)(const T(lattice) *l, const REAL *w, V scale, const REAL *cost,
                           REAL *level, uint8_t *codes)
{
    int32_t n = l->coordinates;
    V size[UNIT], least[2][2];
    VI minus[UNIT], at[2][2], odd = {0}, turn[2] = {{0}, {0}};
    for (int32_t i = 0; i < l->unit; i++) {
        V x = T(select)(scale == (REAL)0, (V){0}, T(load)(w + i * PANEL) / scale);
        minus[i] = x < (REAL)0;
        size[i] = T(abs)(x);
        odd ^= minus[i];
    }
    for (int32_t k = 0; k * n < l->unit; k++) {
        if (l->even)
            T(near_points)(l, size + k * n, cost + k * n, 1, least[k], at[k]);
        else
            T(near_points)(l, size + k * n, cost + k * n, 0, least[k], at[k]);
    }
    if (l->even && n == UNIT) {
        turn[0] = odd;
    } else if (l->even) {
        VI second = least[0][0] + least[1][1] < least[0][1] + least[1][0];
        turn[0] = odd & ~second;
        turn[1] = odd & second;
    }
    for (int32_t k = 0; k * n < l->unit; k++)
        T(put_point)(l, T(select_whole)(turn[k], at[k][1], at[k][0]), turn[k], scale, size + k * n,
                     minus + k * n, cost + k * n, level + k * n * PANEL, codes + k * n * PANEL);
}
