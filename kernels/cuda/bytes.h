/* Codes that are numbers by themselves: integers and floats of eight bits, floats of four.
 *
 *     int8, uint8            (code - zero) * scale of the code's block
 *     float8 e4m3fn, e5m2    code * scale
 *     four-bit floats        code * (scale * outer), or scale / outer
 *
 * The arithmetic is that of kernels/bytes.c and kernels/fp4.c. */
#ifndef QTOOL_CUDA_BYTES_H
#define QTOOL_CUDA_BYTES_H

#include "scales.h"

namespace qt {

/* Four bits of exponent (bias 7), three of mantissa; 0x7f is NaN, nothing is infinite. As a float
 * with the same bits below its sign, subnormal ones included, it is 2^-120 times too small. */
QT_HD float of_e4m3(uint32_t code)
{
    uint32_t bits = (uint32_t)((int32_t)(code << 24) >> 4) & 0x87f00000u;
    bits = bits_of_float(mul(float_of_bits(bits), 0x1p120f));
    return float_of_bits((code & 127) == 127 ? (code & 128) << 24 | 0x7fc00000 : bits);
}

/* The upper half of a float16. */
QT_HD float of_e5m2(uint32_t code) { return of_f16(code << 8); }

enum { I8 = 0, U8 = 1, E4M3 = 2, E5M2 = 3 };

template <int KIND> struct Bytes {
    enum { lean = 1 };
    static QT_MEMBER float value(uint32_t code)
    {
        return KIND == E4M3 ? of_e4m3(code) : KIND == E5M2 ? of_e5m2(code)
               : KIND == I8 ? small((int8_t)code) : small((int32_t)code);
    }
    static QT_MEMBER float zero_of_code(uint32_t code)
    {
        return KIND == I8 ? small((int8_t)code) : small((int32_t)code);
    }
    static QT_MEMBER float zero(const Task &t, int64_t at)
    {
        if (KIND > U8 || !t.zero)
            return 0.0f;
        return zero_of_code(In<uint8_t>(t.zero, t.zero_bytes)[at]);
    }
    /* Where the scales of a row begin. */
    static QT_MEMBER int64_t scales_at(const Task &t, int64_t row)
    {
        uint32_t down = t.block_rows == 1 ? (uint32_t)row : (uint32_t)row / (uint32_t)t.block_rows;
        return product(down, t.scale_row);
    }
    static QT_MEMBER bool at_once(const Task &t) { return (int32_t)t.group_shift >= 3; }
    template <int STEPS>
    static QT_MEMBER void steps(const Task &t, int64_t row, int32_t col, float (*w)[8])
    {
        In<uint8_t> bytes(t.codes, t.codes_bytes);
        int64_t from = product(row, t.pitch) + col, begin = scales_at(t, row);
        Two code[STEPS];
        int32_t group[STEPS];
        uint32_t scale[STEPS];
        float less[STEPS];
        QT_UNROLL
        for (int k = 0; k < STEPS; k++) {
            code[k] = bytes.wide<Two>(from + k * STEP);
            group[k] = (col + k * STEP) >> (int32_t)t.group_shift;
            less[k] = 0.0f;
        }
        bits_of_numbers<STEPS>(t.scale, t.scale_bytes, (int32_t)t.scale_dtype, begin, group, 1, scale);
        if (KIND <= U8 && t.zero) {
            QT_UNROLL
            for (int k = 0; k < STEPS; k++)
                less[k] = zero(t, begin + group[k]);
        }
        QT_UNROLL
        for (int k = 0; k < STEPS; k++) {
            float own = number_of_bits((int32_t)t.scale_dtype, scale[k]);
            QT_UNROLL
            for (int i = 0; i < 8; i++)
                w[k][i] = mul(sub(value(code[k].word[i / 4] >> (8 * (i % 4)) & 255), less[k]), own);
        }
    }
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        In<uint8_t> bytes(t.codes, t.codes_bytes);
        int64_t from = product(row, t.pitch) + col, begin = scales_at(t, row);
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            bool own = col + i < t.cols;
            uint32_t code = own ? bytes[from + i] : 0;
            int64_t at = begin + (own ? group_of(t, col + i) : 0);
            float scale = number(t.scale, t.scale_bytes, (int32_t)t.scale_dtype, at);
            w[i] = mul(sub(value(code), zero(t, at)), scale);
        }
    }
};

/* 2^(code - 127), 255 is NaN. */
QT_HD float of_e8m0(uint32_t code)
{
    return float_of_bits(code == 255 ? 0x7fc00000u : code ? code << 23 : 0x400000u);
}

/* E2M1: 0 1/2 1 3/2 2 3 4 6, then the same negative; eight codes of a word. Doubled, they are bytes
 * of a table; below a 2^22 a unit is one half. */
QT_HD void eight_of_e2m1(uint32_t run, float *w)
{
    uint32_t doubled[2];
    QT_UNROLL
    for (int k = 0; k < 2; k++)
        doubled[k] = byte_perm(0x03020100, 0x0c080604, run >> (16 * k) & 0x7777);
    QT_UNROLL
    for (int i = 0; i < 8; i++) {
        uint32_t above = byte_perm(doubled[i / 4], 0x4a800000, 0x7640 + i % 4);
        uint32_t size = bits_of_float(sub(float_of_bits(above), 4194304.0f));
        w[i] = float_of_bits(size | (run << (28 - 4 * i) & 0x80000000u));
    }
}

enum { SCALE_E8M0 = 0, SCALE_E4M3 = 1 };

/* Groups are a multiple of eight columns. */
template <int SCALE> struct Fp4 {
    enum { lean = 1 };
    static QT_MEMBER bool at_once(const Task &t) { return (int32_t)t.group_shift >= 3; }
    /* What a group is multiplied with. */
    static QT_MEMBER float scale_of(const Task &t, uint32_t code)
    {
        float scale = SCALE == SCALE_E8M0 ? of_e8m0(code) : of_e4m3(code);
        float outer = float_of_bits((uint32_t)t.outer);
        return t.divide ? divide(scale, outer) : mul(scale, outer);
    }
    static QT_MEMBER void values(const Task &t, uint32_t run, uint32_t code, float *w)
    {
        float scale = scale_of(t, code), book[8];
        eight_of_e2m1(run, book);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(book[i], scale);
    }
    template <int STEPS>
    static QT_MEMBER void steps(const Task &t, int64_t row, int32_t col, float (*w)[8])
    {
        In<uint8_t> bytes(t.codes, t.codes_bytes), scales(t.scale, t.scale_bytes);
        int64_t from = product(row, t.pitch) + col / 2, begin = product(row, t.scale_row);
        uint32_t run[STEPS], code[STEPS];
        QT_UNROLL
        for (int k = 0; k < STEPS; k++) {
            run[k] = bytes.wide<uint32_t>(from + k * (STEP / 2));
            code[k] = scales[begin + ((col + k * STEP) >> (int32_t)t.group_shift)];
        }
        QT_UNROLL
        for (int k = 0; k < STEPS; k++)
            values(t, run[k], code[k], w[k]);
    }
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        uint32_t run = In<uint8_t>(t.codes, t.codes_bytes).wide<uint32_t>(product(row, t.pitch) + col / 2);
        uint32_t code = In<uint8_t>(t.scale, t.scale_bytes)[product(row, t.scale_row) + group_of(t, col)];
        values(t, run, code, w);
    }
};

} // namespace qt

#endif
