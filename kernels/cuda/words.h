/* Codes of 2 to 8 bits in 32-bit words: value = (code - zero) * scale.
 *
 * The layouts are those of kernels/qtool_kernels.h. The difference has at most 9 bits, so it is
 * exact in float32 and the product rounds once. */
#ifndef QTOOL_CUDA_WORDS_H
#define QTOOL_CUDA_WORDS_H

#include "scales.h"

namespace qt {

enum { ROWS = 0, COLUMNS = 1, PADDED = 3 };

/* Codes col .. col + 7 of a row that is a stream: word k of `count` at begin + k * step. */
template <int BITS>
QT_HD void stream_eight(const In<uint32_t> &words, int64_t begin, int64_t step, int32_t count,
                        int32_t col, int32_t *code)
{
    int32_t bit = (col >> 3) * (8 * BITS), word = bit >> 5, shift = bit & 31;
    uint64_t run = words[begin + word * step];
    if ((BITS > 4 || (BITS == 3 && shift > 8)) && word + 1 < count)
        run |= (uint64_t)words[begin + (word + 1) * step] << 32;
    run >>= shift;
    if (BITS == 7 && shift > 8 && word + 2 < count)
        run |= (uint64_t)words[begin + (word + 2) * step] << (64 - shift);
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        code[i] = (int32_t)((uint32_t)(run >> (BITS * i)) & ((1u << BITS) - 1));
}

/* 32 / BITS codes in each word. */
template <int BITS>
QT_HD void padded_eight(const In<uint32_t> &words, int64_t begin, int32_t count, int32_t col,
                        int32_t *code)
{
    const int32_t each = 32 / BITS;
    int32_t word = col / each, before = col - word * each;
    uint32_t found[3];
    QT_UNROLL
    for (int k = 0; k < 3; k++)
        found[k] = word + k < count && k * each < before + 8 ? words[begin + word + k] : 0;
    QT_UNROLL
    for (int i = 0; i < 8; i++) {
        int32_t at = before + i;
        uint32_t own = at < each ? found[0] : at < 2 * each ? found[1] : found[2];
        int32_t shift = (at < each ? at : at < 2 * each ? at - each : at - 2 * each) * BITS;
        code[i] = (int32_t)(own >> shift & ((1u << BITS) - 1));
    }
}

/* A format says how eight columns of a row are read; `column_major` that neighbouring rows lie
 * beside each other, which decides how threads are laid out. */
template <int LAYOUT, int BITS> struct Words {
    enum { column_major = LAYOUT == COLUMNS };
    static QT_MEMBER void codes(const Task &t, int64_t row, int32_t col, int32_t *code)
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        if (LAYOUT == PADDED)
            return padded_eight<BITS>(words, row * t.pitch, (int32_t)t.pitch, col, code);
        if (LAYOUT == ROWS)
            return stream_eight<BITS>(words, row * t.pitch, 1, (int32_t)t.pitch, col, code);
        int32_t count = (int32_t)((t.cols * BITS + 31) >> 5);
        stream_eight<BITS>(words, row, t.pitch, count, col, code);
    }
};

/* AWQ GEMM: words [cols, rows / 8]. */
struct Across {
    enum { column_major = 1 };
    static QT_MEMBER void codes(const Task &t, int64_t row, int32_t col, int32_t *code)
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        int32_t shift = awq_shift(row);
        int64_t at = col * t.pitch + (row >> 3);
        QT_UNROLL
        for (int i = 0; i < 8; i++, at += t.pitch)
            code[i] = col + i < t.cols ? (int32_t)(words[at] >> shift & 15) : 0;
    }
};

/* GEMV-fast: for each 64 columns 16 half words of each of four rows, 8 for each 32 columns; nibble
 * j of half word m is column 8j + m. */
struct Strips {
    enum { column_major = 0 };
    static QT_MEMBER void codes(const Task &t, int64_t row, int32_t col, int32_t *code)
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        int64_t strip = (row >> 2) * (t.cols >> 6) + (col >> 6);
        int64_t at = (strip * 4 + (row & 3)) * 8 + (col >> 5 & 1) * 4;
        Four run = words.wide<Four>(at);
        int32_t shift = (col >> 3 & 3) * 4;
        QT_UNROLL
        for (int m = 0; m < 8; m++)
            code[m] = (int32_t)(run.word[m / 2] >> (16 * (m % 2) + shift) & 15);
    }
};

/* The values of any of them. */
template <class Codes> struct Grouped {
    enum { column_major = Codes::column_major };
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        int32_t code[8];
        Codes::codes(t, row, col, code);
        if (group_follows(t)) {
            int32_t group = group_of(t, col);
            float scale = scale_of(t, row, group);
            int32_t zero = zero_of(t, row, group, scale);
            QT_UNROLL
            for (int i = 0; i < 8; i++)
                w[i] = mul(small(code[i] - zero), scale);
            return;
        }
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            int32_t group = col + i < t.cols ? group_of(t, col + i) : 0;
            float scale = scale_of(t, row, group);
            w[i] = mul(small(code[i] - zero_of(t, row, group, scale)), scale);
        }
    }
};

} // namespace qt

#endif
