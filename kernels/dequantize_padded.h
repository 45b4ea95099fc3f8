/* Padded words straight to one output type, by vectors of at least eight lanes; included by
 * dequantize_body.h. The codes of two vectors lie in at most eight words: each lane takes its word and
 * shifts its code to the bottom. For 3, 5, 6 and 7 bits; all codes of two vectors are of one group. */

/* What codes stand for, in registers: for 3 and 5 bits by AVX-512 as a table. Those of three bits
 * come again and again in it, so that the bits above them do not matter. */
typedef struct {
    V scale, zero, low, high;
} D(padded_group);

ALWAYS D(padded_group) D(padded_group_of)(float scale, float zero, int bits)
{
    I first = bits == 3 ? iota() & 7 : iota(), second = bits == 3 ? first : first + 16;
    V s = splat(scale), z = splat(zero);
    return (D(padded_group)){s, z, (to_float(first) - z) * s, (to_float(second) - z) * s};
}

ALWAYS V D(padded_value)(I codes, const D(padded_group) * group, int bits)
{
#if defined(QT_ISA_AVX512)
    if (bits == 3)
        return (V)_mm512_permutexvar_ps((__m512i)codes, (__m512)group->low);
    if (bits == 5)
        return (V)_mm512_permutex2var_ps((__m512)group->low, (__m512i)codes, (__m512)group->high);
#endif
    return (to_float(codes & ((1 << bits) - 1)) - group->zero) * group->scale;
}

/* Two vectors of a row from eight words; the first of their codes is in word number `skip`. */
ALWAYS void D(put_padded)(OUT *to, const uint8_t *words, int32_t skip,
                          const D(padded_group) * group, const qt_places *at, int bits,
                          int streaming)
{
    I a = qt_placed_codes(words, skip, at, 0), b = qt_placed_codes(words, skip, at, 1);
#if defined(PAIR)
    if (bits <= 5) {
        const __m512i even = (__m512i)(2 * (qt_vi16){QT_COUNT_32});
        __m512i index = _mm512_permutex2var_epi16((__m512i)a, even, (__m512i)b);
        D(put_line)(to, _mm512_permutexvar_epi16(index, PAIR(group->low, group->high)), streaming);
        return;
    }
#endif
    D(put_two)(to, D(padded_value)(a, group, bits), D(padded_value)(b, group, bits), streaming);
}

/* Codes k to end of a row, all of one group. Whole vectors are read and written where there is room
 * for them. */
ALWAYS void D(put_padded_run)(OUT *to, const uint8_t *words, int64_t total, int64_t k, int64_t end,
                              float scale, float zero, const qt_places *places, int bits,
                              int streaming)
{
    const int64_t each = 32 / bits;
    const D(padded_group) group = D(padded_group_of)(scale, zero, bits);
    const qt_places *at = places + k % each;
    int64_t word = k / each;
    for (; k + 2 * LANES <= end && word + PLACED_WORDS <= total; k += 2 * LANES) {
        D(put_padded)(to + k, words + 4 * word, 0, &group, at, bits, streaming);
        word += at->step;
        at = places + at->next;
    }
    for (; k < end; k += 2 * LANES) {
        uint8_t few[4 * PLACED_WORDS] = {0};
        OUT room[2 * LANES];
        int64_t begin = qt_least(word, total - PLACED_WORDS);
        const uint8_t *from = words + 4 * begin;
        if (begin < 0) {
            begin = 0;
            from = memcpy(few, words, (size_t)(4 * total));
        }
        int32_t skip = (int32_t)(word - begin);
        if (k + 2 * LANES <= end) {
            D(put_padded)(to + k, from, skip, &group, at, bits, streaming);
        } else {
            D(put_padded)(room, from, skip, &group, at, bits, 0);
            memcpy(to + k, room, (size_t)(end - k) * sizeof(OUT));
        }
        word += at->step;
        at = places + at->next;
    }
}

ALWAYS void D(padded_rows)(const qt_dequantizing *d, int bits, int streaming)
{
    const qt_packing *p = &d->packing;
    qt_places places[MOST_CODES];
    qt_find_places(places, bits);
    int64_t total = qt_row_words(p);
    for (int64_t row = p->first; row < p->last; row++) {
        const uint8_t *words = (const uint8_t *)p->words + 4 * row * total;
        OUT *to = (OUT *)d->values + (row - p->origin) * p->cols;
        for (int64_t group = 0, col = 0, next; col < p->cols; group++, col = next) {
            next = qt_least(p->cols, col + d->group_size);
            float scale = qt_plain_nan(d->scale[row * d->groups + group]);
            float zero = (float)d->zero[row * d->groups + group];
            D(put_padded_run)(to, words, total, col, next, scale, zero, places, bits,
                              streaming);
        }
    }
}

/* Whether this is for padded words of these widths and groups of whole pairs of vectors; if so, all
 * is done. */
static int D(padded)(const qt_dequantizing *d, int streaming)
{
    const qt_packing *p = &d->packing;
    if (p->layout != QT_PADDED || d->g_idx)
        return 0;
    if (d->group_size % (2 * LANES) && d->group_size < p->cols)
        return 0;
    switch (p->bits) {
#define ROWS(bits)                       \
    case bits:                           \
        if (streaming)                   \
            D(padded_rows)(d, bits, 1);  \
        else                             \
            D(padded_rows)(d, bits, 0);  \
        stream_end();                    \
        return 1;
        ROWS(3)
        ROWS(5)
        ROWS(6)
        ROWS(7)
#undef ROWS
    }
    return 0;
}
