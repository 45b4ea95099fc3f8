/* Dequantizes GGUF blocks to float32, float16 or bfloat16. Every product of a block is exact in
 * float32 except where a format multiplies by a second scale or adds a minimum; the order is the
 * format's, so all instruction sets agree with it bit for bit (a NaN is some NaN). */
#include "gguf_books.h"
#include "gguf_grids.h"
#include "gguf_lanes.h"
#include "gguf_types.h"
#include "ops.h"

/* A half float; a NaN becomes the plain quiet one, whose low bits are zero, so that rounding to
 * bfloat16 need not look for it. */
ALWAYS float half_at(const uint8_t *from)
{
    uint16_t half;
    memcpy(&half, from, 2);
#if defined(QT_ISA_AVX2) || defined(QT_ISA_AVX512)
    float value = _cvtsh_ss(half);
#else
    float value;
    uint32_t sign = (half & 0x8000u) << 16, rest = (half & 0x7fffu) << 13;
    memcpy(&value, &rest, 4);
    value *= 0x1p112f;
    if ((half & 0x7c00) == 0x7c00)
        value = rest & 0x7fffff ? NAN : INFINITY;
    value = sign ? -value : value;
#endif
    return value == value ? value : NAN;
}

ALWAYS uint32_t word_at(const uint8_t *from)
{
    uint32_t word;
    memcpy(&word, from, 4);
    return word;
}

ALWAYS uint64_t words_at(const uint8_t *from)
{
    uint64_t words;
    memcpy(&words, from, 8);
    return words;
}

#if defined(QT_ISA_AVX512)
typedef int16_t qt_vi16 __attribute__((vector_size(64)));
#define QT_COUNT_32                                                                             \
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, \
        25, 26, 27, 28, 29, 30, 31
#endif

ALWAYS void put_f32(float *to, V v)
{
    store(to, v);
}

ALWAYS void put_f16(uint16_t *to, V v)
{
#if defined(QT_ISA_AVX512)
    _mm256_storeu_si256((void *)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(QT_ISA_AVX2)
    _mm_storeu_si128((void *)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    I half = to_half(v);
    for (int lane = 0; lane < LANES; lane++)
        to[lane] = (uint16_t)half[lane];
#endif
}

ALWAYS void put_bf16(uint16_t *to, V v)
{
    I rounded = (I)v + 0x7fff + ((I)v >> 16 & 1);
#if defined(QT_ISA_AVX512)
    _mm256_storeu_si256((void *)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)rounded, 16)));
#elif defined(QT_ISA_AVX2)
    __m256i high = _mm256_srli_epi32((__m256i)rounded, 16);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0x08);
    _mm_storeu_si128((void *)to, _mm256_castsi256_si128(packed));
#else
    for (int lane = 0; lane < LANES; lane++)
        to[lane] = (uint16_t)((uint32_t)rounded[lane] >> 16);
#endif
}

#if defined(QT_ISA_AVX512)
/* Two vectors, one after the other, rounded to sixteen bits. */
ALWAYS __m512i pair_f16(V a, V b)
{
    __m512i low = _mm512_castsi256_si512(_mm512_cvtps_ph((__m512)a, _MM_FROUND_TO_NEAREST_INT));
    return _mm512_inserti64x4(low, _mm512_cvtps_ph((__m512)b, _MM_FROUND_TO_NEAREST_INT), 1);
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

/* 32 weights of sixteen bits by the nibbles of 16 bytes: the low ones, then the high ones. table
 * holds the sixteen twice. */
ALWAYS void put_nibbles(uint16_t *to, const uint8_t *from, __m512i table)
{
    __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from));
    __m512i index = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(index, table));
}

/* 64 weights by the nibbles of 32 bytes: the low ones by the first sixteen of the table, the high
 * ones by the others. */
ALWAYS void put_nibbles_of_two(uint16_t *to, const uint8_t *from, __m512i table)
{
    __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)from));
    __m512i low = _mm512_and_si512(both, _mm512_set1_epi16(15));
    __m512i high = _mm512_or_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi16(16));
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(low, table));
    _mm512_storeu_si512(to + 32, _mm512_permutexvar_epi16(high, table));
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

#define OUT float
#define D(name) name##_f32
#define PUT put_f32
#define PUT2 put2_f32
#include "gguf_dequant_all.h"
#undef OUT
#undef D
#undef PUT
#undef PUT2

#define OUT uint16_t
#define D(name) name##_f16
#define PUT put_f16
#define PUT2 put2_f16
#if defined(QT_ISA_AVX512)
#define PAIR pair_f16
#endif
#include "gguf_dequant_all.h"
#undef D
#undef PUT
#undef PUT2
#undef PAIR

#define D(name) name##_bf16
#define PUT put_bf16
#define PUT2 put2_bf16
#if defined(QT_ISA_AVX512)
#define PAIR pair_bf16
#endif
#include "gguf_dequant_all.h"

int QT_NAME(gguf_dequantize)(int32_t type, int32_t dtype, int64_t blocks, const uint8_t *from,
                             void *to)
{
    switch (dtype) {
    case QT_SCALE_F32:
        return dequantize_f32(type, blocks, from, to);
    case QT_SCALE_F16:
        return dequantize_f16(type, blocks, from, to);
    case QT_SCALE_BF16:
        return dequantize_bf16(type, blocks, from, to);
    }
    return QT_E_ARGUMENT;
}
