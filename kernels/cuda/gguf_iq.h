/* The lattice types: eight weights (IQ3: twice four) are a point of a table, with signs.
 *
 * The tables of kernels/gguf_grids_*.h hold packed points: two bits a coordinate (IQ3: three). */
#ifndef QTOOL_CUDA_GGUF_IQ_H
#define QTOOL_CUDA_GGUF_IQ_H

#include "gguf.h"

#if defined(__CUDACC__)
#define QT_POINTS __device__ const
#else
#define QT_POINTS static const
#endif

namespace qt {

#include "gguf_grids_iq1_iq3.h"
#include "gguf_grids_iq2.h"

QT_HD uint32_t point_of(const uint16_t *table, uint32_t i)
{
#if defined(QT_ON_DEVICE)
    return __ldg(table + i);
#else
    return table[i];
#endif
}

/* Seven sign bits and an eighth that makes their number even. */
QT_HD uint32_t even_signs(uint32_t seven)
{
    uint32_t odd = seven ^ seven >> 4;
    odd ^= odd >> 2;
    odd ^= odd >> 1;
    return seven | (odd & 1) << 7;
}

/* w = value * scale for eight coordinates of two bits; `values` has the value of each in a byte. */
QT_HD void eight_of_point(uint32_t point, uint32_t values, uint32_t signs, float scale, float *w)
{
    QT_UNROLL
    for (int i = 0; i < 8; i++) {
        int32_t value = (int32_t)(values >> (8 * (point >> (2 * i) & 3)) & 255);
        w[i] = mul(small(signs >> i & 1 ? -value : value), scale);
    }
}

enum { IQ2_VALUES = 0x002b1908 }; /* 8 25 43 */

struct iq2_xxs {
    enum { weights = 256, bytes = 66 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t at = 2 + first / 32 * 8, k = first >> 3 & 3;
        uint32_t word = block.u32_by_halves(at + 4);
        uint32_t point = point_of(gguf_points_iq2_xxs, block.u8(at + k));
        float scale = mul(mul(block.half(0), add(0.5f, small((int32_t)(word >> 28)))), 0.25f);
        eight_of_point(point, IQ2_VALUES, even_signs(word >> (7 * k) & 127), scale, w);
    }
};

/* d (s + 1/2) / 4 for the nibble of each 16 weights. */
QT_HD float iq2_scale(const Block &block, int32_t from, int32_t first)
{
    int32_t j = first / 16;
    uint32_t scale = block.u8(from + j / 2) >> (4 * (j & 1)) & 15;
    return mul(mul(block.half(0), add(0.5f, small((int32_t)scale))), 0.25f);
}

struct iq2_xs {
    enum { weights = 256, bytes = 74 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t code = block.u16(2 + first / 4);
        uint32_t point = point_of(gguf_points_iq2_xs, code & 511);
        eight_of_point(point, IQ2_VALUES, even_signs(code >> 9), iq2_scale(block, 66, first), w);
    }
};

struct iq2_s {
    enum { weights = 256, bytes = 82 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t i = first / 8;
        uint32_t high = block.u8(66 + i / 4) >> (2 * (i & 3)) & 3;
        uint32_t point = point_of(gguf_points_iq2_s, block.u8(2 + i) | high << 8);
        eight_of_point(point, IQ2_VALUES, block.u8(34 + i), iq2_scale(block, 74, first), w);
    }
};

struct iq3_xxs {
    enum { weights = 256, bytes = 98 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t j = first / 32, k = first >> 3 & 3, at = 2 + first / 4;
        uint32_t word = block.u32_by_halves(66 + 4 * j), signs = even_signs(word >> (7 * k) & 127);
        float scale = mul(mul(block.half(0), add(0.5f, small((int32_t)(word >> 28)))), 0.5f);
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            uint32_t point = point_of(gguf_points_iq3_xxs, block.u8(at + i / 4));
            uint32_t c = point >> (3 * (i & 3)) & 7;
            int32_t value = c == 7 ? 62 : (int32_t)(8 * c + 4); /* 4 12 20 28 36 44 52 62 */
            w[i] = mul(small(signs >> i & 1 ? -value : value), scale);
        }
    }
};

struct iq3_s {
    enum { weights = 256, bytes = 110 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t j = first / 32, k = first >> 3 & 3, at = 2 + first / 4;
        uint32_t ninth = block.u8(66 + j) >> (2 * k), signs = block.u8(74 + first / 8);
        uint32_t s = block.u8(106 + j / 2) >> (4 * (j & 1)) & 15;
        float scale = mul(block.half(0), small((int32_t)(1 + 2 * s)));
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            uint32_t code = block.u8(at + i / 4) | (ninth >> (i / 4) & 1) << 8;
            uint32_t point = point_of(gguf_points_iq3_s, code);
            int32_t value = (int32_t)(2 * (point >> (3 * (i & 3)) & 7) + 1);
            w[i] = mul(small(signs >> i & 1 ? -value : value), scale);
        }
    }
};

/* w = (8 t + 1) scale or (8 t - 1) scale, t = -1, 0, 1. */
QT_HD void eight_trits(uint32_t point, uint32_t negative, float scale, float *w)
{
    int32_t shift = negative ? -9 : -7;
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        w[i] = mul(small((int32_t)(8 * (point >> (2 * i) & 3)) + shift), scale);
}

struct iq1_s {
    enum { weights = 256, bytes = 50 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t j = first / 32, k = first >> 3 & 3;
        uint32_t high = block.u16(34 + 2 * j);
        uint32_t point = block.u8(2 + 4 * j + k) | (high >> (3 * k) & 7) << 8;
        float scale = mul(block.half(0), small((int32_t)(2 * (high >> 12 & 7) + 1)));
        eight_trits(point_of(gguf_points_iq1, point), high >> 15, mul(scale, 0.125f), w);
    }
};

struct iq1_m {
    enum { weights = 256, bytes = 56 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t j = first / 16, k = first >> 3 & 1;
        uint32_t d = (block.u16(48) >> 12) | (block.u16(50) >> 8 & 0x00f0) |
                     (block.u16(52) >> 4 & 0x0f00) | (block.u16(54) & 0xf000);
        uint32_t nibble = block.u8(32 + j) >> (4 * k) & 15;
        uint32_t point = block.u8(2 * j + k) | (nibble & 7) << 8;
        uint32_t code = block.u16(48 + 2 * (j / 4)) >> (3 * (j & 3)) & 7;
        float scale = mul(of_f16(d), small((int32_t)(2 * code + 1)));
        eight_trits(point_of(gguf_points_iq1, point), nibble >> 3, mul(scale, 0.125f), w);
    }
};

} // namespace qt

#endif
