/* (code - zero) * scale for one output type; included by each_dtype.h. */

ALWAYS void D(put_two)(OUT *to, V a, V b, int streaming)
{
    if (streaming)
        STREAM2(to, a, b);
    else
        PUT2(to, a, b);
}

/* Up to 2 * LANES values where whole vectors do not fit. */
ALWAYS void D(put_some)(OUT *to, V a, V b, int64_t count)
{
    OUT room[2 * LANES];
    PUT2(room, a, b);
    memcpy(to, room, (size_t)count * sizeof(OUT));
}

/* A run of codes with one scale and zero. Reads whole vectors of codes. */
ALWAYS void D(put_run)(OUT *to, const uint8_t *codes, int64_t count, float scale, float zero,
                       int bits, int streaming)
{
    V s = splat(scale), z = splat(zero);
    int64_t k = 0;
#if defined(PAIR)
    if (bits <= 5) {
        V low = (to_float(iota()) - z) * s, high = (to_float(iota() + 16) - z) * s;
        __m512i table = PAIR(low, bits == 5 ? high : low);
        for (; k + 32 <= count; k += 32) {
            __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(codes + k)));
            __m512i found = _mm512_permutexvar_epi16(index, table);
            if (streaming)
                _mm512_stream_si512((void *)(to + k), found);
            else
                _mm512_storeu_si512(to + k, found);
        }
    }
#elif defined(QT_ISA_AVX512)
    if (bits <= 4) {
        __m512 table = (__m512)((to_float(iota()) - z) * s);
        for (; k + 32 <= count; k += 32) {
            V a = (V)_mm512_permutexvar_ps((__m512i)load_u8(codes + k), table);
            V b = (V)_mm512_permutexvar_ps((__m512i)load_u8(codes + k + 16), table);
            D(put_two)(to + k, a, b, streaming);
        }
    }
#else
    (void)bits;
#endif
    for (; k + 2 * LANES <= count; k += 2 * LANES)
        D(put_two)(to + k, (to_float(load_u8(codes + k)) - z) * s,
                   (to_float(load_u8(codes + k + LANES)) - z) * s, streaming);
    if (k < count)
        D(put_some)(to + k, (to_float(load_u8(codes + k)) - z) * s,
                    (to_float(load_u8(codes + k + LANES)) - z) * s, count - k);
}

/* A run whose columns look up their scales and zeros. */
ALWAYS void D(put_columns)(OUT *to, const uint8_t *codes, const int32_t *index, int64_t count,
                           const qt_lookup *of, int pairs, int streaming)
{
    for (int64_t k = 0; k < count; k += 2 * LANES) {
        V v[2];
        for (int i = 0; i < 2; i++) {
            int64_t at = k + i * LANES;
            V zero = of_groups(of->zero, index + at, pairs);
            V scale = of_groups(of->scale, index + at, pairs);
            v[i] = (to_float(load_u8(codes + at)) - zero) * scale;
        }
        if (k + 2 * LANES <= count)
            D(put_two)(to + k, v[0], v[1], streaming);
        else
            D(put_some)(to + k, v[0], v[1], count - k);
    }
}

/* Apart from where it is called, so that there is one for all widths of codes. */
static __attribute__((noinline)) void D(look_up_columns)(OUT *to, const uint8_t *codes,
                                                         const int32_t *index, int64_t count,
                                                         const qt_lookup *of, int pairs,
                                                         int streaming)
{
#define COLUMNS(pairs)                                                        \
    if (streaming)                                                            \
        D(put_columns)(to, codes, index, count, of, pairs, 1);                \
    else                                                                      \
        D(put_columns)(to, codes, index, count, of, pairs, 0)
    QT_FOR_PAIRS(pairs, COLUMNS)
#undef COLUMNS
}

/* One row of a tile. Meanwhile lines of the next one are fetched. */
ALWAYS void D(put_row)(const qt_dequantizing *d, const qt_tile *tile, int64_t row,
                       const uint8_t *codes, int bits, int streaming, const qt_lookup *of,
                       qt_reading *ahead)
{
    const qt_packing *p = &d->packing;
    int64_t col = tile->col, end = col + tile->cols;
    const float *scale = d->scale + row * d->groups;
    const uint8_t *zero = d->zero + row * d->groups;
    OUT *to = (OUT *)d->values + (row - p->origin) * p->cols + col;
    if (of->index) {
        qt_fetch_lines(ahead, ahead->left);
        look_at_row(d, row, of);
        D(look_up_columns)(to, codes, of->index + col, tile->cols, of, group_pairs(d), streaming);
        return;
    }
    int64_t group = col / d->group_size;
    for (int64_t from = col, next; from < end; from = next, group++) {
        next = qt_least(end, (group + 1) * d->group_size);
        qt_fetch_lines(ahead, qt_lines_of(next - from, bits));
        D(put_run)(to + (from - col), codes + (from - col), next - from,
                   qt_plain_nan(scale[group]), (float)zero[group], bits, streaming);
    }
}

/* Meanwhile, a few at a time, the words of the next tile are read. */
ALWAYS void D(put_tile)(const qt_dequantizing *d, qt_tile *tile, qt_tile *next, int bits,
                        int streaming, const qt_lookup *of)
{
    for (int64_t row = 0; row < tile->rows; row += tile->together) {
        qt_read_words(&d->packing, next, row / tile->together, tile->rows / tile->together);
        if (bits == 8 && d->packing.layout == QT_COLUMNS) { /* words of codes as they are */
            const uint8_t *codes = (const uint8_t *)tile->words + row * tile->stride;
            D(put_row)(d, tile, tile->row + row, codes, bits, streaming, of, &next->reading);
            continue;
        }
        qt_unpack_rows(&d->packing, tile, row, bits);
        for (int64_t r = 0; r < tile->together; r++)
            D(put_row)(d, tile, tile->row + row + r, tile->codes + r * tile->stride, bits,
                       streaming, of, &next->reading);
    }
}

#if defined(QT_ISA_AVX512)
#include "dequantize_four.h"
#endif
#if defined(QT_PLACES)
#include "dequantize_padded.h"
#endif

/* Whether to write past the caches: a matrix that no cache holds, where every vector is aligned,
 * and where the kernel is fast enough to keep such stores coming. */
static int D(streaming)(const qt_dequantizing *d)
{
    enum { CACHE = 4 << 20 };
    const qt_packing *p = &d->packing;
    int64_t row_bytes = p->cols * (int64_t)sizeof(OUT);
    if (!QT_STREAMS || (p->layout == QT_ROWS && p->bits != 4 && sizeof(OUT) < 4))
        return 0;
    if ((p->last - p->first) * row_bytes < CACHE || row_bytes % 64 || (uintptr_t)d->values % 64)
        return 0;
    return d->g_idx || d->group_size % (2 * LANES) == 0;
}

static int D(dequantize)(const qt_dequantizing *d)
{
    qt_tile one, two, *tile = &one, *next = &two, *last;
    qt_lookup lookup;
    const qt_packing *p = &d->packing;
    int streaming = D(streaming)(d);
#if defined(QT_PLACES)
    if (D(padded)(d, streaming))
        return QT_OK;
#endif
    uint32_t *space = qt_tile_space(2);
    if (!space || make_lookup(d, &lookup)) {
        free(space);
        return QT_E_MEMORY;
    }
    qt_first_tile(p, &one, space);
    qt_first_tile(p, &two, space + TILE_WORDS + TILE_SLACK / 4);
    if (one.rows)
        qt_read_words(p, &one, 0, 1);
    for (; tile->rows; last = tile, tile = next, next = last) {
        qt_place_tile(p, next, tile->row, tile->col + tile->stride);
#if defined(QT_ISA_AVX512)
        if (D(four)(d)) {
            D(put_four_tile)(d, tile, next, &lookup, streaming);
            continue;
        }
#endif
#define QT_PUT_TILE(bits) D(put_tile)(d, tile, next, bits, 0, &lookup)
#define QT_STREAM_TILE(bits) D(put_tile)(d, tile, next, bits, 1, &lookup)
        if (streaming)
            QT_FOR_BITS(p->bits, QT_STREAM_TILE)
        else
            QT_FOR_BITS(p->bits, QT_PUT_TILE)
#undef QT_PUT_TILE
#undef QT_STREAM_TILE
    }
    stream_end();
    free(space);
    free(lookup.space);
    return QT_OK;
}
