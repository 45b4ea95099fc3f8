/* float16 and bfloat16 in vectors, as integers in 32-bit lanes. Conversion rounds to nearest, ties
 * to even, and keeps NaN a NaN (quiet, with the payload's upper bits). Written in integer
 * arithmetic, so that every instruction set agrees on every bit pattern. */
#ifndef QTOOL_HALF_H
#define QTOOL_HALF_H

#include "qtool_kernels.h"
#include "simd.h"

typedef uint16_t qt_vu16x2 __attribute__((vector_size(QT_VECTOR_BYTES / 2)));

static inline qt_vu32 qt_either(qt_vi32 mask, qt_vu32 yes, qt_vu32 no)
{
    return (yes & (qt_vu32)mask) | (no & ~(qt_vu32)mask);
}

static inline qt_vu32 qt_f16_of_f32(qt_vf32 value)
{
    qt_vu32 bits = (qt_vu32)value, sign = (bits >> 16) & 0x8000, a = bits & 0x7fffffff;
    /* The exponents differ by 112. Adding half of the last place that stays, less one unless that
     * place is odd, carries exactly where rounding goes up, into infinity too. */
    qt_vu32 normal = (a - (112u << 23) + 0xfff + ((a >> 13) & 1)) >> 13;
    /* Below 2^-14 the last place is 2^-24, which is the last place of numbers from 1/2. */
    qt_vu32 small = (qt_vu32)((qt_vf32)a + 0.5f) - 0x3f000000;
    qt_vu32 result = qt_either(a < 0x38800000, small, normal);
    result = qt_either(a >= 0x47800000, (qt_vu32){0} + 0x7c00, result);
    result = qt_either(a > 0x7f800000, 0x7e00 | ((a >> 13) & 0x3ff), result);
    return sign | result;
}

static inline qt_vf32 qt_f32_of_f16(qt_vu32 half)
{
    qt_vu32 sign = (half & 0x8000) << 16, a = half & 0x7fff;
    qt_vu32 normal = (a << 13) + (112u << 23);
    qt_vu32 small = (qt_vu32)(__builtin_convertvector((qt_vi32)a, qt_vf32) * 0x1p-24f);
    qt_vu32 result = qt_either(a < 0x400, small, normal);
    result = qt_either(a >= 0x7c00, normal + (112u << 23), result);
    result = qt_either(a > 0x7c00, result | 0x400000, result);
    return (qt_vf32)(sign | result);
}

static inline qt_vu32 qt_bf16_of_f32(qt_vf32 value)
{
    qt_vu32 bits = (qt_vu32)value;
    qt_vu32 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return qt_either((bits & 0x7fffffff) > 0x7f800000, (bits >> 16) | 0x40, rounded);
}

static inline qt_vf32 qt_f32_of_bf16(qt_vu32 half)
{
    return (qt_vf32)(half << 16);
}

/* `count` values of an array, at most a vector of them, at element `at`. */
static inline qt_vf32 qt_read(const void *from, int64_t at, int dtype, size_t count)
{
    qt_vf32 value = {0};
    if (dtype == QT_F32) {
        memcpy(&value, (const float *)from + at, count * sizeof(float));
        return value;
    }
    qt_vu16x2 narrow = {0};
    memcpy(&narrow, (const uint16_t *)from + at, count * sizeof(uint16_t));
    /* One instruction where there is one: exact, and NaN becomes quiet as in qt_f32_of_f16. */
#if defined(QT_ISA_AVX512)
    if (dtype == QT_F16)
        return (qt_vf32)_mm512_cvtph_ps((__m256i)narrow);
#elif defined(QT_ISA_AVX2)
    if (dtype == QT_F16)
        return (qt_vf32)_mm256_cvtph_ps((__m128i)narrow);
#endif
    qt_vu32 wide = __builtin_convertvector(narrow, qt_vu32);
    return dtype == QT_F16 ? qt_f32_of_f16(wide) : qt_f32_of_bf16(wide);
}

static inline void qt_write(void *to, int64_t at, int dtype, size_t count, qt_vf32 value)
{
    if (dtype == QT_F32) {
        memcpy((float *)to + at, &value, count * sizeof(float));
        return;
    }
    qt_vu32 wide = dtype == QT_F16 ? qt_f16_of_f32(value) : qt_bf16_of_f32(value);
    qt_vu16x2 narrow = __builtin_convertvector(wide, qt_vu16x2);
    memcpy((uint16_t *)to + at, &narrow, count * sizeof(uint16_t));
}

#endif
