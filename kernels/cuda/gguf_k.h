/* The K types: 256 weights in sub-blocks whose scales are codes themselves. */
#ifndef QTOOL_CUDA_GGUF_K_H
#define QTOOL_CUDA_GGUF_K_H

#include "gguf.h"

namespace qt {

/* w = s q - m for eight codes in bytes. */
QT_HD void minus_minimum(const uint32_t *words, uint32_t mask, float s, float m, float *w)
{
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        w[i] = sub(mul(small((int32_t)(byte_of(words, i) & mask)), s), m);
}

/* Where two bits a weight lie in types of 256: 32 bytes for each half of them. */
QT_HD int32_t pairs_at(int32_t first) { return 32 * (first >> 7) + (first & 24); }
QT_HD int32_t pair_shift(int32_t first) { return first >> 4 & 6; }

struct q2_k {
    enum { weights = 256, bytes = 84 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t at = 16 + pairs_at(first), shift = pair_shift(first);
        uint32_t codes = block.u8(first / 16);
        float s = mul(small((int32_t)(codes & 15)), block.half(80));
        float m = mul(small((int32_t)(codes >> 4)), block.half(82));
        uint32_t q[2] = {block.u32(at) >> shift, block.u32(at + 4) >> shift};
        minus_minimum(q, 3, s, m, w);
    }
};

struct q3_k {
    enum { weights = 256, bytes = 110 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2], third[2];
        int32_t j = first / 16, shift = pair_shift(first), bit = first >> 5;
        uint32_t low = block.u8(96 + (j & 7)) >> (4 * (j >> 3)) & 15;
        uint32_t high = block.u8(104 + (j & 3)) >> (2 * (j >> 2)) & 3;
        float d = mul(small((int32_t)(low | high << 4) - 32), block.half(108));
        read_eight(block, 32 + pairs_at(first), q);
        read_eight(block, first & 31, third);
        QT_UNROLL
        for (int k = 0; k < 2; k++)
            q[k] = (q[k] >> shift & 0x03030303) | (third[k] >> bit & 0x01010101) << 2;
        scaled_bytes(q, 255, -4, d, w);
    }
};

/* Scale and minimum of sub-block j, times d and dmin, of the twelve bytes that q4_k and q5_k keep
 * from byte 4 on. */
QT_HD void scale_minimum(const Block &block, int32_t j, float *s, float *m)
{
    uint32_t halves = block.u32(0), scale, minimum;
    if (j < 4) {
        scale = block.u8(4 + j) & 63;
        minimum = block.u8(8 + j) & 63;
    } else {
        uint32_t both = block.u8(8 + j);
        scale = (both & 15) | block.u8(j) >> 6 << 4;
        minimum = both >> 4 | block.u8(4 + j) >> 6 << 4;
    }
    *s = mul(small((int32_t)scale), of_f16(halves & 0xffff));
    *m = mul(small((int32_t)minimum), of_f16(halves >> 16));
}

struct q4_k {
    enum { weights = 256, bytes = 144 };
    /* Codes in bytes; used by the fused kernel as well. */
    static QT_MEMBER void codes(const Block &block, int32_t first, uint32_t *q)
    {
        int32_t at = 16 + 32 * (first >> 6) + (first & 24);
        q[0] = block.u32(at);
        q[1] = block.u32(at + 4);
        nibbles(q, first >> 5 & 1);
    }
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        float s, m;
        uint32_t q[2];
        scale_minimum(block, first >> 5, &s, &m);
        codes(block, first, q);
        minus_minimum(q, 255, s, m, w);
    }
};

struct q5_k {
    enum { weights = 256, bytes = 176 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        float s, m;
        int32_t j = first >> 5, at = 48 + 32 * (first >> 6) + (first & 24), fifth = 16 + (first & 24);
        uint32_t q[2] = {block.u32(at), block.u32(at + 4)};
        scale_minimum(block, j, &s, &m);
        nibbles(q, j & 1);
        q[0] |= (block.u32(fifth) >> j & 0x01010101) << 4;
        q[1] |= (block.u32(fifth + 4) >> j & 0x01010101) << 4;
        minus_minimum(q, 255, s, m, w);
    }
};

struct q6_k {
    enum { weights = 256, bytes = 210 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t low[2], high[2];
        int32_t half = first >> 7, n = first >> 5 & 3, shift = 2 * n;
        read_eight(block, 64 * half + 32 * (n & 1) + (first & 24), low);
        read_eight(block, 128 + 32 * half + (first & 24), high);
        nibbles(low, n >> 1);
        QT_UNROLL
        for (int k = 0; k < 2; k++)
            low[k] |= (high[k] >> shift & 0x03030303) << 4;
        float d = mul(small(block.i8(192 + first / 16)), block.half(208));
        scaled_bytes(low, 255, -32, d, w);
    }
};

} // namespace qt

#endif
