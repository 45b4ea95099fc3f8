/* Products with words of AWQ and GPTQ; see gemv.h. */
#ifndef QTOOL_CUDA_GEMV_WORDS_H
#define QTOOL_CUDA_GEMV_WORDS_H

#include "grid.h"
#include "tensor.h"

namespace qt {

/* Inputs of vector lane / 4, from column 8 (lane % 4) on; past the batch those of its last vector, of
 * which nobody looks at what comes of them. */
QT_HD Late<uint16_t> inputs_of(const Task &t, int32_t lane)
{
    int32_t vector = smaller(lane >> 2, (int32_t)t.batch - 1);
    In<uint16_t> inputs(t.inputs, t.inputs_bytes);
    return Late<uint16_t>{inputs.from(product(vector, t.cols) + 8 * (lane & 3))};
}

/* Two nibbles of a word at a place (0 or 4) of both its halves: as halves 2^(place - 24) as large,
 * subnormal ones. */
QT_HD uint32_t two_nibbles(uint32_t word, int place) { return word & (0x000f000fu << place); }

/* Words of AWQ GEMM or GPTQ of 4 bits, groups a multiple of 32 columns, scales float16 [groups, rows],
 * zeros in words [groups, rows / 8] of either order; rows a multiple of 8.
 *
 * A warp has ROWS rows, of which lane 4 g + t has eight, in pairs for four products. It takes 128
 * columns at a time, or 32 where groups are no multiple of 128. Of each 32, lane t has columns 8 t to
 * 8 t + 7: the inputs are 16 bytes. AWQ's words are of these columns and of rows 8 g to 8 g + 7, each
 * nibble a row; GPTQ's of all eight columns and of rows 4 g + i and 32 + 4 g + i.
 *
 * Weights are (q - zero) * 2^-10, made of two codes by one fused multiply-add of halves, exactly, and
 * products are summed by group. Left subnormal, and with the zero taken off the sum, a code would lose
 * its last bits beside large inputs: what is subnormal is aligned as if it were not. */
template <bool AWQ, int OF_BLOCK, int NEXT, int OF_SM> struct GemvWords {
    enum { BLOCK = OF_BLOCK, ABREAST = NEXT, RESIDENT = OF_SM };
    enum { ROWS = 64, TILES = 4, LOWERED = 10 };
    typedef NoRoom Ring;

    /* All that a lane reads of a matrix in so many runs of 32 columns. */
    template <int RUNS> struct Read {
        uint32_t word[RUNS][8], scales[4], zeros;
    };

    /* The row that nibble i of AWQ's word has, and the other way round. */
    static QT_MEMBER int32_t row_of(int i) { return i < 4 ? 2 * i : 2 * i - 7; }
    /* Which of a warp's sums is of a row: 8 r + g for row r of lane g. */
    static QT_MEMBER int32_t slot(uint32_t row)
    {
        if (AWQ)
            return (int32_t)(8 * ((row & 7) / 2 + 4 * (row & 1)) + row / 8);
        return (int32_t)(8 * (row / 32 * 4 + (row & 3)) + row / 4 % 8);
    }

    /* Where a lane reads: from its own rows on, and its own columns of a run. AWQ's rows are together,
     * GPTQ's in two parts. */
    struct Lane {
        In<uint32_t> words[AWQ ? 1 : 2], zeros[AWQ ? 1 : 2];
        In<uint16_t> scales[AWQ ? 1 : 2];
        Late<uint16_t> inputs;
        uint32_t shift[2]; /* to GPTQ's zeros in a word */
        int32_t lane;
    };
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        /* Past the last row a lane does what the last one does, and is not looked at. */
        int32_t lane = thread & 31, g = lane >> 2, last = (int32_t)t.rows - (AWQ ? 8 : 4);
        int32_t low = smaller(top + (AWQ ? 8 : 4) * g, last), high = smaller(top + 32 + 4 * g, last);
        In<uint32_t> words(t.codes, t.codes_bytes), zeros(t.zero, t.zero_bytes);
        In<uint16_t> scales(t.scale, t.scale_bytes);
        Late<uint16_t> inputs = inputs_of(t, lane);
        if constexpr (AWQ)
            return Lane{{words.from(product(8 * (lane & 3), t.pitch) + (low >> 3))},
                        {zeros.from(low >> 3)},
                        {scales.from(low)},
                        inputs,
                        {0, 0},
                        lane};
        else {
            int64_t from = product(lane & 3, t.pitch);
            return Lane{{words.from(from + low), words.from(from + high)},
                        {zeros.from(low >> 3), zeros.from(high >> 3)},
                        {scales.from(low), scales.from(high)},
                        inputs,
                        {(uint32_t)(low & 4) * 4, (uint32_t)(high & 4) * 4},
                        lane};
        }
    }
    template <int RUNS>
    static QT_MEMBER Read<RUNS> read(const Task &t, const Lane &lane, int32_t col)
    {
        Read<RUNS> found;
        /* Of 128 columns the groups are a power of two. */
        uint32_t group = RUNS == 1 && (int32_t)t.group_shift < 0
                             ? (uint32_t)col / (uint32_t)t.group_size
                             : (uint32_t)col >> (int32_t)t.group_shift;
        uint32_t pitch = (uint32_t)t.pitch, by_scale = (uint32_t)t.scale_group;
        if constexpr (AWQ) {
            QT_UNROLL
            for (int k = 0; k < RUNS; k++) {
                In<uint32_t> words = lane.words[0].from((uint32_t)col + 32 * k, pitch);
                QT_UNROLL
                for (int c = 0; c < 8; c++) {
                    found.word[k][c] = words.template here<uint32_t>(0);
                    words = words.next(pitch);
                }
            }
            Four own = lane.scales[0].from(group, by_scale).template here<Four>(0);
            QT_UNROLL
            for (int i = 0; i < 4; i++)
                found.scales[i] = own.word[i];
            found.zeros = lane.zeros[0].from(group, (uint32_t)t.zero_group).template here<uint32_t>(0);
        } else {
            QT_UNROLL
            for (int h = 0; h < 2; h++) {
                QT_UNROLL
                for (int k = 0; k < RUNS; k++) {
                    In<uint32_t> words = lane.words[h].from((uint32_t)(col >> 3) + 4 * k, pitch);
                    Four four = words.template here<Four>(0);
                    QT_UNROLL
                    for (int i = 0; i < 4; i++)
                        found.word[k][4 * h + i] = four.word[i];
                }
                Two own = lane.scales[h].from(group, by_scale).template here<Two>(0);
                found.scales[2 * h] = own.word[0];
                found.scales[2 * h + 1] = own.word[1];
            }
            const uint32_t by_zero = (uint32_t)t.zero_group;
            uint32_t low = lane.zeros[0].from(group, by_zero).template here<uint32_t>(0);
            uint32_t high = lane.zeros[1].from(group, by_zero).template here<uint32_t>(0);
            found.zeros = byte_perm(low >> lane.shift[0], high >> lane.shift[1], 0x5410);
        }
        return found;
    }

    /* zero * -2^-LOWERED of rows i and i + 4. */
    static QT_MEMBER void less_zeros(const Task &t, uint32_t zeros, uint32_t *less)
    {
        if (!AWQ) /* each nibble by itself */
            zeros = ((zeros & 0x77777777) + (uint32_t)t.zero_value * 0x11111111) ^ (zeros & 0x88888888);
        QT_UNROLL
        for (int i = 0; i < 4; i++) {
            uint32_t two = two_nibbles(zeros >> (i & 2 ? 8 : 0), 4 * (i & 1));
            less[i] = mul_halves(two, i & 1 ? 0xe400e400 : 0xf400f400);
        }
    }
    static QT_MEMBER uint32_t weight(uint32_t word, int place, uint32_t less)
    {
        return fma_halves(two_nibbles(word, place), place ? 0x64006400 : 0x74007400, less);
    }
    /* Of rows 2 p and 2 p + 1, columns of step s: half of a run's. */
    template <int RUNS>
    static QT_MEMBER Weights weights(const Read<RUNS> &read, const uint32_t *pairs, int s, int p)
    {
        const uint32_t *word = read.word[s / 2];
        uint32_t less[2] = {twice(pairs[2 * (p & 1)], p / 2), twice(pairs[2 * (p & 1) + 1], p / 2)};
        if (AWQ) {
            const uint32_t *four = word + 4 * (s & 1), select = p < 2 ? 0x5410 : 0x7632;
            uint32_t low = byte_perm(four[0], four[1], select) >> (p & 1 ? 8 : 0);
            uint32_t high = byte_perm(four[2], four[3], select) >> (p & 1 ? 8 : 0);
            return Weights{{weight(low, 0, less[0]), weight(low, 4, less[1]), weight(high, 0, less[0]),
                            weight(high, 4, less[1])}};
        }
        uint32_t one = word[2 * p] >> (s & 1 ? 8 : 0), other = word[2 * p + 1] >> (s & 1 ? 8 : 0);
        return Weights{{weight(one, 0, less[0]), weight(other, 0, less[1]), weight(one, 4, less[0]),
                        weight(other, 4, less[1])}};
    }
    static QT_MEMBER Inputs inputs(const Four &x, int s)
    {
        if (AWQ)
            return Inputs{{x.word[2 * (s & 1)], x.word[2 * (s & 1) + 1]}};
        uint32_t low = x.word[s & 1], high = x.word[2 + (s & 1)]; /* columns 0 1 4 5, or 2 3 6 7 */
        return Inputs{{byte_perm(low, high, 0x5410), byte_perm(low, high, 0x7632)}};
    }
    static QT_MEMBER float scale(const uint32_t *scales, int i)
    {
        int32_t at = AWQ ? row_of(i) : i;
        return of_f16(scales[at / 2] >> (16 * (at & 1)) & 0xffff);
    }

    template <int RUNS>
    static QT_MEMBER void unit(const Task &t, const Lane *lanes, int32_t col, bool wait,
                               Sums (*acc)[HELD])
    {
        Read<RUNS> found[HELD];
        Four given[HELD][RUNS];
        uint32_t less[HELD][4];
        float own[HELD][2 * TILES]; /* scales: all that is read is waited for at once */
        Sums sums[TILES][HELD] = {};
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            found[l] = read<RUNS>(t, lanes[l], col);
        if (wait)
            wait_for_kernels_before();
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            Late<uint16_t> inputs = lanes[l].inputs.from((uint32_t)col, 1);
            QT_UNROLL
            for (int k = 0; k < RUNS; k++)
                given[l][k] = inputs.template wide<Four>(32 * k);
        }
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            less_zeros(t, found[l].zeros, less[l]);
            QT_UNROLL
            for (int i = 0; i < 2 * TILES; i++)
                own[l][i] = scale(found[l].scales, i);
        }
        QT_UNROLL
        for (int s = 0; s < 2 * RUNS; s++) {
            Inputs x[HELD];
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                x[l] = inputs(given[l][s / 2], s);
            QT_UNROLL
            for (int p = 0; p < TILES; p++) {
                Weights w[HELD];
                QT_UNROLL
                for (int l = 0; l < HELD; l++)
                    w[l] = weights(found[l], less[l], s, p);
                multiply(w, x, sums[p]);
            }
        }
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int i = 0; i < 2 * TILES; i++) {
                float *to = acc[i / 2][l].at + 2 * (i & 1);
                const float *from = sums[i / 2][l].at + 2 * (i & 1);
                to[0] = fma(own[l][i], from[0], to[0]);
                to[1] = fma(own[l][i], from[1], to[1]);
            }
    }
    template <int RUNS>
    static QT_MEMBER void units(const Task &t, const Lane *lanes, int32_t first, int32_t step,
                                Sums (*acc)[HELD])
    {
        const int32_t from = first * 32 * RUNS;
        if (from >= (int32_t)t.cols)
            return wait_for_kernels_before();
        QT_ROLLED
        for (int32_t col = from; col < (int32_t)t.cols; col += step * 32 * RUNS)
            unit<RUNS>(t, lanes, col, col == from, acc);
    }
    /* Waits for the kernels before, and adds products with every step-th run of columns, from `first`
     * on. */
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &,
                              Sums (*acc)[HELD])
    {
        if (((int32_t)t.group_size & 127) == 0 && (int32_t)t.group_shift >= 0)
            units<4>(t, lanes, first, step, acc);
        else
            units<1>(t, lanes, first, step, acc);
    }
};

} // namespace qt

#endif
