/* The scale and zero of a row and a group of columns, wherever a format keeps them. */
#ifndef QTOOL_CUDA_SCALES_H
#define QTOOL_CUDA_SCALES_H

#include "floats.h"

namespace qt {

enum { STEP = 256 /* columns from the eight that a thread has at one step to the next (grid.h) */ };

/* Where zeros are. A stream holds codes of `bits` bits one after the other in 32-bit words. Kinds
 * that have one add zero_value to what is stored, in a field of `bits` bits (GPTQ version 1).
 *
 *   VALUE         zero_value for all
 *   BYTES         uint8 at zero_row * row + zero_group * group
 *   ALONG_ROWS    a stream of rows for each group, word k of it at zero_row * k + zero_group * group
 *                 (GPTQ: zero_row = 1; compressed-tensors: zero_group = 1)
 *   ALONG_GROUPS  a stream of groups for each row, word k of it at zero_row * row + k (AWQ GEMV)
 *   PADDED        as ALONG_ROWS, 32 / bits codes in each word and none across two
 *   ACROSS        nibbles of the word zero_group * group + row / 8 in AWQ's order
 *   SCALED        float16 -(scale * zero) at zero_row * row + zero_group * group (GEMV-fast) */
enum {
    ZERO_VALUE = 0,
    ZERO_BYTES = 1,
    ZERO_ALONG_ROWS = 2,
    ZERO_ALONG_GROUPS = 3,
    ZERO_PADDED = 4,
    ZERO_ACROSS = 5,
    ZERO_SCALED = 6
};

/* Nibble i of a word is row order[i] of eight, order = 0 2 4 6 1 3 5 7: here the inverse, in bits. */
QT_HD int32_t awq_shift(int64_t row)
{
    return (int32_t)((row & 6) * 2 + (row & 1) * 16);
}

/* Code number i of a stream whose word k lies at begin + k * step. */
QT_HD uint32_t stream_code(const In<uint32_t> &words, int64_t begin, int64_t step, int64_t i,
                           int32_t bits)
{
    uint32_t bit = (uint32_t)i * (uint32_t)bits, word = bit >> 5, shift = bit & 31;
    uint32_t code = words[begin + product(word, step)] >> shift;
    if (shift + (uint32_t)bits > 32)
        code |= words[begin + product(word + 1, step)] << (32 - shift);
    return code & ((1u << bits) - 1);
}

/* Scales of N groups of a row, as bits. */
template <int N>
QT_HD void scale_bits(const Task &t, int64_t row, const int32_t *group, uint32_t *bits)
{
    bits_of_numbers<N>(t.scale, t.scale_bytes, (int32_t)t.scale_dtype, product(row, t.scale_row), group,
                       t.scale_group, bits);
}

QT_HD int32_t nearest(float x)
{
#if defined(QT_ON_DEVICE)
    return __float2int_rn(x);
#else
    return (int32_t)__builtin_rintf(x);
#endif
}

/* Zeros of N groups of a row; `scale`: bits of their scales. */
template <int N>
QT_HD void zeros_of(const Task &t, int64_t row, const int32_t *group, const uint32_t *scale,
                    int32_t *zero)
{
    const int32_t bits = (int32_t)t.bits, value = (int32_t)t.zero_value;
    const uint32_t mask = (1u << bits) - 1;
    const int64_t begin = product(row, t.zero_row);
    In<uint32_t> words(t.zero, t.zero_bytes);
    uint32_t found[N];
    if (t.zero_kind == ZERO_VALUE) {
        QT_UNROLL
        for (int k = 0; k < N; k++)
            zero[k] = value;
    } else if (t.zero_kind == ZERO_BYTES) {
        QT_UNROLL
        for (int k = 0; k < N; k++)
            zero[k] = In<uint8_t>(t.zero, t.zero_bytes)[begin + product(group[k], t.zero_group)];
    } else if (t.zero_kind == ZERO_SCALED) {
        QT_UNROLL
        for (int k = 0; k < N; k++)
            found[k] = In<uint16_t>(t.zero, t.zero_bytes)[begin + product(group[k], t.zero_group)];
        QT_UNROLL
        for (int k = 0; k < N; k++) {
            float own = number_of_bits((int32_t)t.scale_dtype, scale[k]);
            zero[k] = own == 0 ? 0 : nearest(divide(-of_f16(found[k]), own)) & 15;
        }
    } else if (t.zero_kind == ZERO_ACROSS) {
        QT_UNROLL
        for (int k = 0; k < N; k++)
            found[k] = words[product(group[k], t.zero_group) + (row >> 3)];
        QT_UNROLL
        for (int k = 0; k < N; k++)
            zero[k] = (int32_t)(found[k] >> awq_shift(row) & 15);
    } else if (t.zero_kind == ZERO_PADDED) {
        uint32_t each = 32 / (uint32_t)bits, word = (uint32_t)row / each;
        int32_t shift = (int32_t)((uint32_t)row - word * each) * bits;
        QT_UNROLL
        for (int k = 0; k < N; k++)
            found[k] = words[product(word, t.zero_row) + product(group[k], t.zero_group)];
        QT_UNROLL
        for (int k = 0; k < N; k++)
            zero[k] = (int32_t)(found[k] >> shift & mask);
    } else {
        bool along_rows = t.zero_kind == ZERO_ALONG_ROWS;
        QT_UNROLL
        for (int k = 0; k < N; k++)
            found[k] = along_rows
                           ? stream_code(words, product(group[k], t.zero_group), t.zero_row, row, bits)
                           : stream_code(words, begin, 1, group[k], bits);
        QT_UNROLL
        for (int k = 0; k < N; k++)
            zero[k] = (int32_t)((found[k] + (uint32_t)value) & mask);
    }
}

/* The zero of a row and group, and its scale. */
QT_HD int32_t zero_and_scale(const Task &t, int64_t row, int32_t group, float *scale)
{
    uint32_t bits;
    int32_t zero;
    scale_bits<1>(t, row, &group, &bits);
    zeros_of<1>(t, row, &group, &bits, &zero);
    *scale = number_of_bits((int32_t)t.scale_dtype, bits);
    return zero;
}

/* The group of a column. */
QT_HD int32_t group_of(const Task &t, int32_t col)
{
    if (t.index)
        return In<int32_t>(t.index, t.index_bytes)[col];
    if (t.group_shift >= 0)
        return col >> (int32_t)t.group_shift;
    return (int32_t)((uint32_t)col / (uint32_t)t.group_size);
}

/* Whether eight columns from a multiple of eight on share their group. */
QT_HD bool group_follows(const Task &t)
{
    return !t.index && (t.group_shift >= 3 || (t.group_size & 7) == 0);
}

} // namespace qt

#endif
