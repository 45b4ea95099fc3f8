/* Packed weights times a few vectors, as decoding needs: y = x W', x [batch, cols] in float16.
 *
 * Codes are exact, products with inputs are summed in float32 by fused multiply-adds, and a zero or a
 * minimum is taken off by way of the sum of the inputs. Sums are made in a fixed order (atomics only
 * count), so a result depends on the number of splits but on nothing else, and the host computes the same
 * bits. Where blocks share rows, each leaves partial sums [splits, batch, rows] in float32; the last of
 * them to be done adds all (`sums` and `done`, a counter for each x of the grid that is zero before and
 * after), or gemv_sum does, where the sums are `values`. The result is float16. */
#ifndef QTOOL_CUDA_GEMV_H
#define QTOOL_CUDA_GEMV_H

#include "gguf_k.h"
#include "grid.h"

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

/* Eight inputs of vector b of BATCH from a column on that is a multiple of eight; zeros past the
 * batch. */
template <int BATCH> QT_HD Four eight_inputs(const Task &t, int32_t b, int32_t col)
{
    if (BATCH == 1 || b < t.batch)
        return In<uint16_t>(t.inputs, t.inputs_bytes).wide<Four>(product(b, t.cols) + col);
    return Four{{0, 0, 0, 0}};
}

QT_HD float input(const Four &eight, int i)
{
    return of_f16(eight.word[i / 2] >> (16 * (i & 1)) & 0xffff);
}

/* A code that is left in its place in a word, the rest being masked, is a float by itself: a subnormal
 * one, code * 2^(place - 149), which multiplies as exactly as any. With inputs 2^100 times as large,
 * less 2^place, sums are 2^-49 of what they should be. */
QT_HD float in_place(uint32_t word, int place) { return float_of_bits(word & (15u << place)); }
QT_HD float power_of_two(int exponent) { return float_of_bits((uint32_t)(127 + exponent) << 23); }
enum { RAISED = 100, LOWERED = 149 - RAISED };

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
    /* With many vectors it is cheaper to scale a weight than to keep sums of runs. */
    enum { WEIGHTS_SCALED = BATCH >= 4 };
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

/* Blocks of Q4_K. Eight lanes have a block, sixteen bytes of codes each: the low nibbles are 16 columns
 * of one sub-block, the high ones those of the next, 32 columns further on. A thread block has ROWS
 * rows, sixteen blocks of each at a time. */
template <int BATCH> struct GemvQ4K {
    enum { BLOCK = 128, ROWS = BATCH == 1 ? 8 : BATCH == 8 ? 2 : 4, ABREAST = BLOCK / 8 };
    enum { SUMS = ROWS * BATCH, SLICES = BLOCK / SUMS };
    enum { AHEAD = BATCH <= 2 ? 2 : 1 }; /* halves of a lane's inputs that are asked for at once */
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
    static QT_MEMBER void blocks(const Task &t, Place place, int32_t lane, int32_t i,
                                 float (*acc)[BATCH])
    {
        int32_t col = i * q4_k::weights + 64 * (lane >> 1) + 16 * (lane & 1);
        Four head[ROWS], codes[ROWS], under[BATCH][AHEAD], over[BATCH][AHEAD];
        QT_UNROLL
        for (int r = 0; r < ROWS; r++) {
            int32_t row = least(place.x * ROWS + r, t.rows - 1);
            int64_t begin = product(row, t.pitch) + i * q4_k::bytes;
            Block at = {In<uint8_t>(t.codes, t.codes_bytes), begin};
            head[r] = at.four(0);
            codes[r] = at.four(16 + 16 * lane);
        }
        float low[ROWS][BATCH] = {}, high[ROWS][BATCH] = {}, of_low[BATCH] = {}, of_high[BATCH] = {};
        QT_UNROLL
        for (int half = 0; half < 2; half++) {
            const int own = half % AHEAD;
            if (own == 0) {
                QT_UNROLL
                for (int b = 0; b < BATCH; b++)
                    QT_UNROLL
                    for (int k = 0; k < AHEAD; k++) {
                        under[b][k] = eight_inputs<BATCH>(t, b, col + 8 * (half + k));
                        over[b][k] = eight_inputs<BATCH>(t, b, col + 32 + 8 * (half + k));
                    }
            }
            QT_UNROLL
            for (int k = 0; k < 8; k++) {
                float x[BATCH], y[BATCH];
                const int byte = k & 1, word = 2 * half + k / 4, place_in = 8 * byte;
                QT_UNROLL
                for (int b = 0; b < BATCH; b++) {
                    float one = input(under[b][own], k), other = input(over[b][own], k);
                    of_low[b] = add(of_low[b], one);
                    of_high[b] = add(of_high[b], other);
                    x[b] = mul(one, power_of_two(RAISED - place_in));
                    y[b] = mul(other, power_of_two(RAISED - place_in - 4));
                }
                QT_UNROLL
                for (int r = 0; r < ROWS; r++) {
                    uint32_t pair = codes[r].word[word] >> (k & 2 ? 16 : 0);
                    float q = in_place(pair, place_in), p = in_place(pair, place_in + 4);
                    QT_UNROLL
                    for (int b = 0; b < BATCH; b++) {
                        low[r][b] = fma(q, x[b], low[r][b]);
                        high[r][b] = fma(p, y[b], high[r][b]);
                    }
                }
            }
        }
        QT_UNROLL
        for (int r = 0; r < ROWS; r++) {
            float s[2], m[2];
            two_scales(head[r], lane >> 1, s, m);
            QT_UNROLL
            for (int b = 0; b < BATCH; b++) {
                acc[r][b] = fma(s[0], low[r][b], acc[r][b]);
                acc[r][b] = fma(-m[0], of_low[b], acc[r][b]);
                acc[r][b] = fma(s[1], high[r][b], acc[r][b]);
                acc[r][b] = fma(-m[1], of_high[b], acc[r][b]);
            }
        }
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
