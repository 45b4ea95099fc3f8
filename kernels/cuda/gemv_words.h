/* Products with words of AWQ and GPTQ; see gemv.h. */
#ifndef QTOOL_CUDA_GEMV_WORDS_H
#define QTOOL_CUDA_GEMV_WORDS_H

#include "gemv_inputs.h"

namespace qt {

/* Partial sums of a block: `LANES` for each of which `SUMS` numbers are added over `PARTS`. */
template <int PARTS, int LANES, int SUMS> struct Partial {
    Shared<float, PARTS * LANES * SUMS> sums;
    Shared<int32_t, 1> last; /* whether no other block of these rows is still at work */
#if defined(QT_CHECKED)
    void clear()
    {
        sums.clear();
        last.clear();
    }
#endif
    QT_MEMBER void put(int part, int lane, int i, float value)
    {
        sums.put((i * PARTS + part) * LANES + lane, value);
    }
    QT_MEMBER float total(int lane, int i) const
    {
        float sum = sums.get(i * PARTS * LANES + lane);
        QT_UNROLL
        for (int part = 1; part < PARTS; part++)
            sum = add(sum, sums.get((i * PARTS + part) * LANES + lane));
        return sum;
    }
};

/* Where nibble i of a word is, after a shift by `shifted(i)`: below bit 20. */
QT_HD int shifted(int i) { return i < 5 ? 0 : 12; }
QT_HD int place_of(int i) { return 4 * i - shifted(i); }

/* A nibble as the upper mantissa of a float: 16 + q. */
QT_HD float sixteen_and(uint32_t word, int i)
{
    uint32_t moved = i < 5 ? word << (19 - 4 * i) : word >> (4 * i - 19);
    return float_of_bits((moved & 0x780000u) | 0x41800000u);
}

/* Words of AWQ GEMM or GPTQ of 4 bits, groups a multiple of 32 columns, scales float16 [groups, rows],
 * zeros in words [groups, rows / 8] of either order; rows a multiple of 8. A lane has ROWS neighbouring
 * rows; LANES of them, which read 64 (AWQ) or 128 bytes in a piece, are one of PARTS that take every so
 * many runs of 32 columns of the block's share. */
template <bool AWQ, int BATCH> struct GemvWords {
    enum { BLOCK = 128, LANES = AWQ ? 16 : 8, PARTS = BLOCK / LANES, ROWS = AWQ ? 8 : 4, RUN = 32 };
    /* Of so many vectors the sums of a run have no room in registers beside those of all. */
    enum { WEIGHTS_SCALED = BATCH == 8 };
    typedef Partial<PARTS, LANES, BATCH * ROWS> Room;

    /* All that is read of a run but its inputs. */
    struct Read {
        uint32_t word[AWQ ? RUN : RUN / 8][AWQ ? 1 : ROWS], zeros;
        uint32_t scales[ROWS / 2];
    };

    /* The row that nibble i of AWQ's word has; GPTQ's rows are in order. */
    static QT_MEMBER int32_t row_of(int i) { return AWQ ? (i < 4 ? 2 * i : 2 * i - 7) : i; }

    static QT_MEMBER Read read(const Task &t, int64_t row, int32_t col)
    {
        Read found;
        In<uint32_t> words(t.codes, t.codes_bytes);
        In<uint16_t> scales(t.scale, t.scale_bytes);
        int32_t group = group_of(t, col);
        int64_t at = AWQ ? product(col, t.pitch) + (row >> 3) : product(col >> 3, t.pitch) + row;
        QT_UNROLL
        for (int k = 0; k < (AWQ ? RUN : RUN / 8); k++) {
            if (AWQ) {
                found.word[k][0] = words[at + k * t.pitch];
                continue;
            }
            Four four = words.wide<Four>(at + k * t.pitch);
            QT_UNROLL
            for (int i = 0; i < ROWS; i++)
                found.word[k][i] = four.word[i & 3];
        }
        int64_t scale = product(group, t.scale_group) + row;
        if (AWQ) {
            Four four = scales.wide<Four>(scale);
            QT_UNROLL
            for (int i = 0; i < ROWS / 2; i++)
                found.scales[i] = four.word[i];
        } else {
            Two two = scales.wide<Two>(scale);
            QT_UNROLL
            for (int i = 0; i < ROWS / 2; i++)
                found.scales[i] = two.word[i & 1];
        }
        found.zeros = In<uint32_t>(t.zero, t.zero_bytes)[product(group, t.zero_group) + (row >> 3)];
        return found;
    }
    static QT_MEMBER float scale(const Read &found, int i)
    {
        return of_f16(found.scales[row_of(i) / 2] >> (16 * (row_of(i) & 1)) & 0xffff);
    }
    static QT_MEMBER uint32_t zero(const Task &t, int64_t row, const Read &found, int i)
    {
        return ((found.zeros >> (row & 4) * 4 >> (4 * i)) + (uint32_t)t.zero_value) & 15;
    }

    /* Inputs of eight columns, 2^RAISED as large; GPTQ's, whose columns are nibbles, less the place of
     * each. */
    static QT_MEMBER void raise(const Four &x, float *raised, float *sum)
    {
        QT_UNROLL
        for (int k = 0; k < 8; k++) {
            float now = input(x, k);
            *sum = add(*sum, now);
            raised[k] = mul(now, power_of_two(RAISED - (AWQ ? 0 : place_of(k))));
        }
    }
    static QT_MEMBER void run(const Task &t, int64_t row, int32_t col, float (*acc)[ROWS])
    {
        Read found = read(t, row, col);
        Four eight[BATCH][RUN / 8];
        QT_UNROLL
        for (int b = 0; b < BATCH; b++)
            QT_UNROLL
            for (int k = 0; k < RUN / 8; k++)
                eight[b][k] = eight_inputs<BATCH>(t, b, col + 8 * k);
        float sum[BATCH][ROWS] = {}, of_inputs[BATCH] = {};
        QT_UNROLL
        for (int k = 0; k < RUN; k += 8) {
            float x[BATCH][8];
            QT_UNROLL
            for (int b = 0; b < BATCH; b++)
                raise(eight[b][k / 8], x[b], &of_inputs[b]);
            QT_UNROLL
            for (int n = 0; n < 8; n++)
                QT_UNROLL
                for (int i = 0; i < ROWS; i++) {
                    int nibble = AWQ ? i : n;
                    uint32_t word = AWQ ? found.word[(k + n) & (RUN - 1)][0] : found.word[(k / 8) & 3][i];
                    float q = in_place(word >> shifted(nibble), place_of(nibble));
                    QT_UNROLL
                    for (int b = 0; b < BATCH; b++)
                        sum[b][i] = fma(q, x[b][n], sum[b][i]);
                }
        }
        QT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            float less = small((int32_t)zero(t, row, found, i)), own = scale(found, i);
            QT_UNROLL
            for (int b = 0; b < BATCH; b++) {
                float whole = mul(sum[b][i], power_of_two(LOWERED - (AWQ ? place_of(i) : 0)));
                acc[b][i] = fma(fma(-less, of_inputs[b], whole), own, acc[b][i]);
            }
        }
    }
    /* The same with each weight scaled: exact differences, products that round. */
    static QT_MEMBER void run_scaled(const Task &t, int64_t row, int32_t col, float (*acc)[ROWS])
    {
        Read found = read(t, row, col);
        float less[ROWS], own[ROWS];
        QT_UNROLL
        for (int i = 0; i < ROWS; i++) {
            less[i] = small(16 + (int32_t)zero(t, row, found, i));
            own[i] = scale(found, i);
        }
        QT_UNROLL
        for (int k = 0; k < RUN; k += 8) {
            Four x[BATCH];
            QT_UNROLL
            for (int b = 0; b < BATCH; b++)
                x[b] = eight_inputs<BATCH>(t, b, col + k);
            QT_UNROLL
            for (int n = 0; n < 8; n++)
                QT_UNROLL
                for (int i = 0; i < ROWS; i++) {
                    uint32_t word = AWQ ? found.word[(k + n) & (RUN - 1)][0] : found.word[(k / 8) & 3][i];
                    float w = mul(sub(sixteen_and(word, AWQ ? i : n), less[i]), own[i]);
                    QT_UNROLL
                    for (int b = 0; b < BATCH; b++)
                        acc[b][i] = fma(w, input(x[b], n), acc[b][i]);
                }
        }
    }

    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        int32_t lane = thread % LANES, part = thread / LANES;
        /* Lanes past the last row do what the last one does, and are not looked at. */
        int64_t row = least((block.x * LANES + lane) * ROWS, t.rows - ROWS);
        float acc[BATCH][ROWS] = {};
        int32_t step = (int32_t)t.splits * PARTS, runs = (int32_t)t.cols / RUN;
        int32_t i = block.y * PARTS + part, whole = runs / step * step;
        /* As many runs for all threads, and then those that are left. */
        QT_ROLLED
        for (int32_t from = 0; from < whole; from += step)
            WEIGHTS_SCALED ? run_scaled(t, row, (from + i) * RUN, acc)
                           : run(t, row, (from + i) * RUN, acc);
        if (whole + i < runs)
            WEIGHTS_SCALED ? run_scaled(t, row, (whole + i) * RUN, acc)
                           : run(t, row, (whole + i) * RUN, acc);
        QT_UNROLL
        for (int b = 0; b < BATCH; b++)
            QT_UNROLL
            for (int k = 0; k < ROWS; k++)
                room.put(part, lane, b * ROWS + k, acc[b][k]);
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        for (int32_t at = thread; at < LANES * ROWS * BATCH; at += BLOCK) {
            int32_t lane = at % LANES, i = at / LANES, b = i / ROWS;
            int64_t row = (block.x * LANES + lane) * ROWS + row_of(i % ROWS);
            if (row >= t.rows || b >= t.batch)
                continue;
            int64_t of_split = product(b, t.rows) + row, to = block.y * t.batch * t.rows + of_split;
            float sum = room.total(lane, i);
            if (t.splits == 1)
                Out<uint16_t>(t.values, t.values_bytes).put(of_split, f16::one(sum));
            else if (t.done)
                Scratch<float>(t.sums, t.sums_bytes).put(to, sum);
            else
                Out<float>(t.values, t.values_bytes).put(to, sum);
        }
        before_others_look();
    }
    static QT_MEMBER void third(const Task &t, Place block, int32_t thread, Room &room)
    {
        if (thread || !t.done)
            return;
        Scratch<uint32_t> done(t.done, t.done_bytes);
        bool last = done.count_up(block.x) + 1 == (uint32_t)t.splits;
        room.last.put(0, last);
        if (last)
            done.put(block.x, 0);
    }
    static QT_MEMBER void fourth(const Task &t, Place block, int32_t thread, Room &room)
    {
        if (!t.done || !room.last.get(0))
            return;
        before_others_look();
        Scratch<float> sums(t.sums, t.sums_bytes);
        int64_t count = t.batch * t.rows;
        for (int32_t at = thread; at < LANES * ROWS * BATCH; at += BLOCK) {
            int32_t b = at / (LANES * ROWS);
            int64_t row = block.x * LANES * ROWS + at % (LANES * ROWS), from = product(b, t.rows) + row;
            if (row >= t.rows || b >= t.batch)
                continue;
            float sum = sums.get(from);
            QT_UNROLL_8
            for (int32_t split = 1; split < t.splits; split++)
                sum = add(sum, sums.get(split * count + from));
            Out<uint16_t>(t.values, t.values_bytes).put(from, f16::one(sum));
        }
    }
};
template <bool AWQ, int BATCH> struct Parts<GemvWords<AWQ, BATCH>> {
    enum { four = 1, resident = 1 };
};

} // namespace qt

#endif
