/* The scale and zero of a row and a group of columns, wherever a format keeps them. */
#ifndef QTOOL_CUDA_SCALES_H
#define QTOOL_CUDA_SCALES_H

#include "floats.h"

namespace qt {

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
    int64_t bit = i * bits, word = bit >> 5;
    int32_t shift = (int32_t)(bit & 31);
    uint32_t code = words[begin + word * step] >> shift;
    if (shift + bits > 32)
        code |= words[begin + (word + 1) * step] << (32 - shift);
    return code & ((1u << bits) - 1);
}

QT_HD float scale_of(const Task &t, int64_t row, int64_t group)
{
    return number(t.scale, t.scale_bytes, t.scale_dtype, row * t.scale_row + group * t.scale_group);
}

QT_HD int32_t nearest(float x)
{
#if defined(QT_ON_DEVICE)
    return __float2int_rn(x);
#else
    return (int32_t)__builtin_rintf(x);
#endif
}

/* `scale` is that of the row and group. */
QT_HD int32_t zero_of(const Task &t, int64_t row, int64_t group, float scale)
{
    const int32_t bits = (int32_t)t.bits, value = (int32_t)t.zero_value;
    if (t.zero_kind == ZERO_VALUE)
        return value;
    if (t.zero_kind == ZERO_BYTES)
        return In<uint8_t>(t.zero, t.zero_bytes)[row * t.zero_row + group * t.zero_group];
    if (t.zero_kind == ZERO_SCALED) {
        float scaled = of_f16(
            In<uint16_t>(t.zero, t.zero_bytes)[row * t.zero_row + group * t.zero_group]);
        return scale == 0 ? 0 : nearest(divide(-scaled, scale)) & 15;
    }
    In<uint32_t> words(t.zero, t.zero_bytes);
    if (t.zero_kind == ZERO_ACROSS)
        return (int32_t)(words[group * t.zero_group + (row >> 3)] >> awq_shift(row) & 15);
    if (t.zero_kind == ZERO_PADDED) {
        int32_t each = 32 / bits, word = (int32_t)row / each;
        uint32_t found = words[word * t.zero_row + group * t.zero_group];
        return (int32_t)(found >> ((int32_t)row % each) * bits & ((1u << bits) - 1));
    }
    uint32_t stored;
    if (t.zero_kind == ZERO_ALONG_ROWS)
        stored = stream_code(words, group * t.zero_group, t.zero_row, row, bits);
    else
        stored = stream_code(words, row * t.zero_row, 1, group, bits);
    return (int32_t)((stored + (uint32_t)value) & ((1u << bits) - 1));
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
    return !t.index && (t.group_size & 7) == 0;
}

} // namespace qt

#endif
