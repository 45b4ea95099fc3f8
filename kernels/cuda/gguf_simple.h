/* Blocks with one scale: the legacy types, the code books of four bits, the ternary types. */
#ifndef QTOOL_CUDA_GGUF_SIMPLE_H
#define QTOOL_CUDA_GGUF_SIMPLE_H

#include "gguf.h"

namespace qt {

/* Eight codes from `first` on, of 32 whose low nibbles come first, from byte `from` on. */
QT_HD void nibbles_of_32(const Block &block, int32_t from, int32_t first, uint32_t *words)
{
    read_eight(block, from + (first & 8), words);
    nibbles(words, first >> 4 & 1);
}

struct q4_0 {
    enum { weights = 32, bytes = 18 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        nibbles_of_32(block, 2, first, q);
        scaled_bytes(q, 255, -8, block.half(0), w);
    }
};

struct q4_1 {
    enum { weights = 32, bytes = 20 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        nibbles_of_32(block, 4, first, q);
        affine_bytes(q, block.half(0), block.half(2), w);
    }
};

struct q5_0 {
    enum { weights = 32, bytes = 22 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        nibbles_of_32(block, 6, first, q);
        spread_bits(block.u8(2 + first / 8), 4, q);
        scaled_bytes(q, 255, -16, block.half(0), w);
    }
};

struct q5_1 {
    enum { weights = 32, bytes = 24 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        nibbles_of_32(block, 8, first, q);
        spread_bits(block.u8(4 + first / 8), 4, q);
        affine_bytes(q, block.half(0), block.half(2), w);
    }
};

struct q8_0 {
    enum { weights = 32, bytes = 34 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        float d = block.half(0);
        read_eight(block, 2 + first, q);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(small((int8_t)byte_of(q, i)), d);
    }
};

struct q1_0 {
    enum { weights = 128, bytes = 18 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t bits = block.u8(2 + first / 8), d = bits_of_float(block.half(0));
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = float_of_bits(bits >> i & 1 ? d : d ^ 0x80000000u);
    }
};

struct q2_0 {
    enum { weights = 64, bytes = 18 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t bits = block.u16(2 + first / 4);
        float d = block.half(0);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(small((int32_t)(bits >> (2 * i) & 3) - 1), d);
    }
};

/* Four of the sixteen numbers of a book in each word; the book is looked up by shifts, which needs
 * no memory. */
QT_HD int32_t iq4_book(uint32_t code)
{
    uint32_t low = code & 4 ? 0xf6eaddcfu : 0xbfad9881u; /* -49 -35 -22 -10, -127 -104 -83 -65 */
    uint32_t high = code & 4 ? 0x71594535u : 0x26190d01u; /* 53 69 89 113, 1 13 25 38 */
    return (int8_t)((code & 8 ? high : low) >> (8 * (code & 3)));
}

/* E2M1, doubled. */
QT_HD int32_t fp4_book(uint32_t code)
{
    uint32_t words = code & 4 ? 0x0c080604u : 0x03020100u;
    int32_t size = (int32_t)(words >> (8 * (code & 3)) & 255);
    return code & 8 ? -size : size;
}

struct iq4_nl {
    enum { weights = 32, bytes = 18 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        float d = block.half(0);
        nibbles_of_32(block, 2, first, q);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(small(iq4_book(byte_of(q, i))), d);
    }
};

struct iq4_xs {
    enum { weights = 256, bytes = 136 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        int32_t j = first / 32;
        uint32_t low = block.u8(4 + j / 2) >> (4 * (j & 1)) & 15;
        uint32_t high = block.u16(2) >> (2 * j) & 3;
        float d = mul(block.half(0), small((int32_t)(low | high << 4) - 32));
        nibbles_of_32(block, 8 + 16 * j, first & 31, q);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(small(iq4_book(byte_of(q, i))), d);
    }
};

struct mxfp4 {
    enum { weights = 32, bytes = 17 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t e = block.u8(0);
        float d = float_of_bits(e < 2 ? 0x200000u << e : (e - 1) << 23);
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            uint32_t q = block.u8(1 + (first & 8) + i) >> (4 * (first >> 4 & 1)) & 15;
            w[i] = mul(small(fp4_book(q)), d);
        }
    }
};

/* Half of an unsigned E4M3; zero for 0 and for 0x7f. The top bit is ignored. */
QT_HD float half_ue4m3(uint32_t code)
{
    uint32_t exponent = code >> 3 & 15, mantissa = code & 7;
    float normal = float_of_bits((exponent + 119) << 23 | mantissa << 20);
    float value = exponent ? normal : mul(small((int32_t)mantissa), 0x1p-10f);
    return code == 0x7f ? 0.0f : value;
}

struct nvfp4 {
    enum { weights = 64, bytes = 36 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t j = first / 16;
        uint32_t q[2] = {block.u32(4 + 8 * j), block.u32(8 + 8 * j)};
        float d = half_ue4m3(block.u8(j));
        nibbles(q, first >> 3 & 1);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(small(fp4_book(byte_of(q, i))), d);
    }
};

/* The top trit of a byte that was multiplied by 3^n before. */
QT_HD int32_t trit(uint32_t byte, int32_t n)
{
    uint32_t power = n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
    return (int32_t)((byte * power & 255) * 3 >> 8);
}

struct tq1_0 {
    enum { weights = 256, bytes = 54 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        float d = block.half(52);
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            int32_t at = first + i, byte = at & 31, n = at >> 5;
            if (at >= 160) {
                byte = 32 + (at & 15);
                n = (at - 160) >> 4;
            }
            if (at >= 240) {
                byte = 48 + (at & 3);
                n = (at - 240) >> 2;
            }
            w[i] = mul(small(trit(block.u8(byte), n) - 1), d);
        }
    }
};

struct tq2_0 {
    enum { weights = 256, bytes = 66 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        int32_t shift = first >> 4 & 6;
        read_eight(block, 32 * (first >> 7) + (first & 24), q);
        q[0] >>= shift;
        q[1] >>= shift;
        scaled_bytes(q, 3, -1, block.half(64), w);
    }
};

} // namespace qt

#endif
