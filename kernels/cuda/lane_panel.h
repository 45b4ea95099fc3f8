/* A vector of one lane, so that the encoders of kernels/gguf_encode_*_body.h, written for as many
 * blocks as a CPU's vector has lanes, encode a block in each thread. Included by encode.h inside its
 * namespace, by way of gguf_encode_lanes.h, in the place of gguf_lanes.h and gguf_panel.h.
 *
 * Operators of float32 round as written where the compiler makes no fused multiply-add of them:
 * -fmad=false, or fma=false for NVRTC, as all kernels here are compiled. */
#ifndef QTOOL_CUDA_LANE_PANEL_H
#define QTOOL_CUDA_LANE_PANEL_H

enum { LANES = 1 };
#define ALWAYS QT_HD
#define ENCODER QT_HD
/* What these loops index is in registers where they are unrolled whole, as those of a sub-block are;
 * a block of 256 weights would not fit. */
#define UNROLL_SOME QT_UNROLL_32
#define UNROLL_ALONE QT_UNROLL_32
#define ROLLED QT_ROLLED
#define NEARBY(name, from, n)           \
    V name##_copy[32];                  \
    QT_UNROLL                           \
    for (int i = 0; i < (n); i++)       \
        name##_copy[i] = (from)[i];     \
    const V *name = name##_copy
#if !defined(INFINITY)
#define INFINITY of_bits(0x7f800000)
#endif
#if !defined(INT32_MIN)
#define INT32_MIN (-0x7fffffff - 1)
#endif

typedef float V;
typedef int32_t I;
typedef bool M;

ALWAYS V splat(float x) { return x; }
ALWAYS I isplat(int32_t x) { return x; }
ALWAYS I bits_of(V v) { return (I)bits_of_float(v); }
ALWAYS V of_bits(I v) { return float_of_bits((uint32_t)v); }
ALWAYS V to_float(I v) { return (V)v; }
ALWAYS M lt(V a, V b) { return a < b; }
ALWAYS M le(V a, V b) { return a <= b; }
ALWAYS M eq(V a, V b) { return a == b; }
ALWAYS M ilt(I a, I b) { return a < b; }
ALWAYS M ieq(I a, I b) { return a == b; }
ALWAYS M not_lanes(M a) { return !a; }
ALWAYS bool any_lane(M a) { return a; }
ALWAYS unsigned mask_bits(M a) { return a; }
ALWAYS V pick(M m, V yes, V no) { return m ? yes : no; }
ALWAYS I ipick(M m, I yes, I no) { return m ? yes : no; }
/* The second where one is a NaN, and of zeros, as x86 has it. */
ALWAYS V least(V a, V b) { return a < b ? a : b; }
ALWAYS V most(V a, V b) { return a > b ? a : b; }
ALWAYS I ileast(I a, I b) { return a < b ? a : b; }
ALWAYS I imost(I a, I b) { return a > b ? a : b; }
ALWAYS float lane_of(V v, int) { return v; }
ALWAYS void set_lane(V *v, int, float x) { *v = x; }
ALWAYS void set_ilane(I *v, int, int32_t x) { *v = x; }
ALWAYS int32_t ilane_of(I v, int) { return v; }
ALWAYS int first_lane(unsigned) { return 0; }
ALWAYS void spread_lanes(float *to, V v) { *to = v; }
ALWAYS void spread_ilanes(int32_t *to, I v) { *to = v; }
ALWAYS I ilanes_of(const int32_t *from) { return *from; }
ALWAYS M all_lanes(void) { return true; }

ALWAYS void store_16(uint8_t *to, uint32_t bits)
{
    to[0] = (uint8_t)bits;
    to[1] = (uint8_t)(bits >> 8);
}

ALWAYS void store_32(uint8_t *to, uint32_t bits)
{
    store_16(to, bits);
    store_16(to + 2, bits >> 16);
}

ALWAYS V lane_sqrt(V a)
{
#if defined(QT_ON_DEVICE)
    return __fsqrt_rn(a);
#else
    return __builtin_sqrtf(a);
#endif
}

ALWAYS V nearest_float(V a)
{
    return (a + 12582912.0f) - 12582912.0f;
}

/* A NaN of a CPU has these bits zero, one of a GPU has them all set. */
ALWAYS I nearest(V a)
{
    return a == a ? (bits_of(a + 12582912.0f) & 0x7fffff) - 0x400000 : 0;
}

/* Toward zero; what does not fit is the least integer, as x86 has it. */
ALWAYS I truncated(V a)
{
    M fits = a > -2147483648.0f && a < 2147483648.0f;
    return fits ? (I)a : INT32_MIN;
}

#include "gguf_lane_floats.h"

/* As gguf_lattice.h has it, in the memory of the GPU. */
struct gguf_lattice {
    In<int32_t> find;
    In<uint16_t> near;
};

/* The list of the neighbours of codes that are no point, of which `find` says `found`. */
ALWAYS const uint16_t *neighbours(const gguf_lattice *lattice, int32_t found)
{
    int64_t at = -((int64_t)found + 1);
    return lattice->near.run(at, 1 + lattice->near[at]);
}

/* Weight i of the block is x[i]; its importance is w[i], if there is any. */
struct panel {
    V x[256];
    const float *w;
    bool weighted;
    V row_sigma2; /* the mean square of the row that the block lies in */
    Out<uint8_t> out;
    int64_t begin; /* of the block */
    int32_t bytes; /* of a block */
    gguf_lattice lattice;
    uint8_t *to[1]; /* where a block is laid out that is written as a whole */
};

ALWAYS const gguf_lattice *lattice_of(const panel *p, int) { return &p->lattice; }

/* An address that is a multiple of two where blocks have even sizes, else of one. */
ALWAYS void put_half(const panel *p, int offset, I half)
{
    if (p->bytes % 2 == 0 && offset % 2 == 0) {
        p->out.put_wide(p->begin + offset, (uint16_t)half);
        return;
    }
    p->out.put(p->begin + offset, (uint8_t)half);
    p->out.put(p->begin + offset + 1, (uint8_t)(half >> 8));
}

ALWAYS void put_byte(const panel *p, int offset, I byte)
{
    p->out.put(p->begin + offset, (uint8_t)byte);
}

ALWAYS void put_words(const panel *p, int offset, const I *words, int n)
{
    QT_UNROLL
    for (int i = 0; i < n; i++) {
        if (p->bytes % 4 == 0 && offset % 4 == 0) {
            p->out.put_wide(p->begin + offset + 4 * i, (uint32_t)words[i]);
            continue;
        }
        put_half(p, offset + 4 * i, words[i]);
        put_half(p, offset + 4 * i + 2, words[i] >> 16);
    }
}

ALWAYS void gather_columns(const panel *p, const int *, const int *at, V *out)
{
    QT_UNROLL
    for (int i = 0; i < 16; i++)
        out[i] = p->x[at[0] + i];
}

#endif
