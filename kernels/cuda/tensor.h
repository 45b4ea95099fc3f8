/* Tensor cores: products of matrices that the lanes of a warp hold together, and pairs of halves.
 *
 * A function that all lanes of a warp take part in is written over the lanes `at hand`: on a GPU each
 * thread has its own; the host runs a block's threads one after the other, and there the first of a
 * warp does the work of all 32. What a lane holds is an array [HELD].
 *
 * What a tensor core computes is not documented. Subnormal halves are multiplied exactly; a sum is cut
 * off, not rounded (M. Fasi, N. J. Higham, M. Mikaitis and S. Pranesh, Numerical behavior of NVIDIA
 * tensor cores, PeerJ Computer Science 7:e330, 2021). Here the host follows the model of P. Xie,
 * Y. Wang, F. Yang and M. Yang, MMA-Sim: bit-accurate reference model of tensor cores and matrix cores,
 * arXiv 2511.10909, 2025: see `fused`. */
#ifndef QTOOL_CUDA_TENSOR_H
#define QTOOL_CUDA_TENSOR_H

#include "floats.h"

namespace qt {

#if defined(QT_ON_DEVICE)
enum { HELD = 1 };
QT_HD bool speaks(int32_t) { return true; }
QT_HD int32_t lane_at(int32_t thread, int) { return thread & 31; }
#else
enum { HELD = 32 };
QT_HD bool speaks(int32_t thread) { return thread % 32 == 0; }
QT_HD int32_t lane_at(int32_t, int held) { return held; }
#endif

/* Two halves in a word, each by itself. The host's are right where results are exact, or products. */
#if defined(QT_ON_DEVICE)
QT_HD uint32_t mul_halves(uint32_t a, uint32_t b)
{
    uint32_t found;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}
QT_HD uint32_t add_halves(uint32_t a, uint32_t b)
{
    uint32_t found;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
    return found;
}
QT_HD uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c)
{
    uint32_t found;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(found) : "r"(a), "r"(b), "r"(c));
    return found;
}
#else
QT_HD uint32_t fma_halves(uint32_t a, uint32_t b, uint32_t c)
{
    float low = fma(of_f16(a & 0xffff), of_f16(b & 0xffff), of_f16(c & 0xffff));
    return two_f16(low, fma(of_f16(a >> 16), of_f16(b >> 16), of_f16(c >> 16)));
}
QT_HD uint32_t mul_halves(uint32_t a, uint32_t b) { return fma_halves(a, b, 0x80008000); }
QT_HD uint32_t add_halves(uint32_t a, uint32_t b) { return fma_halves(a, 0x3c003c00, b); }
#endif

/* One half of a pair twice. Instructions take it from there for nothing, where the compiler sees it. */
QT_HD uint32_t twice(uint32_t pair, int half)
{
#if defined(QT_ON_DEVICE)
    uint32_t found;
    if (half)
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h};}" : "=r"(found) : "r"(pair));
    else
        asm("{.reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l};}" : "=r"(found) : "r"(pair));
    return found;
#else
    return byte_perm(pair, pair, half ? 0x3232 : 0x1010);
#endif
}

/* What lane 4 g + t has of a product of 16 rows and 16 columns with 8 vectors: in pairs of halves
 * columns 2 t and 2 t + 1 of rows g and g + 8, then columns 2 t + 8 and 2 t + 9 of both; the same
 * columns of vector g; in sums vectors 2 t and 2 t + 1 of row g, then of row g + 8. Of a product with
 * eight columns, the first pairs. */
struct Weights {
    uint32_t at[4];
};
struct Inputs {
    uint32_t at[2];
};
struct Sums {
    float at[4];
};

#if defined(QT_ON_DEVICE)

/* sums += weights * inputs of eight columns, in float32. */
QT_HD void multiply_eight(const uint32_t (*a)[2], const uint32_t *b, Sums *sums)
{
    Sums c = *sums;
    float *d = sums->at;
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, "
                 "{%7, %8, %9, %10};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0][0]), "r"(a[0][1]), "r"(b[0]), "f"(c.at[0]), "f"(c.at[1]), "f"(c.at[2]),
                   "f"(c.at[3]));
}

/* The same of sixteen. */
QT_HD void multiply(const Weights *weights, const Inputs *inputs, Sums *sums)
{
    const uint32_t *a = weights->at, *b = inputs->at;
#if __CUDA_ARCH__ >= 800
    Sums c = *sums;
    float *d = sums->at;
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, "
                 "{%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, %13};"
                 : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "f"(c.at[0]),
                   "f"(c.at[1]), "f"(c.at[2]), "f"(c.at[3]));
#else
    const uint32_t both[2][2] = {{a[0], a[1]}, {a[2], a[3]}};
    multiply_eight(both, b, sums);
    multiply_eight(both + 1, b + 1, sums);
#endif
}

#else

/* Of a tensor core: bits of a sum behind the binary point of its largest term, and columns that are
 * summed at once. Turing, Ampere and Ada have 24 and 8, Hopper and Blackwell 25 and 16. */
struct Core {
    int32_t fraction, columns;
};
QT_HD Core hopper() { return Core{25, 16}; }
#if defined(QT_CHECKED)
extern Core core; /* the tests' choice */
QT_HD Core core_at_hand() { return core; }
#else
QT_HD Core core_at_hand() { return hopper(); }
#endif

/* A half as part * 2^(exponent - 10), subnormal ones with the exponent of the smallest normal. */
struct Half {
    int32_t part, exponent;
};
QT_HD Half parts_of(uint32_t half)
{
    int32_t exponent = half >> 10 & 31, part = (half & 1023) + (exponent ? 1024 : 0);
    return Half{half & 0x8000 ? -part : part, (exponent ? exponent : 1) - 15};
}

/* A term of so many places, whose exponent is `down` below the largest one's, cut off at `fraction`. */
QT_HD int64_t cut(int64_t part, int32_t places, int32_t down, int32_t fraction)
{
    int32_t shift = fraction - places - down;
    int64_t size = part < 0 ? -part : part;
    size = shift >= 0 ? size << shift : shift > -63 ? size >> -shift : 0;
    return part < 0 ? -size : size;
}

/* sum + products of `count` halves: terms are cut off at so many bits behind the point of the largest
 * exponent (of products: the sum of both exponents), added exactly, and cut off to float32. */
QT_HD float fused(const Half *a, const Half *b, int32_t count, float sum, int32_t fraction)
{
    const int32_t none = -1000;
    int32_t most = none;
    for (int32_t k = 0; k < count; k++)
        if (a[k].part && b[k].part && a[k].exponent + b[k].exponent > most)
            most = a[k].exponent + b[k].exponent;
    if (most == none)
        return sum;
    uint32_t bits = bits_of_float(sum);
    int32_t exponent = bits >> 23 & 255;
    int64_t part = (bits & 0x7fffff) + (exponent ? 1 << 23 : 0);
    exponent = (exponent ? exponent : 1) - 127;
    if (part && exponent > most)
        most = exponent;
    int64_t total = cut(bits >> 31 ? -part : part, 23, most - exponent, fraction);
    for (int32_t k = 0; k < count; k++)
        if (a[k].part && b[k].part)
            total += cut((int64_t)a[k].part * b[k].part, 20, most - a[k].exponent - b[k].exponent,
                         fraction);
    int64_t size = total < 0 ? -total : total;
    int32_t drop = 0;
    while (size >> drop >= 1 << 24)
        drop++;
    float found = (float)(size >> drop) * __builtin_ldexpf(1.0f, most - fraction + drop);
    return total < 0 ? -found : found;
}

QT_HD void multiply_by(const Weights *weights, const Inputs *inputs, Sums *sums, int32_t columns)
{
    const int32_t fraction = core_at_hand().fraction;
    uint32_t rows[16][16], vectors[8][16];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++)
            for (int half = 0; half < 2; half++) {
                int g = lane / 4, col = 2 * (lane % 4) + half;
                rows[g + 8 * (i & 1)][col + 8 * (i >> 1)] = weights[lane].at[i] >> (16 * half) & 0xffff;
                vectors[g][col + 8 * (i & 1)] = inputs[lane].at[i & 1] >> (16 * half) & 0xffff;
            }
    Half a[16][16], b[8][16];
    bool special = false;
    for (int k = 0; k < 16; k++) {
        for (int row = 0; row < 16; row++) {
            a[row][k] = parts_of(rows[row][k]);
            special |= (rows[row][k] & 0x7c00) == 0x7c00;
        }
        for (int vector = 0; vector < 8; vector++) {
            b[vector][k] = parts_of(vectors[vector][k]);
            special |= (vectors[vector][k] & 0x7c00) == 0x7c00;
        }
    }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            int row = lane / 4 + 8 * (i >> 1), vector = 2 * (lane % 4) + (i & 1);
            float sum = sums[lane].at[i];
            bool finite = (bits_of_float(sum) & 0x7f800000) != 0x7f800000;
            if (special || !finite) /* NaN and infinity as ever */
                for (int k = 0; k < 16; k++)
                    sum += of_f16(rows[row][k]) * of_f16(vectors[vector][k]);
            else
                for (int k = 0; k < 16; k += columns)
                    sum = fused(a[row] + k, b[vector] + k, columns, sum, fraction);
            sums[lane].at[i] = sum;
        }
}
QT_HD void multiply(const Weights *weights, const Inputs *inputs, Sums *sums)
{
    multiply_by(weights, inputs, sums, core_at_hand().columns);
}
QT_HD void multiply_eight(const uint32_t (*a)[2], const uint32_t *b, Sums *sums)
{
    Weights weights[HELD];
    Inputs inputs[HELD];
    for (int l = 0; l < HELD; l++) {
        weights[l] = Weights{{a[l][0], a[l][1], 0, 0}};
        inputs[l] = Inputs{{b[l], 0}};
    }
    multiply_by(weights, inputs, sums, 8);
}
#endif

} // namespace qt

#endif
