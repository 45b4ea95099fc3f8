/* Lanes: the vector of the instruction set, the masks that its comparisons give, and the elementwise
 * operations that the GGUF kernels need. Nothing here rounds differently from plain IEEE float32,
 * so a lane computes what scalar code would. */
#ifndef QTOOL_GGUF_LANES_H
#define QTOOL_GGUF_LANES_H

#include "simd.h"

#if defined(__SSE2__) && !defined(QT_ISA_AVX2) && !defined(QT_ISA_AVX512)
#include <emmintrin.h>
#endif

#define LANES QT_F32_LANES
#define ALWAYS static inline __attribute__((always_inline))

/* Long loops unrolled whole outgrow the cache of decoded instructions. */
#if defined(__clang__)
#define UNROLL_SOME _Pragma("clang loop unroll_count(8)")
#else
#define UNROLL_SOME _Pragma("GCC unroll 8")
#endif

typedef qt_vf32 V;
typedef qt_vi32 I;
#if defined(QT_ISA_AVX512)
typedef __mmask16 M;
#else
typedef qt_vi32 M;
#endif

ALWAYS V load(const float *from)
{
    V v;
    memcpy(&v, from, sizeof v);
    return v;
}

ALWAYS void store(float *to, V v)
{
    memcpy(to, &v, sizeof v);
}

ALWAYS V splat(float x)
{
    return x - (V){0};
}

ALWAYS I isplat(int32_t x)
{
    return x - (I){0};
}

/* 0, 1, 2, ... */
ALWAYS I iota(void)
{
    I v;
    for (int lane = 0; lane < LANES; lane++)
        v[lane] = lane;
    return v;
}

/* The bits of numbers, and numbers of bits. */
ALWAYS I bits_of(V v) { return (I)v; }
ALWAYS V of_bits(I v) { return (V)v; }

ALWAYS V to_float(I v)
{
    return __builtin_convertvector(v, V);
}

#if defined(QT_ISA_AVX512)

ALWAYS M lt(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ); }
ALWAYS M le(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LE_OQ); }
ALWAYS M eq(V a, V b) { return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_EQ_OQ); }
ALWAYS M ilt(I a, I b) { return _mm512_cmplt_epi32_mask((__m512i)a, (__m512i)b); }
ALWAYS M ieq(I a, I b) { return _mm512_cmpeq_epi32_mask((__m512i)a, (__m512i)b); }
ALWAYS M all_lanes(void) { return 0xffff; }
ALWAYS M not_lanes(M a) { return (M)~a; }
ALWAYS int any_lane(M a) { return a != 0; }
ALWAYS unsigned mask_bits(M a) { return a; }
ALWAYS V pick(M m, V yes, V no) { return (V)_mm512_mask_blend_ps(m, (__m512)no, (__m512)yes); }
ALWAYS I ipick(M m, I yes, I no)
{
    return (I)_mm512_mask_blend_epi32(m, (__m512i)no, (__m512i)yes);
}
ALWAYS V least(V a, V b) { return (V)_mm512_min_ps((__m512)a, (__m512)b); }
ALWAYS V most(V a, V b) { return (V)_mm512_max_ps((__m512)a, (__m512)b); }
ALWAYS I ileast(I a, I b) { return (I)_mm512_min_epi32((__m512i)a, (__m512i)b); }
ALWAYS I imost(I a, I b) { return (I)_mm512_max_epi32((__m512i)a, (__m512i)b); }
ALWAYS V lane_sqrt(V a) { return (V)_mm512_sqrt_ps((__m512)a); }
ALWAYS I load_u8(const uint8_t *from)
{
    return (I)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)from));
}
ALWAYS I load_i8(const void *from)
{
    return (I)_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)from));
}

#else

ALWAYS M lt(V a, V b) { return a < b; }
ALWAYS M le(V a, V b) { return a <= b; }
ALWAYS M eq(V a, V b) { return a == b; }
ALWAYS M ilt(I a, I b) { return a < b; }
ALWAYS M ieq(I a, I b) { return a == b; }
ALWAYS M all_lanes(void) { return isplat(-1); }
ALWAYS M not_lanes(M a) { return ~a; }
ALWAYS I ipick(M m, I yes, I no) { return (yes & m) | (no & ~m); }

#if defined(QT_ISA_AVX2)

ALWAYS unsigned mask_bits(M a) { return (unsigned)_mm256_movemask_ps((__m256)a); }
ALWAYS int any_lane(M a) { return mask_bits(a) != 0; }
ALWAYS V pick(M m, V yes, V no)
{
    return (V)_mm256_blendv_ps((__m256)no, (__m256)yes, (__m256)m);
}
ALWAYS V least(V a, V b) { return (V)_mm256_min_ps((__m256)a, (__m256)b); }
ALWAYS V most(V a, V b) { return (V)_mm256_max_ps((__m256)a, (__m256)b); }
ALWAYS I ileast(I a, I b) { return (I)_mm256_min_epi32((__m256i)a, (__m256i)b); }
ALWAYS I imost(I a, I b) { return (I)_mm256_max_epi32((__m256i)a, (__m256i)b); }
ALWAYS V lane_sqrt(V a) { return (V)_mm256_sqrt_ps((__m256)a); }
ALWAYS I load_u8(const uint8_t *from)
{
    return (I)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)from));
}
ALWAYS I load_i8(const void *from)
{
    return (I)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)from));
}

#else

ALWAYS V pick(M m, V yes, V no) { return (V)ipick(m, (I)yes, (I)no); }
ALWAYS I ileast(I a, I b) { return ipick(a < b, a, b); }
ALWAYS I imost(I a, I b) { return ipick(a > b, a, b); }
#if defined(__SSE2__)
ALWAYS unsigned mask_bits(M a) { return (unsigned)_mm_movemask_ps((__m128)a); }
ALWAYS int any_lane(M a) { return mask_bits(a) != 0; }
ALWAYS V least(V a, V b) { return (V)_mm_min_ps((__m128)a, (__m128)b); }
ALWAYS V most(V a, V b) { return (V)_mm_max_ps((__m128)a, (__m128)b); }
ALWAYS V lane_sqrt(V a) { return (V)_mm_sqrt_ps((__m128)a); }
#else
ALWAYS unsigned mask_bits(M a)
{
    unsigned bits = 0;
    for (int lane = 0; lane < LANES; lane++)
        bits |= (unsigned)(a[lane] & 1) << lane;
    return bits;
}
ALWAYS int any_lane(M a) { return mask_bits(a) != 0; }
ALWAYS V least(V a, V b) { return pick(a < b, a, b); }
ALWAYS V most(V a, V b) { return pick(a > b, a, b); }
ALWAYS V lane_sqrt(V a)
{
#if defined(QT_ISA_NEON)
    return (V)vsqrtq_f32((float32x4_t)a);
#else
    for (int lane = 0; lane < LANES; lane++)
        a[lane] = sqrtf(a[lane]);
    return a;
#endif
}
#endif
ALWAYS I load_u8(const uint8_t *from)
{
    qt_vu8x4 bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, I);
}
ALWAYS I load_i8(const void *from)
{
    typedef int8_t bytes_of_a_vector __attribute__((vector_size(LANES)));
    bytes_of_a_vector bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, I);
}

#endif
#endif

/* LANES signed bytes from number i of the bytes of words on; i a multiple of LANES, and known when
 * this is compiled. The words stay in registers: a wide load would wait for two narrow stores. */
ALWAYS I signed_bytes(const uint64_t *words, int i)
{
#if defined(QT_ISA_AVX512)
    return (I)_mm512_cvtepi8_epi32(
        _mm_set_epi64x((long long)words[i / 8 + 1], (long long)words[i / 8]));
#elif defined(QT_ISA_AVX2)
    return (I)_mm256_cvtepi8_epi32(_mm_cvtsi64_si128((long long)words[i / 8]));
#else
    uint32_t bytes = (uint32_t)(words[i / 8] >> 8 * (i % 8));
    return load_i8(&bytes);
#endif
}

/* Nearest integer, ties to even, for |a| < 2^22, as a float. */
ALWAYS V nearest_float(V a)
{
#if defined(QT_ISA_AVX512)
    return (V)_mm512_roundscale_ps((__m512)a, 0);
#elif defined(QT_ISA_AVX2)
    return (V)_mm256_round_ps((__m256)a, 0);
#else
    return (a + 0x1.8p23f) - 0x1.8p23f;
#endif
}

/* Nearest integer, ties to even, for |a| < 2^22; beyond, the integer that adding 1.5 * 2^23 leaves
 * in the low bits, as ggml has it. */
ALWAYS I nearest(V a)
{
    return ((I)(a + 0x1.8p23f) & 0x7fffff) - 0x400000;
}

#include "gguf_lane_floats.h"

#endif
