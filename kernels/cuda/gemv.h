/* Packed weights times a few vectors, as decoding needs: y = x W', x [batch, cols] in float16.
 *
 * Differences code - zero are exact; they are summed in float32 by fused multiply-adds and scaled,
 * a run of 32 columns or (batch above 2) a weight at a time. Sums are made in a fixed order (no atomics), so a result depends on
 * the number of splits but on nothing else, and the host computes the same bits. Each block leaves
 * partial sums [splits, batch, rows] in float32; gemv_sum adds them and rounds to float16. */
#ifndef QTOOL_CUDA_GEMV_H
#define QTOOL_CUDA_GEMV_H

#include "gguf_k.h"
#include "grid.h"

namespace qt {

/* Partial sums of a block: `LANES` for each of which `SUMS` numbers are added over `PARTS`. */
template <int PARTS, int LANES, int SUMS> struct Partial {
    Shared<float, PARTS * LANES * SUMS> sums;
#if defined(QT_CHECKED)
    void clear() { sums.clear(); }
#endif
    QT_MEMBER void put(int part, int lane, int i, float value)
    {
        sums.put((i * PARTS + part) * LANES + lane, value);
    }
    QT_MEMBER float total(int lane, int i) const
    {
        float sum = sums.get(i * PARTS * LANES + lane);
        for (int part = 1; part < PARTS; part++)
            sum = add(sum, sums.get((i * PARTS + part) * LANES + lane));
        return sum;
    }
};

/* Eight inputs of vector b from a column on that is a multiple of eight; zeros past the batch. */
QT_HD Four eight_inputs(const Task &t, int32_t b, int32_t col)
{
    if (b < t.batch)
        return In<uint16_t>(t.inputs, t.inputs_bytes).wide<Four>(b * t.cols + col);
    return Four{{0, 0, 0, 0}};
}

QT_HD float input(const Four &eight, int i)
{
    return of_f16(eight.word[i / 2] >> (16 * (i & 1)) & 0xffff);
}

/* A nibble as the upper mantissa of a float: 16 + q, in two instructions. */
QT_HD float sixteen_and(uint32_t word, int i)
{
    uint32_t moved = i < 5 ? word << (19 - 4 * i) : word >> (4 * i - 19);
    return float_of_bits((moved & 0x780000u) | 0x41800000u);
}

/* Words of AWQ GEMM or GPTQ of 4 bits, groups a multiple of 32 columns, scales float16 [groups, rows],
 * zeros in words [groups, rows / 8] of either order; rows a multiple of 8. Of four warps each takes every fourth run of 32 columns of the block's
 * share; a lane has ROWS neighbouring rows. */
template <bool AWQ, int BATCH> struct GemvWords {
    enum { BLOCK = 128, PARTS = 4, LANES = 32, ROWS = AWQ ? 8 : 4, RUN = 32 };
    /* With many vectors it is cheaper to scale a weight than to keep sums of runs. */
    enum { WEIGHTS_SCALED = BATCH >= 4 };
    typedef Partial<PARTS, LANES, BATCH * ROWS> Room;

    /* The row that nibble i of AWQ's word has; GPTQ's rows are in order. */
    static QT_MEMBER int32_t row_of(int i) { return AWQ ? (i < 4 ? 2 * i : 2 * i - 7) : i; }

    static QT_MEMBER void run(const Task &t, int64_t row, int32_t col, float (*acc)[ROWS])
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        float zero[ROWS], scale[ROWS], sum[BATCH][ROWS];
        In<uint16_t> scales(t.scale, t.scale_bytes);
        int32_t group = group_of(t, col), value = (int32_t)t.zero_value;
        uint32_t zeros = In<uint32_t>(t.zero, t.zero_bytes)[group * t.zero_group + (row >> 3)];
        zeros >>= (row & 4) * 4;
        QT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            zero[i] = small(16 + (((int32_t)(zeros >> (4 * i)) + value) & 15));
            scale[i] = of_f16(scales[group * t.scale_group + row + row_of(i)]);
            QT_UNROLL
            for (int b = 0; b < BATCH; b++)
                sum[b][i] = WEIGHTS_SCALED ? acc[b][i] : 0.0f;
        }
        for (int32_t from = col; from < col + RUN; from += 8) {
            Four x[BATCH], found;
            QT_UNROLL
            for (int b = 0; b < BATCH; b++)
                x[b] = eight_inputs(t, b, from);
            if (!AWQ)
                found = words.wide<Four>((from >> 3) * t.pitch + row);
            QT_UNROLL
            for (int k = 0; k < 8; k++) {
                uint32_t word = AWQ ? words[(from + k) * t.pitch + (row >> 3)] : 0;
                float now[BATCH];
                QT_UNROLL
                for (int b = 0; b < BATCH; b++)
                    now[b] = input(x[b], k);
                QT_UNROLL
                for (int i = 0; i < ROWS; i++) {
                    float q = AWQ ? sixteen_and(word, i) : sixteen_and(found.word[i & 3], k);
                    float w = sub(q, zero[i]);
                    if (WEIGHTS_SCALED)
                        w = mul(w, scale[i]);
                    QT_UNROLL
                    for (int b = 0; b < BATCH; b++)
                        sum[b][i] = fma(w, now[b], sum[b][i]);
                }
            }
        }
        QT_UNROLL
        for (int b = 0; b < BATCH; b++)
            QT_UNROLL
            for (int i = 0; i < ROWS; i++)
                acc[b][i] = WEIGHTS_SCALED ? sum[b][i] : fma(sum[b][i], scale[i], acc[b][i]);
    }

    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        int32_t lane = thread % LANES, part = thread / LANES;
        int64_t row = (block.x * LANES + lane) * ROWS;
        if (row >= t.rows)
            return;
        float acc[BATCH][ROWS] = {};
        int32_t step = (int32_t)t.splits * PARTS, runs = (int32_t)t.cols / RUN;
        for (int32_t i = block.y * PARTS + part; i < runs; i += step)
            run(t, row, i * RUN, acc);
        QT_UNROLL
        for (int b = 0; b < BATCH; b++)
            QT_UNROLL
            for (int i = 0; i < ROWS; i++)
                room.put(part, lane, b * ROWS + i, acc[b][i]);
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        Out<float> values(t.values, t.values_bytes);
        for (int32_t at = thread; at < LANES * ROWS * BATCH; at += BLOCK) {
            int32_t lane = at % LANES, i = at / LANES, b = i / ROWS;
            int64_t row = (block.x * LANES + lane) * ROWS + row_of(i % ROWS);
            if (row < t.rows && b < t.batch)
                values.put((block.y * t.batch + b) * t.rows + row, room.total(lane, i));
        }
    }
};

/* Blocks of Q4_K: a warp has a row, a lane eight of each 256 columns. */
template <int BATCH> struct GemvQ4K {
    enum { BLOCK = 128, ROWS = 4, LANES = 32 };
    typedef Partial<LANES, ROWS, BATCH> Room;

    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        int32_t lane = thread % LANES, down = thread / LANES;
        int64_t row = block.x * ROWS + down;
        if (row >= t.rows)
            return;
        float acc[BATCH] = {};
        int32_t blocks = (int32_t)t.cols / q4_k::weights;
        for (int32_t i = block.y; i < blocks; i += (int32_t)t.splits) {
            Block at = {In<uint8_t>(t.codes, t.codes_bytes), row * t.pitch + i * q4_k::bytes};
            float s, m, q[8];
            Two codes = at.two(16 + 32 * (lane >> 3) + (lane & 3) * 8);
            scale_minimum(at.four(0), lane >> 2, &s, &m);
            nibbles(codes.word, lane >> 2 & 1);
            QT_UNROLL
            for (int k = 0; k < 8; k++)
                q[k] = number_of(codes.word, k, 0);
            QT_UNROLL
            for (int b = 0; b < BATCH; b++) {
                Four x = eight_inputs(t, b, i * q4_k::weights + lane * 8);
                float product = 0, sum = 0;
                QT_UNROLL
                for (int k = 0; k < 8; k++) {
                    product = fma(q[k], input(x, k), product);
                    sum = add(sum, input(x, k));
                }
                acc[b] = fma(s, product, acc[b]);
                acc[b] = fma(-m, sum, acc[b]);
            }
        }
        QT_UNROLL
        for (int b = 0; b < BATCH; b++)
            room.put(lane, down, b, acc[b]);
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        int32_t down = thread % ROWS, b = thread / ROWS;
        int64_t row = block.x * ROWS + down;
        if (b < BATCH && b < t.batch && row < t.rows)
            Out<float>(t.values, t.values_bytes)
                .put((block.y * t.batch + b) * t.rows + row, room.total(down, b));
    }
};

/* Sums over splits, codes [splits, batch * rows] in float32, to float16. */
struct GemvSum {
    enum { BLOCK = 256 };
    struct Room {
#if defined(QT_CHECKED)
        void clear() {}
#endif
    };
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> parts(t.codes, t.codes_bytes);
        int64_t count = t.batch * t.rows, at = block.x * BLOCK + thread;
        if (at >= count)
            return;
        float sum = parts[at];
        for (int32_t split = 1; split < t.splits; split++)
            sum = add(sum, parts[split * count + at]);
        Out<uint16_t>(t.values, t.values_bytes).put(at, f16::one(sum));
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

} // namespace qt

#define QT_GEMV_KERNELS(X)                                                          \
    X(gemv_across_4_1, qt::GemvWords<true, 1>) X(gemv_across_4_2, qt::GemvWords<true, 2>)   \
    X(gemv_across_4_4, qt::GemvWords<true, 4>) X(gemv_across_4_8, qt::GemvWords<true, 8>)   \
    X(gemv_columns_4_1, qt::GemvWords<false, 1>) X(gemv_columns_4_2, qt::GemvWords<false, 2>) \
    X(gemv_columns_4_4, qt::GemvWords<false, 4>) X(gemv_columns_4_8, qt::GemvWords<false, 8>) \
    X(gemv_q4_k_1, qt::GemvQ4K<1>) X(gemv_q4_k_2, qt::GemvQ4K<2>)                   \
    X(gemv_q4_k_4, qt::GemvQ4K<4>) X(gemv_q4_k_8, qt::GemvQ4K<8>)                   \
    X(gemv_sum, qt::GemvSum)

#endif
