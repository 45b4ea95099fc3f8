/* Products with blocks of GGUF; see gemv.h. */
#ifndef QTOOL_CUDA_GEMV_BLOCKS_H
#define QTOOL_CUDA_GEMV_BLOCKS_H

#include "gemv_inputs.h"
#include "gguf_k.h"

namespace qt {

/* Blocks of Q4_K. Eight lanes have a block, sixteen bytes of codes each: the low nibbles are 16 columns
 * of one sub-block, the high ones those of the next, 32 columns further on. A thread block has ROWS
 * rows, sixteen blocks of each at a time. */
template <int BATCH> struct GemvQ4K {
    enum { BLOCK = 128, ROWS = BATCH == 1 ? 8 : BATCH == 8 ? 2 : 4, ABREAST = BLOCK / 8 };
    enum { SUMS = ROWS * BATCH, SLICES = BLOCK / SUMS };
    enum { TOGETHER = BATCH < 2 ? BATCH : 2 }; /* vectors whose sums of a block are in registers */
    struct Room {
        Shared<float, BLOCK * SUMS> sums;
        Shared<float, BLOCK> slices;
#if defined(QT_CHECKED)
        void clear()
        {
            sums.clear();
            slices.clear();
        }
#endif
    };

    /* Scales and minima of sub-blocks 2 pair and the next as scale_minimum has them, but the scales
     * 2^LOWERED as large. */
    static QT_MEMBER void two_scales(const Four &head, int32_t pair, float *s, float *m)
    {
        int32_t shift = 16 * (pair & 1);
        uint32_t low = head.word[1] >> shift, high = head.word[2] >> shift;
        uint32_t both = head.word[3] >> shift;
        bool plain = pair < 2;
        uint32_t scales = plain ? low & 0x3f3f : (both & 0x0f0f) | (low >> 2 & 0x3030);
        uint32_t minima = plain ? high & 0x3f3f : (both >> 4 & 0x0f0f) | (high >> 2 & 0x3030);
        float d = mul(of_f16(head.word[0] & 0xffff), power_of_two(LOWERED));
        float least = of_f16(head.word[0] >> 16);
        QT_UNROLL
        for (int i = 0; i < 2; i++) {
            s[i] = mul(sub(above_byte(scales, i), 8388608.0f), d);
            m[i] = mul(sub(above_byte(minima, i), 8388608.0f), least);
        }
    }
    /* Vectors from `first` on, of columns from `col` on. */
    static QT_MEMBER void several(const Task &t, const Four *codes, const float (*s)[2],
                                  const float (*m)[2], int32_t col, int32_t first,
                                  float (*acc)[BATCH])
    {
        Four under[TOGETHER][2], over[TOGETHER][2];
        QT_UNROLL
        for (int b = 0; b < TOGETHER; b++)
            QT_UNROLL
            for (int half = 0; half < 2; half++) {
                under[b][half] = eight_inputs<BATCH>(t, first + b, col + 8 * half);
                over[b][half] = eight_inputs<BATCH>(t, first + b, col + 32 + 8 * half);
            }
        float low[ROWS][TOGETHER] = {}, high[ROWS][TOGETHER] = {};
        float of_low[TOGETHER] = {}, of_high[TOGETHER] = {};
        QT_UNROLL
        for (int k = 0; k < 16; k++) {
            float x[TOGETHER], y[TOGETHER];
            const int place = 8 * (k & 1); /* of the low nibble in a pair of bytes */
            QT_UNROLL
            for (int b = 0; b < TOGETHER; b++) {
                float one = input(under[b][k / 8], k % 8), other = input(over[b][k / 8], k % 8);
                of_low[b] = add(of_low[b], one);
                of_high[b] = add(of_high[b], other);
                x[b] = mul(one, power_of_two(RAISED - place));
                y[b] = mul(other, power_of_two(RAISED - place - 4));
            }
            QT_UNROLL
            for (int r = 0; r < ROWS; r++) {
                uint32_t pair = codes[r].word[k / 4] >> (k & 2 ? 16 : 0);
                float q = in_place(pair, place), p = in_place(pair, place + 4);
                QT_UNROLL
                for (int b = 0; b < TOGETHER; b++) {
                    low[r][b] = fma(q, x[b], low[r][b]);
                    high[r][b] = fma(p, y[b], high[r][b]);
                }
            }
        }
        QT_UNROLL
        for (int r = 0; r < ROWS; r++)
            QT_UNROLL
            for (int b = 0; b < TOGETHER; b++) {
                float sum = acc[r][first + b];
                sum = fma(s[r][0], low[r][b], sum);
                sum = fma(-m[r][0], of_low[b], sum);
                sum = fma(s[r][1], high[r][b], sum);
                acc[r][first + b] = fma(-m[r][1], of_high[b], sum);
            }
    }
    static QT_MEMBER void blocks(const Task &t, Place place, int32_t lane, int32_t i,
                                 float (*acc)[BATCH])
    {
        int32_t col = i * q4_k::weights + 64 * (lane >> 1) + 16 * (lane & 1);
        Four head[ROWS], codes[ROWS];
        float s[ROWS][2], m[ROWS][2];
        QT_UNROLL
        for (int r = 0; r < ROWS; r++) {
            int32_t row = least(place.x * ROWS + r, t.rows - 1);
            int64_t begin = product(row, t.pitch) + i * q4_k::bytes;
            Block at = {In<uint8_t>(t.codes, t.codes_bytes), begin};
            head[r] = at.four(0);
            codes[r] = at.four(16 + 16 * lane);
        }
        QT_UNROLL
        for (int r = 0; r < ROWS; r++)
            two_scales(head[r], lane >> 1, s[r], m[r]);
        QT_UNROLL
        for (int32_t first = 0; first < BATCH; first += TOGETHER)
            several(t, codes, s, m, col, first, acc);
    }
    static QT_MEMBER void first(const Task &t, Place place, int32_t thread, Room &room)
    {
        int32_t lane = thread % 8, part = thread / 8;
        int32_t count = (int32_t)t.cols / q4_k::weights, whole = count / ABREAST * ABREAST;
        float acc[ROWS][BATCH] = {};
        QT_ROLLED
        for (int32_t from = 0; from < whole; from += ABREAST)
            blocks(t, place, lane, from + part, acc);
        if (whole + part < count)
            blocks(t, place, lane, whole + part, acc);
        QT_UNROLL
        for (int r = 0; r < ROWS; r++)
            QT_UNROLL
            for (int b = 0; b < BATCH; b++)
                room.sums.put((r * BATCH + b) * BLOCK + thread, acc[r][b]);
    }
    /* SLICES threads add a slice each of a sum's 128 terms, and then one the slices. */
    static QT_MEMBER void second(const Task &, Place, int32_t thread, Room &room)
    {
        int32_t own = thread / SLICES, slice = thread % SLICES;
        float sum = room.sums.get(own * BLOCK + slice);
        QT_UNROLL
        for (int k = SLICES; k < BLOCK; k += SLICES)
            sum = add(sum, room.sums.get(own * BLOCK + slice + k));
        room.slices.put(thread, sum);
    }
    static QT_MEMBER void third(const Task &, Place, int32_t, Room &) {}
    static QT_MEMBER void fourth(const Task &t, Place place, int32_t thread, Room &room)
    {
        int32_t b = thread % BATCH;
        int64_t row = place.x * ROWS + thread / BATCH;
        if (thread >= SUMS || b >= t.batch || row >= t.rows)
            return;
        float sum = room.slices.get(thread * SLICES);
        QT_UNROLL
        for (int k = 1; k < SLICES; k++)
            sum = add(sum, room.slices.get(thread * SLICES + k));
        Out<uint16_t>(t.values, t.values_bytes).put(product(b, t.rows) + row, f16::one(sum));
    }
};
template <int BATCH> struct Parts<GemvQ4K<BATCH>> {
    enum { four = 1, resident = BATCH == 1 ? 4 : 1 };
};

} // namespace qt

#endif
