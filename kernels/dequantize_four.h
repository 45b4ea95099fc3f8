/* Four-bit codes straight from their words to one output type, by AVX-512; included by
 * dequantize_body.h. Nibbles are shifted to the bottom of their lanes and looked up there: the
 * lookups mask the bits above by themselves. 32 codes at a time, all of one group. */

/* The order of codes for lanes of this type's size. */
#if defined(PAIR)
#define ORDER qt_order16
#define ORDER_OF qt_order16_of
#else
#define ORDER qt_order32
#define ORDER_OF qt_order32_of
#endif

/* What the sixteen codes of a group stand for. */
ALWAYS __m512i D(four_table)(float scale, float zero)
{
    V table = (to_float(iota()) - splat(zero)) * splat(scale);
#if defined(PAIR)
    return PAIR(table, table);
#else
    return (__m512i)table;
#endif
}

ALWAYS void D(put_line)(OUT *to, __m512i line, int streaming)
{
    if (streaming)
        _mm512_stream_si512((void *)to, line);
    else
        _mm512_storeu_si512((void *)to, line);
}

/* 32 weights by sixteen bytes. */
ALWAYS void D(put_four)(OUT *to, const uint8_t *from, const ORDER *order, __m512i table,
                        int streaming)
{
    __m512i bytes = _mm512_castsi128_si512(_mm_loadu_si128((const void *)from));
#if defined(PAIR)
    __m512i parts = _mm512_permutexvar_epi16(order->part, bytes);
    __m512i codes = _mm512_srlv_epi16(parts, order->shift);
    D(put_line)(to, _mm512_permutexvar_epi16(codes, table), streaming);
#else
    for (int half = 0; half < 2; half++) {
        __m512i parts = _mm512_permutexvar_epi32(order->part[half], bytes);
        __m512i codes = _mm512_srlv_epi32(parts, order->shift[half]);
        D(put_line)(to + 16 * half, _mm512_permutexvar_epi32(codes, table), streaming);
    }
#endif
}

/* Eight rows of 32 * lines weights, all of one group: row order[i] by nibble i of the words. Lanes
 * of sixteen bits take the lower halves of 32 words, or the upper ones. */
ALWAYS void D(put_across)(const qt_dequantizing *d, int64_t row, int64_t col, int64_t group,
                          const uint32_t *words, int lines, int streaming, qt_reading *ahead)
{
    const qt_packing *p = &d->packing;
    __m512i part[4][2];
    QT_UNROLL
    for (int line = 0; line < lines; line++) {
        part[line][0] = _mm512_loadu_si512(words + 32 * line);
        part[line][1] = _mm512_loadu_si512(words + 32 * line + 16);
#if defined(PAIR)
        const qt_vi16 low = 2 * (qt_vi16){QT_COUNT_32};
        __m512i a = part[line][0], b = part[line][1];
        part[line][0] = _mm512_permutex2var_epi16(a, (__m512i)low, b);
        part[line][1] = _mm512_permutex2var_epi16(a, (__m512i)(low + 1), b);
#endif
    }
    QT_UNROLL
    for (int i = 0; i < 8; i++) {
        int64_t at = row + p->order[i];
        qt_fetch_lines(ahead, 1);
        OUT *to = (OUT *)d->values + (at - p->origin) * p->cols + col;
        float scale = qt_plain_nan(d->scale[at * d->groups + group]);
        __m512i table = D(four_table)(scale, (float)d->zero[at * d->groups + group]);
        QT_UNROLL
        for (int line = 0; line < lines; line++) {
#if defined(PAIR)
            __m512i codes = _mm512_srli_epi16(part[line][i / 4], i % 4 * 4);
            D(put_line)(to + 32 * line, _mm512_permutexvar_epi16(codes, table), streaming);
#else
            for (int half = 0; half < 2; half++) {
                __m512i codes = _mm512_srli_epi32(part[line][half], i * 4);
                D(put_line)(to + 32 * line + 16 * half, _mm512_permutexvar_epi32(codes, table),
                            streaming);
            }
#endif
        }
    }
}

/* Eight rows of a tile. */
ALWAYS void D(across_rows)(const qt_dequantizing *d, const qt_tile *tile, int64_t row,
                           int streaming, qt_reading *ahead)
{
    const uint32_t *words = tile->words + row / 8 * tile->stride;
    int64_t col = tile->col, end = col + tile->cols;
    for (int64_t group = col / d->group_size; col < end; group++) {
        int64_t next = qt_least(end, (group + 1) * d->group_size);
        for (; col + 128 <= next; col += 128)
            D(put_across)(d, tile->row + row, col, group, words + (col - tile->col), 4, streaming,
                          ahead);
        for (; col < next; col += 32)
            D(put_across)(d, tile->row + row, col, group, words + (col - tile->col), 1, streaming,
                          ahead);
    }
}

/* Where row `row` of the tile has its first nibbles. */
ALWAYS const uint8_t *D(nibbles_of)(const qt_packing *p, const qt_tile *tile, int64_t row)
{
    int64_t at = (tile->row + row) * p->cols + tile->col;
    if (p->layout == QT_COLUMNS)
        return (const uint8_t *)(tile->words + row * (tile->stride / 8));
    if (p->layout == QT_STRIPS)
        at = tile->row * p->cols + 4 * tile->col + 64 * row;
    return (const uint8_t *)p->words + at / 2;
}

/* Four rows of strips: 64 columns of each after the other, as they are read. */
ALWAYS void D(four_strips)(const qt_dequantizing *d, const qt_tile *tile, int streaming)
{
    const qt_packing *p = &d->packing;
    const ORDER order = ORDER_OF(1);
    int64_t col = tile->col, end = col + tile->cols;
    const uint8_t *words = (const uint8_t *)p->words + tile->row * p->cols / 2;
    const float *scale = d->scale + tile->row * d->groups;
    const uint8_t *zero = d->zero + tile->row * d->groups;
    OUT *to = (OUT *)d->values + (tile->row - p->origin) * p->cols;
    for (int64_t group = col / d->group_size; col < end; group++) {
        int64_t next = qt_least(end, (group + 1) * d->group_size);
        __m512i table[4];
        for (int r = 0; r < 4; r++) {
            int64_t at = r * d->groups + group;
            table[r] = D(four_table)(qt_plain_nan(scale[at]), (float)zero[at]);
        }
        for (int64_t count; col < next; col += count) {
            const uint8_t *from = words + col / 64 * 128 + col % 64 / 2;
            count = qt_least(next - col, 64 - col % 64);
            QT_UNROLL
            for (int r = 0; r < 4; r++, from += 32) {
                OUT *at = to + r * p->cols + col;
                D(put_four)(at, from, &order, table[r], streaming);
                if (count == 64)
                    D(put_four)(at + 32, from + 16, &order, table[r], streaming);
            }
        }
    }
}

/* One row of a tile; `row` counts from the tile's first. */
ALWAYS void D(four_row)(const qt_dequantizing *d, const qt_tile *tile, int64_t row, int streaming,
                        qt_reading *ahead)
{
    const qt_packing *p = &d->packing;
    const ORDER order = ORDER_OF(0);
    int64_t at = tile->row + row, col = tile->col, end = col + tile->cols;
    const uint8_t *from = D(nibbles_of)(p, tile, row);
    const float *scale = d->scale + at * d->groups;
    const uint8_t *zero = d->zero + at * d->groups;
    OUT *to = (OUT *)d->values + (at - p->origin) * p->cols;
    for (int64_t group = col / d->group_size; col < end; group++) {
        int64_t next = qt_least(end, (group + 1) * d->group_size);
        __m512i table = D(four_table)(qt_plain_nan(scale[group]), (float)zero[group]);
        qt_fetch_lines(ahead, qt_lines_of(next - col, 4));
        for (; col + 128 <= next; col += 128) {
            QT_UNROLL
            for (int k = 0; k < 128; k += 32)
                D(put_four)(to + col + k, from + (col - tile->col + k) / 2, &order, table,
                            streaming);
        }
        for (; col < next; col += 32)
            D(put_four)(to + col, from + (col - tile->col) / 2, &order, table, streaming);
    }
}

/* One row of a tile whose columns look up their scales and zeros in registers. */
ALWAYS void D(four_columns)(const qt_dequantizing *d, const qt_tile *tile, int64_t row, int layout,
                            const qt_lookup *of, int streaming, qt_reading *ahead)
{
    const qt_packing *p = &d->packing;
    const qt_order16 order = qt_beside_order_of(layout == QT_STRIPS);
    const qt_few_groups groups = qt_few_groups_of(d, tile->row + row);
    const uint8_t *from = D(nibbles_of)(p, tile, row);
    OUT *to = (OUT *)d->values + (tile->row + row - p->origin) * p->cols + tile->col;
    for (int64_t k = 0; k < tile->cols; k += 32) {
        int64_t skip = layout == QT_STRIPS ? k / 64 * 128 + k % 64 / 2 : k / 2;
        int64_t col = tile->col + k;
        V v[2];
        if (k % 128 == 0)
            qt_fetch_lines(ahead, qt_lines_of(128, 4));
        qt_of_few_groups(v, &groups, from + skip, &order, of->index + col, of->beside + col);
        D(put_two)(to + k, v[0], v[1], streaming);
    }
}

ALWAYS void D(four_tile)(const qt_dequantizing *d, const qt_tile *tile, qt_tile *next, int layout,
                         const qt_lookup *of, int streaming)
{
    for (int64_t row = 0; row < tile->rows; row += tile->together) {
        qt_read_words(&d->packing, next, row / tile->together, tile->rows / tile->together);
        if (layout == QT_ACROSS)
            D(across_rows)(d, tile, row, streaming, &next->reading);
        else if (d->g_idx)
            for (int r = 0; r < tile->together; r++)
                D(four_columns)(d, tile, row + r, layout, of, streaming, &next->reading);
        else if (layout == QT_STRIPS)
            D(four_strips)(d, tile, streaming);
        else
            for (int r = 0; r < tile->together; r++)
                D(four_row)(d, tile, row + r, streaming, &next->reading);
    }
}

/* Whether whole runs of 32 codes are in one group, or look up groups that registers hold. */
ALWAYS int D(four)(const qt_dequantizing *d)
{
    const qt_packing *p = &d->packing;
    if (p->bits != 4 || p->layout == QT_PADDED || p->cols % 32)
        return 0;
    return d->g_idx ? p->layout != QT_ACROSS && group_pairs(d) == 1 : d->group_size % 32 == 0;
}

static void D(put_four_tile)(const qt_dequantizing *d, const qt_tile *tile, qt_tile *next,
                             const qt_lookup *of, int streaming)
{
    switch (d->packing.layout) {
#define TILE(layout)                           \
    case layout:                               \
        if (streaming)                         \
            D(four_tile)(d, tile, next, layout, of, 1); \
        else                                   \
            D(four_tile)(d, tile, next, layout, of, 0); \
        break;
        TILE(QT_ROWS)
        TILE(QT_COLUMNS)
        TILE(QT_ACROSS)
        TILE(QT_STRIPS)
#undef TILE
    }
}

#undef ORDER
#undef ORDER_OF
