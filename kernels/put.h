/* Vectors of float32 stored as float32, float16 or bfloat16, rounded to nearest even. A NaN whose
 * low sixteen bits are not zero may round to something else in bfloat16: see qt_plain_nan. */
#ifndef QTOOL_PUT_H
#define QTOOL_PUT_H

#include "gguf_lanes.h"

/* The number itself, or the NaN whose low bits are zero. A product of it with a number that is not
 * such a NaN itself is safe to store as bfloat16. */
ALWAYS float qt_plain_nan(float x)
{
    return x == x ? x : NAN;
}

#if !defined(QT_ISA_AVX512) && !defined(QT_ISA_AVX2)
typedef uint16_t qt_vhalves __attribute__((vector_size(LANES * 2)));
#endif

#if defined(QT_ISA_AVX512)
typedef int16_t qt_vi16 __attribute__((vector_size(64)));
#define QT_COUNT_32                                                                             \
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, \
        25, 26, 27, 28, 29, 30, 31
#endif

/* A vector of stored numbers. */
#if defined(QT_ISA_AVX512)
typedef __m256i qt_vhalf;
#elif defined(QT_ISA_AVX2)
typedef __m128i qt_vhalf;
#else
typedef qt_vhalves qt_vhalf;
#endif

ALWAYS qt_vhalf round_f16(V v)
{
#if defined(QT_ISA_AVX512)
    return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT);
#elif defined(QT_ISA_AVX2)
    return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    return __builtin_convertvector(to_half(v), qt_vhalves);
#endif
}

ALWAYS qt_vhalf round_bf16(V v)
{
    I rounded = (I)v + 0x7fff + ((I)v >> 16 & 1);
#if defined(QT_ISA_AVX512)
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16));
#elif defined(QT_ISA_AVX2)
    __m256i high = _mm256_srli_epi32((__m256i)rounded, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    return _mm256_castsi256_si128(packed);
#else
    return __builtin_convertvector(rounded >> 16, qt_vhalves);
#endif
}

ALWAYS void put_f32(float *to, V v)
{
    memcpy(to, &v, sizeof v);
}

ALWAYS void put_f16(uint16_t *to, V v)
{
    qt_vhalf halves = round_f16(v);
    memcpy(to, &halves, sizeof halves);
}

ALWAYS void put_bf16(uint16_t *to, V v)
{
    qt_vhalf halves = round_bf16(v);
    memcpy(to, &halves, sizeof halves);
}

#if defined(QT_ISA_AVX512)
/* Two vectors, one after the other, rounded to sixteen bits. */
ALWAYS __m512i pair_f16(V a, V b)
{
    return _mm512_inserti64x4(_mm512_castsi256_si512(round_f16(a)), round_f16(b), 1);
}

/* High halves go up by one where the low half is above the middle, or on it beside an odd high
 * half: there, or-ing the odd bit in lifts it above. */
ALWAYS __m512i pair_bf16(V a, V b)
{
    const __m512i even = (__m512i)(2 * (qt_vi16){QT_COUNT_32}), one = _mm512_set1_epi16(1);
    const __m512i odd = _mm512_add_epi16(even, one);
    __m512i high = _mm512_permutex2var_epi16((__m512i)a, odd, (__m512i)b);
    __m512i low = _mm512_permutex2var_epi16((__m512i)a, even, (__m512i)b);
    low = _mm512_ternarylogic_epi32(low, high, one, 0xf8); /* low | (high & one) */
    __mmask32 up = _mm512_cmpgt_epu16_mask(low, _mm512_set1_epi16((short)0x8000));
    return _mm512_mask_add_epi16(high, up, high, one);
}
#endif

/* Two vectors, one after the other. */
ALWAYS void put2_f32(float *to, V a, V b)
{
    put_f32(to, a);
    put_f32(to + LANES, b);
}

ALWAYS void put2_f16(uint16_t *to, V a, V b)
{
    put_f16(to, a);
    put_f16(to + LANES, b);
}

ALWAYS void put2_bf16(uint16_t *to, V a, V b)
{
#if defined(QT_ISA_AVX512)
    _mm512_storeu_si512(to, pair_bf16(a, b));
#else
    put_bf16(to, a);
    put_bf16(to + LANES, b);
#endif
}

/* The same by stores that pass the caches, to a multiple of a vector's bytes; plain stores where
 * the instruction set has no such. A matrix much larger than the caches that is written in short
 * pieces of many rows is written twice as fast that way: no line is fetched first. */
#if defined(QT_ISA_AVX512) || defined(QT_ISA_AVX2)
enum { QT_STREAMS = 1 };
#else
enum { QT_STREAMS = 0 };
#endif

ALWAYS void stream_f32(float *to, V v)
{
#if defined(QT_ISA_AVX512)
    _mm512_stream_ps(to, (__m512)v);
#elif defined(QT_ISA_AVX2)
    _mm256_stream_ps(to, (__m256)v);
#else
    put_f32(to, v);
#endif
}

ALWAYS void stream2_f32(float *to, V a, V b)
{
    stream_f32(to, a);
    stream_f32(to + LANES, b);
}

ALWAYS void stream2_f16(uint16_t *to, V a, V b)
{
#if defined(QT_ISA_AVX512)
    _mm512_stream_si512((void *)to, pair_f16(a, b));
#elif defined(QT_ISA_AVX2)
    _mm_stream_si128((void *)to, round_f16(a));
    _mm_stream_si128((void *)(to + LANES), round_f16(b));
#else
    put2_f16(to, a, b);
#endif
}

ALWAYS void stream2_bf16(uint16_t *to, V a, V b)
{
#if defined(QT_ISA_AVX512)
    _mm512_stream_si512((void *)to, pair_bf16(a, b));
#elif defined(QT_ISA_AVX2)
    _mm_stream_si128((void *)to, round_bf16(a));
    _mm_stream_si128((void *)(to + LANES), round_bf16(b));
#else
    put2_bf16(to, a, b);
#endif
}

/* After the last of them, before another thread may look. */
ALWAYS void stream_end(void)
{
#if defined(QT_ISA_AVX512) || defined(QT_ISA_AVX2)
    _mm_sfence();
#endif
}

#endif
