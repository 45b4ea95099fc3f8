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
        scaled_bytes(q, 8, block.half(0), w);
    }
};

struct q4_1 {
    enum { weights = 32, bytes = 20 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t halves = block.u32(0), q[2] = {block.u32(4 + (first & 8)), block.u32(8 + (first & 8))};
        nibbles(q, first >> 4 & 1);
        affine_bytes(q, of_f16(halves & 0xffff), of_f16(halves >> 16), w);
    }
};

struct q5_0 {
    enum { weights = 32, bytes = 22 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        nibbles_of_32(block, 6, first, q);
        spread_bits(block.u8(2 + first / 8), 4, q);
        scaled_bytes(q, 16, block.half(0), w);
    }
};

struct q5_1 {
    enum { weights = 32, bytes = 24 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t halves = block.u32(0), fifth = block.u8(4 + first / 8);
        Two q = block.two(8 + (first & 8));
        nibbles(q.word, first >> 4 & 1);
        spread_bits(fifth, 4, q.word);
        affine_bytes(q.word, of_f16(halves & 0xffff), of_f16(halves >> 16), w);
    }
};

struct q8_0 {
    enum { weights = 32, bytes = 34 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        float d = block.half(0);
        read_eight(block, 2 + first, q);
        q[0] ^= 0x80808080; /* 128 more, and no sign */
        q[1] ^= 0x80808080;
        scaled_bytes(q, 128, d, w);
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

/* Eight codes, a byte each, become bytes of a table of sixteen: of its two halves one is taken where
 * the fourth bit of a code is. */
QT_HD void bytes_of_book(uint32_t *words, const uint32_t *book)
{
    QT_UNROLL
    for (int k = 0; k < 2; k++) {
        uint32_t code = words[k], pairs = code | code >> 4;
        uint32_t at = byte_perm(pairs, 0, 0x4420) & 0x7777;
        uint32_t upper = signs_of_bytes(code << 4);
        words[k] = (byte_perm(book[0], book[1], at) & ~upper) |
                   (byte_perm(book[2], book[3], at) & upper);
    }
}

/* w = d times the entries of iq4_book, here 128 more, or of fp4_book, 16 more. */
QT_HD void scaled_iq4(uint32_t *words, float d, float *w)
{
    const uint32_t book[4] = {0x3f2d1801, 0x766a5d4f, 0xa6998d81, 0xf1d9c5b5};
    bytes_of_book(words, book);
    scaled_bytes(words, 128, d, w);
}

QT_HD void scaled_fp4(uint32_t *words, float d, float *w)
{
    const uint32_t book[4] = {0x13121110, 0x1c181614, 0x0d0e0f10, 0x04080a0c};
    bytes_of_book(words, book);
    scaled_bytes(words, 16, d, w);
}

struct iq4_nl {
    enum { weights = 32, bytes = 18 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        nibbles_of_32(block, 2, first, q);
        scaled_iq4(q, block.half(0), w);
    }
};

struct iq4_xs {
    enum { weights = 256, bytes = 136 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        int32_t j = first >> 5;
        Two head = block.two(0), q = block.two(8 + 16 * j + (first & 8));
        uint32_t low = head.word[1] >> (4 * j) & 15, high = head.word[0] >> (16 + 2 * j) & 3;
        float d = mul(of_f16(head.word[0] & 0xffff), small((int32_t)(low | high << 4) - 32));
        nibbles(q.word, first >> 4 & 1);
        scaled_iq4(q.word, d, w);
    }
};

/* Eight bytes from wherever on: the two aligned words that begin before them or with them, and one to
 * three bytes more. Nothing is read beyond the eighth. */
QT_HD void read_eight_anywhere(const Block &block, int32_t from, uint32_t *words)
{
    int64_t at = block.begin + from;
    int32_t past = (int32_t)at & 3;
    Block aligned = {block.bytes, at - past};
    uint32_t low = aligned.u32(0), high = aligned.u32(4), last = block.u8(from + 7);
    uint32_t pair = aligned.u16(past < 2 ? 0 : 8);
    uint32_t rest = past == 1 ? last : past == 2 ? pair : pair | last << 16;
    words[0] = (uint32_t)((low | (uint64_t)high << 32) >> (8 * past));
    words[1] = (uint32_t)((high | (uint64_t)rest << 32) >> (8 * past));
}

struct mxfp4 {
    enum { weights = 32, bytes = 17 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t e = block.u8(0), q[2];
        read_eight_anywhere(block, 1 + (first & 8), q);
        float d = float_of_bits(e < 2 ? 0x200000u << e : (e - 1) << 23);
        nibbles(q, first >> 4 & 1);
        scaled_fp4(q, d, w);
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
        scaled_fp4(q, d, w);
    }
};

/* The top trit of a byte that was multiplied by a power of three before. */
QT_HD int32_t trit(uint32_t byte, uint32_t power) { return (int32_t)((byte * power & 255) * 3 >> 8); }

QT_HD uint32_t power_of_three(int32_t n)
{
    return n == 0 ? 1 : n == 1 ? 3 : n == 2 ? 9 : n == 3 ? 27 : 81;
}

/* Trit n of bytes 0 to 31 for the first 160 weights, of bytes 32 to 47 for the next 80, and of bytes 48
 * to 51 for the last 16. */
struct tq1_0 {
    enum { weights = 256, bytes = 54 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        bool last = first >= 240;
        int32_t from = first < 160 ? first & 31 : last ? 48 : 32 + (first & 15);
        int32_t n = first < 160 ? first >> 5 : last ? (first - 240) >> 2 : (first - 160) >> 4;
        float d = block.half(52);
        uint32_t q[2] = {block.u32_by_halves(from), block.u32_by_halves(last ? from : from + 4)};
        uint32_t power[2] = {power_of_three(n), power_of_three(last ? n + 1 : n)};
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = mul(small(trit(byte_of(q, i), power[i / 4]) - 1), d);
    }
};

struct tq2_0 {
    enum { weights = 256, bytes = 66 };
    static QT_MEMBER void eight(const Block &block, int32_t first, float *w)
    {
        uint32_t q[2];
        int32_t shift = first >> 4 & 6;
        read_eight(block, 32 * (first >> 7) + (first & 24), q);
        q[0] = q[0] >> shift & 0x03030303;
        q[1] = q[1] >> shift & 0x03030303;
        scaled_bytes(q, 1, block.half(64), w);
    }
};

} // namespace qt

#endif
