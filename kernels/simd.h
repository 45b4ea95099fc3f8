/* Vector types of the instruction set this file is compiled for (QT_ISA), and the few things that
 * vector extensions do not express. Every operation is elementwise, so results do not depend on
 * the width. */
#ifndef QTOOL_SIMD_H
#define QTOOL_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define QT_PASTE2(a, b) a##_##b
#define QT_PASTE(a, b) QT_PASTE2(a, b)
#define QT_NAME(name) QT_PASTE(name, QT_ISA) /* gptq_sweep_f32 -> gptq_sweep_f32_avx2 */

#if defined(QT_ISA_AVX512)
#include <immintrin.h>
#define QT_VECTOR_BYTES 64
#define QT_TILE_COLUMNS 12 /* of accumulators, two vectors wide: 24 of 32 registers */
#elif defined(QT_ISA_AVX2)
#include <immintrin.h>
#define QT_VECTOR_BYTES 32
#define QT_TILE_COLUMNS 6 /* 12 of 16 registers */
#elif defined(QT_ISA_NEON)
#include <arm_neon.h>
#define QT_VECTOR_BYTES 16
#define QT_TILE_COLUMNS 12
#else
#define QT_VECTOR_BYTES 16
#define QT_TILE_COLUMNS 4
#endif

#if defined(__clang__)
#define QT_UNROLL _Pragma("unroll")
#else
#define QT_UNROLL _Pragma("GCC unroll 32")
#endif

#define QT_INLINE static inline

#define QT_F32_LANES (QT_VECTOR_BYTES / 4)
#define QT_F64_LANES (QT_VECTOR_BYTES / 8)

typedef float qt_vf32 __attribute__((vector_size(QT_VECTOR_BYTES)));
typedef double qt_vf64 __attribute__((vector_size(QT_VECTOR_BYTES)));
typedef float qt_vf32_half __attribute__((vector_size(QT_VECTOR_BYTES / 2)));
typedef int32_t qt_vi32 __attribute__((vector_size(QT_VECTOR_BYTES)));
typedef uint32_t qt_vu32 __attribute__((vector_size(QT_VECTOR_BYTES)));
typedef int64_t qt_vi64 __attribute__((vector_size(QT_VECTOR_BYTES)));
typedef uint8_t qt_vu8x4 __attribute__((vector_size(QT_VECTOR_BYTES / 4)));
typedef uint8_t qt_vu8x8 __attribute__((vector_size(QT_VECTOR_BYTES / 8)));

/* a * b + c with one rounding, in every lane. */
static inline qt_vf32 qt_fma_f32(qt_vf32 a, qt_vf32 b, qt_vf32 c)
{
#if defined(QT_ISA_AVX512)
    return (qt_vf32)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(QT_ISA_AVX2)
    return (qt_vf32)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(QT_ISA_NEON)
    return (qt_vf32)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int lane = 0; lane < QT_F32_LANES; lane++)
        c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

static inline qt_vf64 qt_fma_f64(qt_vf64 a, qt_vf64 b, qt_vf64 c)
{
#if defined(QT_ISA_AVX512)
    return (qt_vf64)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(QT_ISA_AVX2)
    return (qt_vf64)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#elif defined(QT_ISA_NEON)
    return (qt_vf64)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    for (int lane = 0; lane < QT_F64_LANES; lane++)
        c[lane] = __builtin_fma(a[lane], b[lane], c[lane]);
    return c;
#endif
}

#endif
