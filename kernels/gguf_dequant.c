/* Dequantizes GGUF blocks to float32, float16 or bfloat16. Every product of a block is exact in
 * float32 except where a format multiplies by a second scale or adds a minimum; the order is the
 * format's, so all instruction sets agree with it bit for bit (a NaN is some NaN). */
#include "gguf_books.h"
#include "gguf_grids.h"
#include "gguf_lanes.h"
#include "gguf_types.h"
#include "ops.h"
#include "put.h"

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

/* Keeps an array out of registers. Numbers that are loaded into all lanes at once cost nothing
 * beyond the load; from a register they cost a shuffle each. */
#define IN_MEMORY(array) __asm__ volatile("" : "+m"(array))

#if defined(QT_ISA_AVX512)
ALWAYS void put_line(uint16_t *to, __m512i line, int past_caches)
{
    if (past_caches)
        _mm512_stream_si512((void *)to, line);
    else
        _mm512_storeu_si512(to, line);
}

/* 32 weights of sixteen bits by the nibbles of 16 bytes: the low ones, then the high ones. table
 * holds the sixteen twice. */
ALWAYS void put_nibbles(uint16_t *to, const uint8_t *from, __m512i table, int past_caches)
{
    __m256i low = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)from));
    __m512i index = _mm512_inserti64x4(_mm512_castsi256_si512(low), _mm256_srli_epi16(low, 4), 1);
    put_line(to, _mm512_permutexvar_epi16(index, table), past_caches);
}

/* 64 weights by the nibbles of 32 bytes: the low ones by the first sixteen of the table, the high
 * ones by the others. */
ALWAYS void put_nibbles_of_two(uint16_t *to, const uint8_t *from, __m512i table, int past_caches)
{
    __m512i both = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)from));
    __m512i low = _mm512_and_si512(both, _mm512_set1_epi16(15));
    __m512i high = _mm512_or_si512(_mm512_srli_epi16(both, 4), _mm512_set1_epi16(16));
    put_line(to, _mm512_permutexvar_epi16(low, table), past_caches);
    put_line(to + 32, _mm512_permutexvar_epi16(high, table), past_caches);
}
#endif

#define PAST_CACHES 0
#define QT_BODY "gguf_dequant_all.h"
#include "each_dtype.h"
#undef PAST_CACHES

#if defined(QT_ISA_AVX512)
#define PAST_CACHES 1
#define QT_PAST_CACHES
#define QT_BODY "gguf_dequant_all.h"
#include "each_dtype.h"

/* Whether to write past the caches: more than they hold, where every vector is a cache line. */
static int past_caches(int32_t type, int32_t dtype, int64_t blocks, const void *to)
{
    enum { CACHE = 4 << 20 };
    int64_t block = dtype == QT_SCALE_F32 ? 4 : 2; /* bytes */
    switch (type) {
#define CASE(name, number, weights, bytes) \
    case number:                           \
        block *= weights;                  \
        break;
        QT_GGUF_TYPES(CASE)
#undef CASE
    }
    return blocks >= CACHE / block && (uintptr_t)to % 64 == 0;
}

static int dequantize_past(int32_t type, int32_t dtype, int64_t blocks, const uint8_t *from,
                           void *to)
{
    int code = QT_E_ARGUMENT;
    if (dtype == QT_SCALE_F32)
        code = dequantize_past_f32(type, blocks, from, to);
    else if (dtype == QT_SCALE_F16)
        code = dequantize_past_f16(type, blocks, from, to);
    else if (dtype == QT_SCALE_BF16)
        code = dequantize_past_bf16(type, blocks, from, to);
    stream_end();
    return code;
}
#endif

int QT_NAME(gguf_dequantize)(int32_t type, int32_t dtype, int64_t blocks, const uint8_t *from,
                             void *to)
{
#if defined(QT_ISA_AVX512)
    if (past_caches(type, dtype, blocks, to))
        return dequantize_past(type, dtype, blocks, from, to);
#endif
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
