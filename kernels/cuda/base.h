/* What every kernel here is written in: integers, arrays, float32 arithmetic that rounds as
 * written, and the task that a kernel is given.
 *
 * The same source is compiled by nvcc, by NVRTC (which has no standard headers) and, for the tests,
 * by a C++ compiler for the host. There the CUDA words are defined away, and arrays check every
 * access: that it lies inside, that its address is a multiple of its size (which a GPU asks for),
 * and that nothing is written twice. */
#ifndef QTOOL_CUDA_BASE_H
#define QTOOL_CUDA_BASE_H

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long int64_t;
typedef unsigned long uint64_t;
#else
#include <stdint.h>
#endif

#if defined(__CUDACC__)
#define QT_HD __host__ __device__ __forceinline__
#define QT_UNROLL _Pragma("unroll")
#define QT_UNROLL_4 _Pragma("unroll 4")
#define QT_UNROLL_32 _Pragma("unroll 32")
#define QT_ROLLED _Pragma("unroll 1")
#else
#define QT_HD static inline
#define QT_UNROLL
#define QT_UNROLL_4
#define QT_UNROLL_32
#define QT_ROLLED
#include <string.h>
#endif

#if defined(__CUDA_ARCH__)
#define QT_ON_DEVICE 1
#endif

/* Inside structs `static` would mean something else on the host. */
#if defined(__CUDACC__)
#define QT_MEMBER __host__ __device__ __forceinline__
#else
#define QT_MEMBER inline
#endif

namespace qt {

/* Everything a kernel is told, in 64-bit fields that Python fills by the same names. Addresses are
 * multiples of 16; sizes are in bytes, and only the checks of the host look at them. */
#define QT_TASK(X)                                                                             \
    X(codes) X(scale) X(zero) X(index) X(values)                                               \
    X(codes_bytes) X(scale_bytes) X(zero_bytes) X(index_bytes) X(values_bytes)                 \
    X(rows) X(cols)          /* of the matrix [out, in] */                                     \
    X(pitch)                 /* words, or bytes, from one row of the stored codes to the next */ \
    X(group_size)            /* columns that share a scale */                                  \
    X(group_shift)           /* its logarithm, or -1 where it is no power of two */            \
    X(block_rows)            /* rows that share a scale (codes of a byte) */                   \
    X(scale_dtype)           /* F32, F16, BF16 */                                              \
    X(scale_row) X(scale_group) /* elements from one to the next */                            \
    X(zero_kind) X(zero_row) X(zero_group) X(zero_value) /* see scales.h */            \
    X(bits)                  /* of a zero */                                                   \
    X(outer) X(divide)       /* bits of a float32; whether to divide by it */                  \
    X(batch) X(splits) X(inputs) X(inputs_bytes) /* see gemv.h */                             \
    X(sums) X(sums_bytes) X(done) X(done_bytes)                                               \
    X(first_row) /* see encode.h */                                                            \
    X(weight) X(weight_bytes) X(importance) X(importance_bytes) X(gram) X(gram_bytes)          \
    X(ratios) X(ratios_bytes) X(ratio_count) X(symmetric) X(reach) /* see quantize.h */

struct Task {
#define QT_FIELD(name) int64_t name;
    QT_TASK(QT_FIELD)
#undef QT_FIELD
};

enum { F32 = 0, F16 = 1, BF16 = 2 };

#if defined(QT_ON_DEVICE)
QT_HD float float_of_bits(uint32_t bits) { return __uint_as_float(bits); }
QT_HD uint32_t bits_of_float(float x) { return __float_as_uint(x); }
/* Never contracted into a fused multiply-add, whatever the compiler's flags. */
QT_HD float mul(float a, float b) { return __fmul_rn(a, b); }
QT_HD float add(float a, float b) { return __fadd_rn(a, b); }
QT_HD float sub(float a, float b) { return __fsub_rn(a, b); }
QT_HD float divide(float a, float b) { return __fdiv_rn(a, b); }
QT_HD float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
#else
QT_HD float float_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
QT_HD uint32_t bits_of_float(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
QT_HD float mul(float a, float b) { return a * b; }
QT_HD float add(float a, float b) { return a + b; }
QT_HD float sub(float a, float b) { return a - b; }
QT_HD float divide(float a, float b) { return a / b; }
QT_HD float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
#endif

/* An integer of magnitude below 2^22 as a float, exactly, by two cheap instructions: conversions
 * run at a fraction of the speed of additions. */
QT_HD float small(int32_t code)
{
    return sub(float_of_bits((uint32_t)(0x4b400000 + code)), 12582912.0f);
}

/* 2^23 + code as a float, for codes from 0 on: differences of two of them are exact. */
QT_HD float above(uint32_t code) { return float_of_bits(code | 0x4b000000u); }

/* (word & mask) | more, which the compiler would do in two steps where both are constants. */
QT_HD uint32_t masked_or(uint32_t word, uint32_t mask, uint32_t more)
{
#if defined(QT_ON_DEVICE)
    uint32_t bits;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(bits) : "r"(word), "r"(mask), "r"(more));
    return bits;
#else
    return (word & mask) | more;
#endif
}

/* The same of what `mask` leaves of a word. */
QT_HD float above_masked(uint32_t word, uint32_t mask)
{
    return float_of_bits(masked_or(word, mask, 0x4b000000));
}

/* Byte k of the result is byte s of x (s = 0 to 3) or of y (4 to 7), s being the lowest three bits of
 * nibble k of `from`: CUDA's __byte_perm takes no fourth one. */
QT_HD uint32_t byte_perm(uint32_t x, uint32_t y, uint32_t from)
{
#if defined(QT_ON_DEVICE)
    return __byte_perm(x, y, from);
#else
    uint32_t found = 0;
    for (int k = 0; k < 4; k++) {
        uint32_t s = from >> (4 * k) & 7, byte = (s & 4 ? y : x) >> (8 * (s & 3)) & 255;
        found |= byte << (8 * k);
    }
    return found;
#endif
}

/* The sign of each byte, eight times. */
QT_HD uint32_t signs_of_bytes(uint32_t word)
{
#if defined(QT_ON_DEVICE)
    uint32_t found;
    asm("prmt.b32 %0, %1, 0, 0xba98;" : "=r"(found) : "r"(word));
    return found;
#else
    return (word >> 7 & 0x01010101) * 255;
#endif
}

/* The same of byte i of a word. */
QT_HD float above_byte(uint32_t word, int i)
{
    return float_of_bits(byte_perm(word, 0x4b000000, 0x7440 + (uint32_t)i));
}

#include "arrays.h"

/* A product of numbers from 0 on and below 2^32, as those of rows, columns and strides are: one
 * instruction, where one of 64 bits takes four. */
QT_HD int64_t product(int64_t a, int64_t b)
{
    return (int64_t)((uint64_t)(uint32_t)a * (uint32_t)b);
}

QT_HD int32_t least(int64_t a, int64_t b) { return (int32_t)(a < b ? a : b); }

QT_HD int32_t smaller(int32_t a, int32_t b) { return a < b ? a : b; }

/* What threads share that share nothing. */
struct NoRoom {
#if defined(QT_CHECKED)
    void clear() {}
#endif
};

/* Whether a kernel has four parts, and not two (grid.h), and how many of its blocks an SM is to have
 * registers for. */
template <class KERNEL> struct Parts {
    enum { four = 0, resident = 1 };
};

/* Lets the next kernel of a stream begin, and waits until those before this one have ended and what they
 * wrote is there: where it was launched so that it may begin before (gemv.h). Else it does nothing. */
QT_HD void wait_for_kernels_before()
{
#if defined(QT_CHECKED)
    waited = true;
#elif defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;\n\tgriddepcontrol.wait;" ::: "memory");
#endif
}

/* Place of a block in the grid. */
struct Place {
    int64_t x;
    int32_t y;
};

} // namespace qt

#endif
