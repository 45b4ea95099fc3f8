/* The level nearest to a weight, for the type V that V, VI, REAL, SINGLE and T() name: vectors, a row
 * a lane, on the CPU (levels_body.h), one number on a GPU (cuda/integers.h). T(book) has `count`
 * numbers that differ, ascending, as `value`, their codes as `code`, the middles between each and the
 * one before as `middle`, and says whether they are `consecutive`: whole, each one more than the one
 * before, codes likewise. No product may be contracted with a sum, and division rounds to nearest.
 *
 * The nearest is looked for in units of the book, x = (w + offset) / scale: exact but for the
 * rounding of x. Halfway between two, the even one is taken of integers in a row, else the
 * lower one. Where the scale is zero, all codes stand for the same, and the number nearest to zero is
 * taken. */

/* What it stands for, and its code. */
QT_INLINE V T(nearest_level)(const T(book) *book, V w, V scale, V offset, V *code)
{
    V x = T(select)(scale == (REAL)0, T(splat)((REAL)0), (w + offset) / scale);
    V low = T(splat)(book->value[0]), value = low;
    if (book->consecutive) {
        V high = T(splat)(book->value[book->count - 1]);
        value = T(round)(T(min)(T(max)(x, low), high));
        *code = value - low;
    } else {
        *code = T(splat)(book->code[0]);
        for (int32_t k = 1; k < book->count; k++) {
            VI above = x > T(splat)(book->middle[k]);
            value = T(select)(above, T(splat)(book->value[k]), value);
            *code = T(select)(above, T(splat)(book->code[k]), *code);
        }
    }
    return SINGLE(SINGLE(scale * value) - offset);
}
