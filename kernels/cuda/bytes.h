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

/* Four bits of exponent (bias 7), three of mantissa; 0x7f is NaN, nothing is infinite. */
QT_HD float of_e4m3(uint32_t code)
{
    uint32_t size = code & 127, bits = (size << 20) + (120u << 23);
    if (size < 8)
        bits = bits_of_float(mul(small((int32_t)size), 0x1p-9f));
    if (size == 127)
        bits = 0x7fc00000;
    return float_of_bits(bits | (code & 128) << 24);
}

/* The upper half of a float16. */
QT_HD float of_e5m2(uint32_t code) { return of_f16(code << 8); }

enum { I8 = 0, U8 = 1, E4M3 = 2, E5M2 = 3 };

template <int KIND> struct Bytes {
    enum { column_major = 0 };
    static QT_MEMBER float value(uint32_t code)
    {
        return KIND == E4M3 ? of_e4m3(code) : KIND == E5M2 ? of_e5m2(code)
               : KIND == I8 ? small((int8_t)code) : small((int32_t)code);
    }
    static QT_MEMBER float zero(const Task &t, int64_t at)
    {
        if (KIND > U8 || !t.zero)
            return 0.0f;
        uint32_t code = In<uint8_t>(t.zero, t.zero_bytes)[at];
        return KIND == I8 ? small((int8_t)code) : small((int32_t)code);
    }
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        In<uint8_t> bytes(t.codes, t.codes_bytes);
        int64_t from = row * t.pitch + col;
        uint32_t code[8];
        if ((t.cols & 7) == 0) {
            uint32_t low = bytes.wide<uint32_t>(from), high = bytes.wide<uint32_t>(from + 4);
            QT_UNROLL
            for (int i = 0; i < 4; i++) {
                code[i] = low >> (8 * i) & 255;
                code[4 + i] = high >> (8 * i) & 255;
            }
        } else {
            QT_UNROLL
            for (int i = 0; i < 8; i++)
                code[i] = col + i < t.cols ? bytes[from + i] : 0;
        }
        uint32_t down = t.block_rows == 1 ? (uint32_t)row : (uint32_t)row / (uint32_t)t.block_rows;
        int64_t begin = down * t.scale_row;
        if (group_follows(t)) {
            int64_t at = begin + group_of(t, col);
            float scale = number(t.scale, t.scale_bytes, t.scale_dtype, at), z = zero(t, at);
            QT_UNROLL
            for (int i = 0; i < 8; i++)
                w[i] = mul(sub(value(code[i]), z), scale);
            return;
        }
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            int64_t at = begin + (col + i < t.cols ? group_of(t, col + i) : 0);
            float scale = number(t.scale, t.scale_bytes, t.scale_dtype, at);
            w[i] = mul(sub(value(code[i]), zero(t, at)), scale);
        }
    }
};

/* 2^(code - 127), 255 is NaN. */
QT_HD float of_e8m0(uint32_t code)
{
    return float_of_bits(code == 255 ? 0x7fc00000u : code ? code << 23 : 0x400000u);
}

/* E2M1: 0 1/2 1 3/2 2 3 4 6, then the same negative. */
QT_HD float of_e2m1(uint32_t code)
{
    uint32_t doubled = (code & 4 ? 0x0c080604u : 0x03020100u) >> (8 * (code & 3)) & 255;
    uint32_t size = bits_of_float(mul(small((int32_t)doubled), 0.5f));
    return float_of_bits(size | (code & 8) << 28);
}

enum { SCALE_E8M0 = 0, SCALE_E4M3 = 1 };

template <int SCALE> struct Fp4 {
    enum { column_major = 0 };
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        uint32_t run = In<uint8_t>(t.codes, t.codes_bytes).wide<uint32_t>(row * t.pitch + col / 2);
        uint32_t code = In<uint8_t>(t.scale, t.scale_bytes)[row * t.scale_row + group_of(t, col)];
        float scale = SCALE == SCALE_E8M0 ? of_e8m0(code) : of_e4m3(code);
        float outer = float_of_bits((uint32_t)t.outer);
        scale = t.divide ? divide(scale, outer) : mul(scale, outer);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(of_e2m1(run >> (4 * i) & 15), scale);
    }
};

} // namespace qt

#endif
