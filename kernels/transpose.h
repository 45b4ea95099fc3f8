/* Transposing matrices of 32-bit words, four by four. */
#ifndef QTOOL_TRANSPOSE_H
#define QTOOL_TRANSPOSE_H

#include "simd.h"

typedef uint32_t qt_u32x4 __attribute__((vector_size(16)));
typedef uint16_t qt_u16x8 __attribute__((vector_size(16)));
typedef uint8_t qt_u8x8 __attribute__((vector_size(8)));

/* GCC has the name since 12. */
#if defined(__clang__) || __GNUC__ >= 12
#define QT_SHUFFLE(a, b, i, j, k, l) __builtin_shufflevector(a, b, i, j, k, l)
#else
#define QT_SHUFFLE(a, b, i, j, k, l) __builtin_shuffle(a, b, (qt_u32x4){i, j, k, l})
#endif

/* Four rows of four words; `to` and `from` with a stride in words each. */
static inline void qt_transpose_four(uint8_t *to, int64_t to_stride, const uint8_t *from,
                                     int64_t from_stride)
{
    qt_u32x4 in[4], pair[4], out[4];
    for (int i = 0; i < 4; i++)
        memcpy(&in[i], from + 4 * i * from_stride, 16);
    pair[0] = QT_SHUFFLE(in[0], in[1], 0, 4, 1, 5);
    pair[1] = QT_SHUFFLE(in[2], in[3], 0, 4, 1, 5);
    pair[2] = QT_SHUFFLE(in[0], in[1], 2, 6, 3, 7);
    pair[3] = QT_SHUFFLE(in[2], in[3], 2, 6, 3, 7);
    out[0] = QT_SHUFFLE(pair[0], pair[1], 0, 1, 4, 5);
    out[1] = QT_SHUFFLE(pair[0], pair[1], 2, 3, 6, 7);
    out[2] = QT_SHUFFLE(pair[2], pair[3], 0, 1, 4, 5);
    out[3] = QT_SHUFFLE(pair[2], pair[3], 2, 3, 6, 7);
    for (int i = 0; i < 4; i++)
        memcpy(to + 4 * i * to_stride, &out[i], 16);
}

#if defined(QT_ISA_AVX512)
/* Sixteen rows of sixteen words: in pairs of words, pairs of pairs, then quarters of the rows. */
static inline void qt_transpose_sixteen(uint8_t *to, int64_t to_stride, const uint8_t *from,
                                        int64_t from_stride)
{
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++)
        a[i] = _mm512_loadu_si512(from + 4 * i * from_stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) { /* columns i, i + 4, i + 8, i + 12 of rows 0-7 and 8-15 */
        __m512i low = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x44);
        __m512i high = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xee);
        __m512i low8 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x44);
        __m512i high8 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xee);
        b[i] = _mm512_shuffle_i32x4(low, low8, 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(low, low8, 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(high, high8, 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(high, high8, 0xdd);
    }
    for (int i = 0; i < 16; i++)
        _mm512_storeu_si512(to + 4 * i * to_stride, b[i]);
}
#endif

/* to[c][r] = from[r][c] of [rows, cols] words. */
static inline void qt_transpose_bytes(uint8_t *to, int64_t to_stride, const uint8_t *from,
                                      int64_t from_stride, int64_t rows, int64_t cols)
{
    int64_t r = 0;
#if defined(QT_ISA_AVX512)
    if (cols % 16 == 0)
        for (; r + 16 <= rows; r += 16)
            for (int64_t c = 0; c < cols; c += 16)
                qt_transpose_sixteen(to + 4 * (c * to_stride + r), to_stride,
                                     from + 4 * (r * from_stride + c), from_stride);
#endif
    for (; r + 4 <= rows; r += 4) {
        int64_t c = 0;
        for (; c + 4 <= cols; c += 4)
            qt_transpose_four(to + 4 * (c * to_stride + r), to_stride,
                              from + 4 * (r * from_stride + c), from_stride);
        for (; c < cols; c++)
            for (int64_t i = r; i < r + 4; i++)
                memcpy(to + 4 * (c * to_stride + i), from + 4 * (i * from_stride + c), 4);
    }
    for (; r < rows; r++)
        for (int64_t c = 0; c < cols; c++)
            memcpy(to + 4 * (c * to_stride + r), from + 4 * (r * from_stride + c), 4);
}

/* Into a tile's words, from words of any alignment; and back. Strides count words; the matrix in
 * the file has [rows, cols] of them. */
static inline void qt_transpose(uint32_t *tile, int64_t tile_stride, const uint8_t *file,
                                int64_t file_stride, int64_t rows, int64_t cols)
{
    qt_transpose_bytes((uint8_t *)tile, tile_stride, file, file_stride, rows, cols);
}

static inline void qt_transpose_back(uint8_t *file, int64_t file_stride, const uint32_t *tile,
                                     int64_t tile_stride, int64_t rows, int64_t cols)
{
    qt_transpose_bytes(file, file_stride, (const uint8_t *)tile, tile_stride, cols, rows);
}

#endif
