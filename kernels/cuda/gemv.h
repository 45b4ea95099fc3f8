/* Packed weights times a few vectors, as decoding needs: y = x W', x [batch, cols] in float16, batch 1
 * to 8, by tensor cores (tensor.h).
 *
 * Codes and zeros, or codes and scales of sub-blocks, become halves exactly; products with inputs are
 * summed by tensor cores over a group or a block, then scaled and summed in float32 by fused
 * multiply-adds. Sums are made in a fixed order (atomics only count), so a result depends on the number
 * of splits and on the tensor core, but on nothing else. Where blocks share rows, each leaves partial
 * sums [splits, batch, rows] in float32; the last of them to be done adds all (`sums` and `done`, a
 * counter for each x of the grid that is zero before and after), or gemv_sum does, where the sums are
 * `values`. The result is float16.
 *
 * Programmatic launches. A small matrix is read in less time than lies between two kernels. From sm_90 on
 * these may be launched (qtool/cuda/running.py) so that they begin before the kernel before them on a
 * stream has ended: they ask for the first of their words, scales and zeros, let the next kernel begin,
 * wait, and only then read inputs and what blocks leave each other, and write. It holds because
 *   - every thread waits, the idle ones too: a kernel ends after the one before it, so that whoever waits
 *     for it, by whatever means, has waited for all of them. Two that follow each other may be under way
 *     together with a third one before them, which is why
 *   - what is read early was there before the last launch on the stream that was not programmatic. Its
 *     caller has to know that: weights are, where nothing on the GPU makes them meanwhile;
 *   - what others may write is Late or Scratch, read by loads that no compiler moves before the wait;
 *   - blocks that wait keep none of an earlier kernel from beginning: all of those have begun, or the
 *     next kernel would not have. */
#ifndef QTOOL_CUDA_GEMV_H
#define QTOOL_CUDA_GEMV_H

#include "gemv_blocks.h"
#include "gemv_words.h"

namespace qt {

/* A sum that is to be added to others. */
struct AsItIs {
    static QT_MEMBER float one(float value) { return value; }
};

/* ABREAST warps of a block are next to each other in its TILE rows; PARTS of them have the same rows and
 * different columns, and are added through shared memory. */
template <class LAYOUT> struct Gemv {
    enum { BLOCK = LAYOUT::BLOCK, ABREAST = LAYOUT::ABREAST, PARTS = BLOCK / 32 / ABREAST };
    enum { VECTORS = 8, ROWS = LAYOUT::ROWS, TILE = ROWS * ABREAST, TILES = LAYOUT::TILES };
    enum { STEP = BLOCK / TILE, OWN = VECTORS / STEP }; /* a thread has every STEP-th vector of a row */
    enum { STRIDE = ROWS + 4 }; /* so that no two lanes of a warp meet in a bank */
    struct Room {
        Shared<float, PARTS * ABREAST * VECTORS * STRIDE> sums;
        Shared<int32_t, 1> last; /* whether no other block of these rows is still at work */
        typename LAYOUT::Ring ring;
#if defined(QT_CHECKED)
        void clear()
        {
            ring.clear();
            sums.clear();
            last.clear();
        }
#endif
    };
    static QT_MEMBER int32_t place(int32_t part, int32_t across, int32_t vector, int32_t slot)
    {
        return ((part * ABREAST + across) * VECTORS + vector) * STRIDE + slot;
    }

    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        uint32_t warp = (uint32_t)thread / 32;
        int32_t across = (int32_t)(warp % ABREAST), part = (int32_t)(warp / ABREAST);
        int32_t top = (int32_t)block.x * TILE + across * ROWS;
        if (top >= (int32_t)t.rows)
            return wait_for_kernels_before();
        if (!speaks(thread))
            return;
        typename LAYOUT::Lane lanes[HELD];
        Sums acc[TILES][HELD] = {};
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            lanes[l] = LAYOUT::lane_of(t, top, (thread & ~31) + lane_at(thread, l));
        LAYOUT::run(t, lanes, block.y * PARTS + part, (int32_t)t.splits * PARTS, room.ring, acc);
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int b = 0; b < 2; b++) {
                int32_t lane = lane_at(thread, l), vector = 2 * (lane & 3) + b;
                int32_t to = place(part, across, vector, lane >> 2);
                if (vector >= (int32_t)t.batch)
                    continue;
                QT_UNROLL
                for (int r = 0; r < 2 * TILES; r++)
                    room.sums.put(to + 8 * r, acc[r / 2][l].at[2 * (r & 1) + b]);
            }
    }
    /* Adds the parts of every so many vectors of a row, and puts them somewhere from `to` on. */
    template <class AS, class TO>
    static QT_MEMBER void add_parts(const Task &t, int32_t thread, const Room &room, const TO &sums,
                                    int64_t to)
    {
        uint32_t own = (uint32_t)thread % TILE;
        int32_t from = place(0, (int32_t)(own / ROWS), 0, LAYOUT::slot(own % ROWS));
        QT_UNROLL_4
        for (int32_t b = (uint32_t)thread / TILE; b < (int32_t)t.batch; b += STEP) {
            float sum = room.sums.get(from + b * STRIDE);
            QT_UNROLL
            for (int part = 1; part < PARTS; part++)
                sum = add(sum, room.sums.get(from + b * STRIDE + part * (ABREAST * VECTORS * STRIDE)));
            sum = mul(sum, float_of_bits((127u + LAYOUT::LOWERED) << 23));
            sums.put(to + product(b, t.rows), AS::one(sum));
        }
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        int32_t row = (int32_t)block.x * TILE + (int32_t)((uint32_t)thread % TILE);
        int64_t of_split = product(block.y * (int32_t)t.batch, t.rows) + row;
        if (row >= (int32_t)t.rows)
            ;
        else if ((int32_t)t.splits == 1)
            add_parts<f16>(t, thread, room, Out<uint16_t>(t.values, t.values_bytes), row);
        else if (t.done)
            add_parts<AsItIs>(t, thread, room, Scratch<float>(t.sums, t.sums_bytes), of_split);
        else
            add_parts<AsItIs>(t, thread, room, Out<float>(t.values, t.values_bytes), of_split);
    }
    static QT_MEMBER void third(const Task &t, Place block, int32_t thread, Room &room)
    {
        if (thread)
            return;
        Scratch<uint32_t> done(t.done, t.done_bytes);
        bool last = t.done && done.count_up(block.x) + 1 == (uint32_t)t.splits;
        room.last.put(0, last); /* always: compilers read it before they look at t.done */
        if (last)
            done.put(block.x, 0);
    }
    static QT_MEMBER void fourth(const Task &t, Place block, int32_t thread, Room &room)
    {
        if (!t.done || !room.last.get(0))
            return;
        Scratch<float> sums(t.sums, t.sums_bytes);
        int32_t row = (int32_t)block.x * TILE + (int32_t)((uint32_t)thread % TILE);
        int32_t rows = (int32_t)t.rows;
        if (row >= rows)
            return;
        /* All vectors at once: what other blocks left is some hundred cycles away. */
        int32_t vector = (uint32_t)thread / TILE, batch = (int32_t)t.batch;
        float sum[OWN];
        QT_UNROLL
        for (int k = 0; k < OWN; k++)
            sum[k] = vector + STEP * k < batch ? sums.get(product(vector + STEP * k, rows) + row) : 0.0f;
        QT_UNROLL_4
        for (int32_t split = 1; split < (int32_t)t.splits; split++)
            QT_UNROLL
            for (int k = 0; k < OWN; k++)
                if (vector + STEP * k < batch)
                    sum[k] = add(sum[k], sums.get(product(split * batch + vector + STEP * k, rows) + row));
        QT_UNROLL
        for (int k = 0; k < OWN; k++)
            if (vector + STEP * k < batch)
                Out<uint16_t>(t.values, t.values_bytes)
                    .put(product(vector + STEP * k, rows) + row, f16::one(sum[k]));
    }
};
template <class LAYOUT> struct Parts<Gemv<LAYOUT>> {
    enum { four = 1, resident = LAYOUT::RESIDENT };
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
        Late<float> parts{{t.codes, t.codes_bytes}};
        int64_t count = t.batch * t.rows, at = block.x * BLOCK + thread;
        wait_for_kernels_before();
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

/* Threads of a block; warps of it that are next to each other; of Q4_K, turns of a ring; and blocks that an
 * SM has registers for. qtool/cuda/pack_gemv_tasks.py has the same. */
#define QT_GEMV_KERNELS(X)                                          \
    X(gemv_across_4, qt::Gemv<qt::GemvWords<true, 256, 2, 2>>)      \
    X(gemv_columns_4, qt::Gemv<qt::GemvWords<false, 256, 2, 2>>)    \
    X(gemv_q4_k, qt::Gemv<qt::GemvQ4K<128, 1, 2, 4>>) X(gemv_sum, qt::GemvSum)

#endif
