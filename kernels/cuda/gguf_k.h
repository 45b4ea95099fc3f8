/* The K types: 256 weights in sub-blocks whose scales are codes themselves. */
#ifndef QTOOL_CUDA_GGUF_K_H
#define QTOOL_CUDA_GGUF_K_H

#include "gguf.h"

namespace qt {

/* w = s q - m for eight codes in bytes. */
QT_HD void minus_minimum(const uint32_t *words, float s, float m, float *w)
{
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        w[i] = sub(mul(number_of(words, i, 0), s), m);
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
        uint32_t q[2] = {block.u32(at) >> shift & 0x03030303, block.u32(at + 4) >> shift & 0x03030303};
        minus_minimum(q, s, m, w);
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
        scaled_bytes(q, 4, d, w);
    }
};

/* Scale and minimum of sub-block j of a q4_k or q5_k, times d and dmin: its first sixteen bytes are
 * both of these and twelve of six-bit codes. */
QT_HD void scale_minimum(const Four &head, int32_t j, float *s, float *m)
{
    int32_t shift = 8 * (j & 3);
    uint32_t scales = head.word[1] >> shift, minima = head.word[2] >> shift;
    uint32_t both = head.word[3] >> shift;
    uint32_t scale = j < 4 ? scales & 63 : (both & 15) | (scales >> 2 & 48);
    uint32_t minimum = j < 4 ? minima & 63 : (both >> 4 & 15) | (minima >> 2 & 48);
    *s = mul(small((int32_t)scale), of_f16(head.word[0] & 0xffff));
    *m = mul(small((int32_t)minimum), of_f16(head.word[0] >> 16));
}

struct q4_k {
    enum { weights = 256, bytes = 144 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        float s, m;
        Four head = block.four(0);
        Two codes = block.two(16 + 32 * (first >> 6) + (first & 24));
        scale_minimum(head, first >> 5, &s, &m);
        nibbles(codes.word, first >> 5 & 1);
        minus_minimum(codes.word, s, m, w);
    }
};

struct q5_k {
    enum { weights = 256, bytes = 176 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        float s, m;
        int32_t j = first >> 5;
        Four head = block.four(0);
        Two codes = block.two(48 + 32 * (first >> 6) + (first & 24));
        Two fifth = block.two(16 + (first & 24));
        scale_minimum(head, j, &s, &m);
        nibbles(codes.word, j & 1);
        QT_UNROLL
        for (int k = 0; k < 2; k++)
            codes.word[k] |= (fifth.word[k] >> j & 0x01010101) << 4;
        minus_minimum(codes.word, s, m, w);
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
        scaled_bytes(low, 32, d, w);
    }
};

} // namespace qt

#endif
