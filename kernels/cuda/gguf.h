/* What the block types of GGUF share: reading a block, whose address may be no multiple of four.
 *
 * A block type is a struct: how many weights and bytes a block has, and `eight`, which computes
 * eight weights of a block from `first` on. What lies where in a block is told beside the functions
 * of the same names in kernels/gguf_dequant_*.h, whose results these equal. */
#ifndef QTOOL_CUDA_GGUF_H
#define QTOOL_CUDA_GGUF_H

#include "scales.h"

namespace qt {

/* A block: byte i of it. Bytes from a multiple of `aligned` on may be read together. */
struct Block {
    In<uint8_t> bytes;
    int64_t begin;
    QT_MEMBER uint32_t u8(int32_t i) const { return bytes[begin + i]; }
    QT_MEMBER int32_t i8(int32_t i) const { return (int8_t)bytes[begin + i]; }
    /* i even, in a type whose blocks have even sizes. */
    QT_MEMBER uint32_t u16(int32_t i) const { return bytes.wide<uint16_t>(begin + i); }
    QT_MEMBER uint32_t u32_by_halves(int32_t i) const { return u16(i) | u16(i + 2) << 16; }
    /* i a multiple of four, in a type whose blocks have such sizes. */
    QT_MEMBER uint32_t u32(int32_t i) const { return bytes.wide<uint32_t>(begin + i); }
    QT_MEMBER float half(int32_t i) const { return of_f16(u16(i)); }
    /* Eight or sixteen bytes, as i and the sizes of blocks allow. */
    QT_MEMBER Two two(int32_t i) const { return bytes.wide<Two>(begin + i); }
    QT_MEMBER Four four(int32_t i) const { return bytes.wide<Four>(begin + i); }
};

/* Byte i of two words. */
QT_HD uint32_t byte_of(const uint32_t *words, int i) { return words[i / 4] >> (8 * (i % 4)) & 255; }

/* Byte i of two words, less an integer: as the last places of a 2^23. */
QT_HD float number_of(const uint32_t *words, int i, float less)
{
    return sub(above_byte(words[i / 4], i % 4), 8388608.0f + less);
}

/* w = (q - less) d for eight bytes. */
QT_HD void scaled_bytes(const uint32_t *words, float less, float d, float *w)
{
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        w[i] = mul(number_of(words, i, less), d);
}

/* w = q d + m. */
QT_HD void affine_bytes(const uint32_t *words, float d, float m, float *w)
{
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        w[i] = add(mul(number_of(words, i, 0), d), m);
}

/* The low or the high nibbles of eight bytes, by themselves. */
QT_HD void nibbles(uint32_t *words, int32_t high)
{
    words[0] = words[0] >> (4 * high) & 0x0f0f0f0f;
    words[1] = words[1] >> (4 * high) & 0x0f0f0f0f;
}

/* Eight bits as bit `to` of eight bytes. */
QT_HD void spread_bits(uint32_t bits, int32_t to, uint32_t *words)
{
    words[0] |= (((bits & 15) * 0x00204081u) & 0x01010101u) << to;
    words[1] |= ((((bits >> 4) & 15) * 0x00204081u) & 0x01010101u) << to;
}

/* Eight bytes from an even byte on. */
QT_HD void read_eight(const Block &block, int32_t from, uint32_t *words)
{
    words[0] = block.u32_by_halves(from);
    words[1] = block.u32_by_halves(from + 4);
}

/* Rows of blocks as a format. */
template <class TYPE> struct Blocks {
    enum { lean = 1 };
    static QT_MEMBER bool at_once(const Task &) { return true; }
    static QT_MEMBER Block block_at(const Task &t, int64_t row, int32_t col)
    {
        int32_t block = (int32_t)((uint32_t)col / TYPE::weights);
        return Block{In<uint8_t>(t.codes, t.codes_bytes), product(row, t.pitch) + block * TYPE::bytes};
    }
    /* A step is a whole number of blocks, so that what lies where in a block is the same in all. */
    template <int STEPS>
    static QT_MEMBER void steps(const Task &t, int64_t row, int32_t col, float (*w)[8])
    {
        Block at = block_at(t, row, col);
        int32_t first = (int32_t)((uint32_t)col % TYPE::weights);
        QT_UNROLL
        for (int k = 0; k < STEPS; k++) {
            Block own = {at.bytes, at.begin + k * (STEP / TYPE::weights * TYPE::bytes)};
            TYPE::eight(own, first, w[k]);
        }
    }
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        TYPE::eight(block_at(t, row, col), (int32_t)((uint32_t)col % TYPE::weights), w);
    }
};

} // namespace qt

#endif
