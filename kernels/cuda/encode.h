/* float32, float16 or bfloat16 to blocks of GGUF: a thread encodes a block, by the same source as
 * the CPU (kernels/gguf_encode_*_body.h), and so to the same bytes.
 *
 *     inputs       weights [rows, cols], of scale_dtype
 *     index        importance [matrices, cols] of float32, or none; block_rows rows share a line,
 *                  the first row is number first_row of the tensor
 *     scale        the mean square of each row, for q4_0 to q5_1 with importance (mean_squares)
 *     codes, zero  the lattice of the type: which point codes are, and what is near (gguf_lattice.h)
 *     values       the blocks
 *
 * Weights that are not finite give blocks of no meaning, as on the CPU, where they are refused. */
#ifndef QTOOL_CUDA_ENCODE_H
#define QTOOL_CUDA_ENCODE_H

#include "gguf_simple.h"
#include "grid.h"

#define QT_ONE_LANE 1

namespace qt {
namespace lane {
#include "gguf_encode_book_body.h"
#include "gguf_encode_iq1_body.h"
#include "gguf_encode_k_body.h"
#include "gguf_encode_k_symmetric_body.h"
#include "gguf_encode_lattice_body.h"
#include "gguf_encode_legacy_body.h"

ENCODER void encode_q8_0(panel *p)
{
    V magnitude = splat(0);
    I code[32];
    QT_UNROLL
    for (int i = 0; i < 32; i++)
        magnitude = most(magnitude, absolute(p->x[i]));
    V d = magnitude / 127.0f, inverse = inverse_of(d);
    inverse = pick(lt(inverse, INFINITY), inverse, splat(0)); /* d is subnormal */
    QT_UNROLL
    for (int i = 0; i < 32; i++)
        code[i] = rounded_small(p->x[i] * inverse) & 255;
    put_half(p, 0, to_half(d));
    put_bytes(p, 2, code, 32);
}

ENCODER void encode_any_q4_1(panel *p) { p->weighted ? search_q4_1(p) : encode_q4_1(p); }
ENCODER void encode_any_q5_1(panel *p) { p->weighted ? search_q5_1(p) : encode_q5_1(p); }
} // namespace lane

/* Eight numbers of a dtype from element i on, a multiple of eight. */
QT_HD void eight_numbers(const Task &t, int64_t i, float *x)
{
    if (t.scale_dtype == F32) {
        In<uint32_t> from(t.inputs, t.inputs_bytes);
        Four low = from.wide<Four>(i), high = from.wide<Four>(i + 4);
        QT_UNROLL
        for (int k = 0; k < 4; k++) {
            x[k] = float_of_bits(low.word[k]);
            x[k + 4] = float_of_bits(high.word[k]);
        }
        return;
    }
    Four halves = In<uint16_t>(t.inputs, t.inputs_bytes).wide<Four>(i);
    QT_UNROLL
    for (int k = 0; k < 8; k++) {
        uint32_t half = halves.word[k / 2] >> (16 * (k % 2)) & 0xffff;
        x[k] = t.scale_dtype == F16 ? of_f16(half) : of_bf16(half);
    }
}

template <class TYPE> struct Encode {
    enum { BLOCK = 64, WHOLE = TYPE::whole ? TYPE::bytes : 0, KEPT = TYPE::whole ? TYPE::bytes : 2 };
    typedef NoRoom Room;
    static QT_MEMBER void first(const Task &t, Place place, int32_t thread, Room &)
    {
        int64_t row_blocks = t.cols / TYPE::weights, block = place.x * BLOCK + thread;
        if (block >= t.rows * row_blocks)
            return;
        int64_t row = block / row_blocks, col = (block - row * row_blocks) * TYPE::weights;
        uint8_t bytes[KEPT];
        Out<uint8_t> out(t.values, t.values_bytes);
        lane::panel p = {{},
                         nullptr,
                         t.index != 0,
                         0,
                         out,
                         block * TYPE::bytes,
                         TYPE::bytes,
                         {In<int32_t>(t.codes, t.codes_bytes), In<uint16_t>(t.zero, t.zero_bytes)},
                         {bytes}};
        for (int i = 0; i < TYPE::weights; i += 8)
            eight_numbers(t, block * TYPE::weights + i, p.x + i);
        if (p.weighted) {
            int64_t line = (t.first_row + row) / t.block_rows;
            In<float> importance(t.index, t.index_bytes);
            p.w = importance.run(line * t.cols + col, TYPE::weights);
            if (!p.w)
                return;
            if (t.scale)
                p.row_sigma2 = In<float>(t.scale, t.scale_bytes)[row];
        }
        TYPE::encode(&p);
        for (int i = 0; i < WHOLE; i += 2) {
            uint32_t both = bytes[i] | (uint32_t)bytes[i + 1] << 8;
            out.put_wide(p.begin + i, (uint16_t)both);
        }
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* The mean square of each row, summed from the left. */
struct MeanSquares {
    enum { BLOCK = 32 };
    typedef NoRoom Room;
    static QT_MEMBER void first(const Task &t, Place place, int32_t thread, Room &)
    {
        int64_t row = place.x * BLOCK + thread;
        if (row >= t.rows)
            return;
        float sum = 0, x[8];
        for (int64_t col = 0; col < t.cols; col += 8) {
            eight_numbers(t, row * t.cols + col, x);
            QT_UNROLL
            for (int i = 0; i < 8; i++)
                sum = add(sum, mul(x[i], x[i]));
        }
        Out<float>(t.values, t.values_bytes).put(row, divide(sum, (float)t.cols));
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* Sums of squares as kernels/squares.c has them, of runs of rows: run k is rows index[k] to
 * index[k + 1]. values [runs, 2] of float64: of the weights (inputs), and of what they differ from
 * codes, [rows, cols] of float32. Sixteen sums side by side, a thread each, and then their sum. */
struct Squares {
    enum { BLOCK = 256, SUMS = 16, RUNS = BLOCK / SUMS };
    struct Room {
        Shared<double, 2 * BLOCK> sums;
#if defined(QT_CHECKED)
        void clear() { sums.clear(); }
#endif
    };
    static QT_MEMBER void first(const Task &t, Place place, int32_t thread, Room &room)
    {
        int64_t run = place.x * RUNS + thread / SUMS;
        double size = 0, lost = 0;
        if (run < t.batch) {
            In<int32_t> index(t.index, t.index_bytes);
            In<float> back(t.codes, t.codes_bytes);
            int64_t from = index[run] * t.cols, to = index[run + 1] * t.cols;
            for (int64_t i = from + thread % SUMS; i < to; i += SUMS) {
                float x = number(t.inputs, t.inputs_bytes, (int32_t)t.scale_dtype, i);
                double apart = (double)x - (double)back[i];
                size += (double)x * (double)x;
                lost += apart * apart;
            }
        }
        room.sums.put(2 * thread, size);
        room.sums.put(2 * thread + 1, lost);
    }
    static QT_MEMBER void second(const Task &t, Place place, int32_t thread, Room &room)
    {
        int64_t run = place.x * RUNS + thread / 2;
        if (thread >= 2 * RUNS || run >= t.batch)
            return;
        double total = 0;
        for (int i = 0; i < SUMS; i++)
            total += room.sums.get(2 * (thread / 2 * SUMS + i) + thread % 2);
        Out<double>(t.values, t.values_bytes).put(2 * run + thread % 2, total);
    }
};

#define QT_ENCODED(X)                                                                        \
    X(q4_0, 32, 18, encode_q4_0) X(q4_1, 32, 20, encode_any_q4_1) X(q5_0, 32, 22, encode_q5_0) \
    X(q5_1, 32, 24, encode_any_q5_1) X(q8_0, 32, 34, encode_q8_0) X(q2_k, 256, 84, encode_q2_k) \
    X(q3_k, 256, 110, encode_q3_k) X(q4_k, 256, 144, encode_q4_k)                            \
    X(q5_k, 256, 176, encode_q5_k) X(q6_k, 256, 210, encode_q6_k)                            \
    X(iq4_nl, 32, 18, encode_iq4_nl) X(iq4_xs, 256, 136, encode_iq4_xs)                      \
    X(tq1_0, 256, 54, encode_tq1_0) X(tq2_0, 256, 66, encode_tq2_0)                          \
    X(mxfp4, 32, 17, encode_mxfp4) X(nvfp4, 64, 36, encode_nvfp4)                            \
    X(q1_0, 128, 18, encode_q1_0) X(q2_0, 64, 18, encode_q2_0)
/* Blocks that are laid out first, and then written. */
#define QT_ENCODED_WHOLE(X)                                                                  \
    X(iq2_xxs, 256, 66, encode_iq2_xxs) X(iq2_xs, 256, 74, encode_iq2_xs)                    \
    X(iq2_s, 256, 82, encode_iq2_s) X(iq3_xxs, 256, 98, encode_iq3_xxs)                      \
    X(iq3_s, 256, 110, encode_iq3_s) X(iq1_s, 256, 50, encode_iq1_s) X(iq1_m, 256, 56, encode_iq1_m)

namespace encoded {
#define QT_TYPE(name, count, size, function, at_once)                       \
    struct name {                                                           \
        enum { weights = count, bytes = size, whole = at_once };            \
        static QT_MEMBER void encode(lane::panel *p) { lane::function(p); } \
    };
#define QT_PIECEWISE(...) QT_TYPE(__VA_ARGS__, 0)
#define QT_WHOLE(...) QT_TYPE(__VA_ARGS__, 1)
QT_ENCODED(QT_PIECEWISE)
QT_ENCODED_WHOLE(QT_WHOLE)
#undef QT_PIECEWISE
#undef QT_WHOLE
#undef QT_TYPE
} // namespace encoded
} // namespace qt

#define QT_ENCODE(name) QT_KERNEL(encode_##name, qt::Encode<qt::encoded::name>)
#define QT_MEASURE_KERNELS(X) X(measure_rows, qt::MeanSquares) X(measure_squares, qt::Squares)

#endif
