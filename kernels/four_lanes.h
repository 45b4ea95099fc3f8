/* Four-bit codes in the lanes of AVX-512, whatever they become: for dequantize_four.h. */
#ifndef QTOOL_FOUR_LANES_H
#define QTOOL_FOUR_LANES_H

#include "put.h"
#include "qtool_kernels.h"

/* Which part of sixteen bytes each lane takes, and how far it is shifted down: code i in nibble i,
 * or as strips have them, nibble i / 8 of half word i mod 8. For 32 lanes of sixteen bits, or for
 * two vectors of sixteen lanes. */
typedef struct {
    __m512i part, shift;
} qt_order16;

typedef struct {
    __m512i part[2], shift[2];
} qt_order32;

ALWAYS qt_order16 qt_order16_of(int strips)
{
    const qt_vi16 i = {QT_COUNT_32};
    return (qt_order16){(__m512i)(strips ? i & 7 : i >> 2),
                        (__m512i)(strips ? i >> 3 << 2 : (i & 3) << 2)};
}

ALWAYS qt_order32 qt_order32_of(int strips)
{
    qt_order32 order;
    for (int half = 0; half < 2; half++) {
        I i = iota() + 16 * half;
        order.part[half] = (__m512i)(strips ? (i & 7) >> 1 : i >> 3);
        order.shift[half] = (__m512i)(strips ? ((i & 1) << 4) + (i >> 3 << 2) : (i & 7) << 2);
    }
    return order;
}

/* The scales and zeros of a row, at most 32 of each. */
typedef struct {
    __m512 scale[2];
    __m512i zero; /* in lanes of sixteen bits */
} qt_few_groups;

ALWAYS qt_few_groups qt_few_groups_of(const qt_dequantizing *d, int64_t row)
{
    const float *scale = d->scale + row * d->groups;
    __mmask32 there = (__mmask32)(0xffffffffu >> (32 - d->groups));
    qt_few_groups of;
    for (int i = 0; i < 2; i++) {
        V some = (V)_mm512_maskz_loadu_ps((__mmask16)(there >> 16 * i), scale + 16 * i);
        of.scale[i] = (__m512)pick(eq(some, some), some, splat(NAN));
    }
    of.zero = _mm512_cvtepu8_epi16(_mm256_maskz_loadu_epi8(there, d->zero + row * d->groups));
    return of;
}

/* Two vectors' codes in lanes of sixteen bits, one of the first beside one of the second: shifts
 * part them, no shuffle is needed. Code i is in lane 2 (i mod 16) + i / 16. */
ALWAYS qt_order16 qt_beside_order_of(int strips)
{
    const qt_vi16 lane = {QT_COUNT_32}, i = (lane >> 1) + ((lane & 1) << 4);
    return (qt_order16){(__m512i)(strips ? i & 7 : i >> 2),
                        (__m512i)(strips ? i >> 3 << 2 : (i & 3) << 2)};
}

/* What the 32 codes in sixteen bytes stand for, given the group of each; `beside` has the groups in
 * that order. */
ALWAYS void qt_of_few_groups(V values[2], const qt_few_groups *of, const uint8_t *from,
                             const qt_order16 *order, const int32_t *index, const uint16_t *beside)
{
    __m512i bytes = _mm512_castsi128_si512(_mm_loadu_si128((const void *)from));
    __m512i parts = _mm512_permutexvar_epi16(order->part, bytes);
    __m512i codes = _mm512_and_si512(_mm512_srlv_epi16(parts, order->shift), _mm512_set1_epi16(15));
    __m512i zero = _mm512_permutexvar_epi16(_mm512_loadu_si512(beside), of->zero);
    I steps = (I)_mm512_sub_epi16(codes, zero), own[2] = {steps << 16 >> 16, steps >> 16};
    for (int i = 0; i < 2; i++) {
        __m512i group = _mm512_loadu_si512(index + 16 * i);
        values[i] = to_float(own[i]) * (V)_mm512_permutex2var_ps(of->scale[0], group, of->scale[1]);
    }
}

#endif
