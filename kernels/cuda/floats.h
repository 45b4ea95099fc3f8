/* float32 to and from the floats of sixteen bits, rounded to nearest even; a NaN stays some NaN. */
#ifndef QTOOL_CUDA_FLOATS_H
#define QTOOL_CUDA_FLOATS_H

#include "base.h"

namespace qt {

QT_HD uint32_t f16_of(float value)
{
#if defined(QT_ON_DEVICE)
    uint16_t half;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    uint32_t bits = bits_of_float(value), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
    if (a > 0x7f800000)
        return sign | 0x7e00;
    if (a >= 0x47800000)
        return sign | 0x7c00;
    if (a < 0x38800000) /* the last place is 2^-24, which is that of numbers from 1/2 */
        return sign | (bits_of_float(float_of_bits(a) + 0.5f) - 0x3f000000);
    return sign | (a - (112u << 23) + 0xfff + (a >> 13 & 1)) >> 13;
#endif
}

QT_HD float of_f16(uint32_t half)
{
#if defined(QT_ON_DEVICE)
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"((uint16_t)half));
    return value;
#else
    uint32_t sign = (half & 0x8000) << 16, a = half & 0x7fff;
    if (a >= 0x7c00)
        return float_of_bits(sign | a << 13 | 0x7f800000);
    float size = a < 0x400 ? (float)(int32_t)a * 0x1p-24f : float_of_bits((a << 13) + (112u << 23));
    return float_of_bits(sign | bits_of_float(size));
#endif
}

QT_HD uint32_t bf16_of(float value)
{
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
    uint16_t half;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(value));
    return half;
#else
    uint32_t bits = bits_of_float(value);
    if ((bits & 0x7fffffff) > 0x7f800000)
        return (bits >> 16) | 0x40;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
#endif
}

QT_HD float of_bf16(uint32_t half) { return float_of_bits(half << 16); }

/* Two at once, the first in the low half: one instruction from sm_80 on. */
QT_HD uint32_t two_f16(float low, float high)
{
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return f16_of(low) | f16_of(high) << 16;
#endif
}

QT_HD uint32_t two_bf16(float low, float high)
{
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
    uint32_t both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
#else
    return bf16_of(low) | bf16_of(high) << 16;
#endif
}

/* What a kernel writes: how one number is stored, and eight of them as one or two Fours. */
struct f32 {
    typedef uint32_t Bits;
    enum { FOURS = 2 };
    static QT_MEMBER Bits one(float value) { return bits_of_float(value); }
    static QT_MEMBER void eight(const float *w, Four *to)
    {
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            to[i / 4].word[i % 4] = bits_of_float(w[i]);
    }
};

struct f16 {
    typedef uint16_t Bits;
    enum { FOURS = 1 };
    static QT_MEMBER Bits one(float value) { return (Bits)f16_of(value); }
    static QT_MEMBER void eight(const float *w, Four *to)
    {
        QT_UNROLL
        for (int i = 0; i < 4; i++)
            to->word[i] = two_f16(w[2 * i], w[2 * i + 1]);
    }
};

struct bf16 {
    typedef uint16_t Bits;
    enum { FOURS = 1 };
    static QT_MEMBER Bits one(float value) { return (Bits)bf16_of(value); }
    static QT_MEMBER void eight(const float *w, Four *to)
    {
        QT_UNROLL
        for (int i = 0; i < 4; i++)
            to->word[i] = two_bf16(w[2 * i], w[2 * i + 1]);
    }
};

/* The bits of elements begin + index * step of numbers of a dtype, N of them. What is made of bits is a
 * function by itself, so that a thread can ask for more before it waits for them. */
template <int N>
QT_HD void bits_of_numbers(int64_t address, int64_t bytes, int32_t dtype, int64_t begin,
                           const int32_t *index, int64_t step, uint32_t *bits)
{
    QT_UNROLL
    for (int k = 0; k < N; k++)
        bits[k] = dtype == F32 ? In<uint32_t>(address, bytes)[begin + product(index[k], step)]
                               : In<uint16_t>(address, bytes)[begin + product(index[k], step)];
}

QT_HD float number_of_bits(int32_t dtype, uint32_t bits)
{
    return dtype == F32 ? float_of_bits(bits) : dtype == F16 ? of_f16(bits) : of_bf16(bits);
}

/* Element i. */
QT_HD float number(int64_t address, int64_t bytes, int32_t dtype, int64_t i)
{
    const int32_t none = 0;
    uint32_t found;
    bits_of_numbers<1>(address, bytes, dtype, i, &none, 1, &found);
    return number_of_bits(dtype, found);
}

} // namespace qt

#endif
