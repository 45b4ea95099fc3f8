/* Products with blocks of GGUF; see gemv.h. */
#ifndef QTOOL_CUDA_GEMV_BLOCKS_H
#define QTOOL_CUDA_GEMV_BLOCKS_H

#include "gemv_words.h"
#include "gguf_k.h"
#include "ring.h"

namespace qt {

/* Blocks of Q4_K: w = d sc q - dmin m. A warp takes a block of each of ROWS rows at a time, of which lane
 * 4 g + t has rows g + 8 j and in every run of 32 bytes of codes eight: their low nibbles are columns of
 * one sub-block, the high ones those of the next, 32 columns further on.
 *
 * A weight is q * 4 sc, made of two codes by one product of halves, exactly, 2^-24 as large, and summed
 * over a block. What is subnormal of them is aligned as 2^-14, which is a quarter of the largest weight
 * that there may be.
 *
 * Minima are multiplied with the inputs' sums of each sub-block, which come of a product where the
 * inputs are the weights and a column of ones, that of the sub-block, the inputs: so lane 4 g + t gets
 * those of vector g and sub-blocks 2 t and 2 t + 1, as it has to have them for the next one. There each
 * is two halves: of 22 bits, or of what 2^-29 is the last place of. */
template <int OF_BLOCK, int NEXT, int TURNS, int OF_SM> struct GemvQ4K {
    enum { BLOCK = OF_BLOCK, ABREAST = NEXT, DEPTH = ROOMY ? TURNS : 1, RESIDENT = OF_SM };
    enum { ROWS = 32, TILES = 2 };
    enum { LOWERED = 22, SUMS_LOWERED = 6, REST_RAISED = 11 };

    /* What a lane asks for of a block of each of its rows: four runs of codes, eight bytes of each; and
     * the head of one of the rows, which four lanes need. With two turns the next blocks of its rows
     * are on their way while it computes. */
    enum { HEAD = 2 * TILES * 4 * 2 };
    typedef qt::Ring<4 * (HEAD + 4), BLOCK, DEPTH> Ring;
    static QT_MEMBER int32_t slot(uint32_t row) { return (int32_t)row; }

    /* Where a lane reads: its rows, in units of sixteen bytes, and its own columns. */
    enum { UNIT = 16 };
    struct Lane {
        In<uint8_t> bytes;
        Late<uint16_t> inputs;
        uint32_t row[2 * TILES], head; /* the row whose head it asks for */
        int32_t lane;
        uint32_t thread;
    };
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        int32_t lane = thread & 31;
        Lane found = {{t.codes, t.codes_bytes}, inputs_of(t, lane), {}, 0, lane, (uint32_t)thread};
        const uint32_t pitch = (uint32_t)t.pitch / UNIT;
        /* Past the last row a lane does what the last one does, and is not looked at. */
        QT_UNROLL
        for (int j = 0; j < 2 * TILES; j++)
            found.row[j] = (uint32_t)smaller(top + (lane >> 2) + 8 * j, (int32_t)t.rows - 1) * pitch;
        found.head = (uint32_t)smaller(top + (lane >> 2) + 8 * (lane & 3), (int32_t)t.rows - 1) * pitch;
        return found;
    }
    static QT_MEMBER void ask(const Lane &lane, int32_t i, uint32_t turn, Ring &ring)
    {
        const uint32_t from = (uint32_t)i * (q4_k::bytes / UNIT);
        QT_UNROLL
        for (int j = 0; j < 2 * TILES; j++) {
            In<uint8_t> codes = lane.bytes.from(lane.row[j] + from, UNIT).from(16 + 8 * (lane.lane & 3));
            QT_UNROLL
            for (int r = 0; r < 4; r++)
                ring.template fill<Two>(turn, 2 * (4 * j + r), lane.thread, codes.from(32 * r));
        }
        ring.template fill<Four>(turn, HEAD, lane.thread, lane.bytes.from(lane.head + from, UNIT));
    }
    static QT_MEMBER Four head_of(const Ring &ring, uint32_t turn, const Lane &lane, int j)
    {
        return ring.template get<Four>(turn, HEAD, (lane.thread & ~3u) + (uint32_t)j);
    }

    /* Scales of sub-blocks 4 a to 4 a + 3 as scale_minimum has them (gguf_k.h): pairs of halves, 4 sc of
     * 4 a and 4 a + 2, and 4 sc / 16 of the others, since their codes are four places higher up. */
    static QT_MEMBER void scales(const Four &head, int a, uint32_t *pairs)
    {
        uint32_t low = head.word[1], both = head.word[3];
        uint32_t bytes = a ? (both << 2 & 0x3c3c3c3c) | (low & 0xc0c0c0c0) : low << 2 & 0xfcfcfcfc;
        pairs[0] = add_halves(masked_or(bytes, 0x00ff00ff, 0x64006400), 0xe400e400);
        pairs[1] = add_halves(masked_or(bytes >> 8, 0x00ff00ff, 0x54005400), 0xd400d400);
    }
    /* Minima of sub-blocks 2 t and 2 t + 1: halves, 4 m. */
    static QT_MEMBER uint32_t minima(const Four &head, int32_t lane)
    {
        uint32_t high = head.word[2], both = head.word[3];
        uint32_t bytes = lane & 2 ? (both >> 2 & 0x3c3c3c3c) | (high & 0xc0c0c0c0) : high << 2 & 0xfcfcfcfc;
        return add_halves(byte_perm(bytes, 0x64646464, lane & 1 ? 0x4342 : 0x4140), 0xe400e400);
    }
    /* Of sub-block n, word m of its run: bytes 0 and 2 of it, then 1 and 3. */
    static QT_MEMBER Weights weights(const Two &one, const Two &other, const uint32_t *scale, int n, int m)
    {
        uint32_t first = one.word[m], second = other.word[m];
        const int place = 4 * (n & 1);
        return Weights{{mul_halves(two_nibbles(first, place), scale[0]),
                        mul_halves(two_nibbles(second, place), scale[1]),
                        mul_halves(two_nibbles(first >> 8, place), scale[0]),
                        mul_halves(two_nibbles(second >> 8, place), scale[1])}};
    }
    /* Sums of inputs as halves, and what is left of them. */
    static QT_MEMBER Inputs halves_of(const Sums &sums)
    {
        float sum[2], rest[2];
        QT_UNROLL
        for (int i = 0; i < 2; i++)
            sum[i] = mul(add(sums.at[i], sums.at[i + 2]), float_of_bits((127u - SUMS_LOWERED) << 23));
        Inputs found = {{two_f16(sum[0], sum[1]), 0}};
        QT_UNROLL
        for (int i = 0; i < 2; i++)
            rest[i] = mul(sub(sum[i], of_f16(found.at[0] >> (16 * i) & 0xffff)),
                          float_of_bits((127u + REST_RAISED) << 23));
        found.at[1] = two_f16(rest[0], rest[1]);
        return found;
    }

    /* Products of sub-block n with inputs x, and the sums of those. */
    static QT_MEMBER void part(const Lane *lanes, const Two (*codes)[2 * TILES],
                               const uint32_t (*pairs)[2 * TILES][2], int n, const Four (*x)[8],
                               Sums (*sums)[HELD], Sums *of_inputs)
    {
        QT_UNROLL
        for (int m = 0; m < 2; m++) {
            Inputs inputs[HELD];
            uint32_t as_weights[HELD][2], ones[HELD];
            QT_UNROLL
            for (int l = 0; l < HELD; l++) {
                uint32_t low = x[l][n].word[2 * m], high = x[l][n].word[2 * m + 1];
                inputs[l].at[0] = as_weights[l][0] = byte_perm(low, high, 0x5410);
                inputs[l].at[1] = as_weights[l][1] = byte_perm(low, high, 0x7632);
                ones[l] = lanes[l].lane >> 2 == n ? 0x3c003c00 : 0;
            }
            multiply_eight(as_weights, ones, of_inputs);
            QT_UNROLL
            for (int p = 0; p < TILES; p++) {
                Weights w[HELD];
                QT_UNROLL
                for (int l = 0; l < HELD; l++) {
                    const uint32_t(*own)[2] = pairs[l] + 2 * p;
                    const int half = n >> 1 & 1;
                    uint32_t scale[2] = {twice(own[0][n & 1], half), twice(own[1][n & 1], half)};
                    w[l] = weights(codes[l][2 * p], codes[l][2 * p + 1], scale, n, m);
                }
                multiply(w, inputs, sums[p]);
            }
        }
    }
    /* Adds what a block gives: its sums, less minima times the sums of its inputs. */
    static QT_MEMBER void add_block(const Lane *lanes, const Four (*head)[2 * TILES],
                                    const Sums (*sums)[HELD], const Sums *of_inputs, Sums (*acc)[HELD])
    {
        Inputs halves[HELD];
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            halves[l] = halves_of(of_inputs[l]);
        QT_UNROLL
        for (int p = 0; p < TILES; p++) {
            Weights w[HELD];
            Sums less[HELD] = {};
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                QT_UNROLL
                for (int j = 0; j < 2; j++) {
                    w[l].at[j] = minima(head[l][2 * p + j], lanes[l].lane);
                    w[l].at[2 + j] = mul_halves(w[l].at[j], 0x10001000); /* 2^-REST_RAISED */
                }
            multiply(w, halves, less);
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                add_scaled(head[l] + 2 * p, sums[p][l], less[l], &acc[p][l]);
        }
    }
    static QT_MEMBER void block(const Lane *lanes, int32_t i, uint32_t turn, Ring &ring, Sums (*acc)[HELD])
    {
        Sums sums[TILES][HELD] = {}, of_inputs[HELD] = {};
        uint32_t pairs[HELD][2 * TILES][2];
        Four x[HELD][8], head[HELD][2 * TILES];
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            Late<uint16_t> inputs = lanes[l].inputs.from((uint32_t)i, q4_k::weights);
            QT_UNROLL
            for (int n = 0; n < 8; n++)
                x[l][n] = inputs.wide<Four>(32 * n);
        }
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            ring.template wait<DEPTH - 1>(lanes[l].thread);
        meet_warp();
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int j = 0; j < 2 * TILES; j++)
                head[l][j] = head_of(ring, turn, lanes[l], j);
        QT_UNROLL
        for (int n = 0; n < 8; n++) {
            Two codes[HELD][2 * TILES];
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                QT_UNROLL
                for (int j = 0; j < 2 * TILES; j++) {
                    if (n % 4 == 0)
                        scales(head[l][j], n / 4, pairs[l][j]);
                    codes[l][j] = ring.template get<Two>(turn, 2 * (4 * j + n / 2), lanes[l].thread);
                }
            part(lanes, codes, pairs, n, x, sums, of_inputs);
        }
        add_block(lanes, head, sums, of_inputs, acc);
    }
    /* acc += 2^-LOWERED (d sums - dmin minima) of two rows, of which sums are 2^-LOWERED as large as they
     * should be, and minima 2^-4. */
    static QT_MEMBER void add_scaled(const Four *heads, const Sums &sums, const Sums &minima, Sums *acc)
    {
        QT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint32_t both = heads[k / 2].word[0];
            float less = mul(-of_f16(both >> 16), float_of_bits((127u + SUMS_LOWERED - 2 - LOWERED) << 23));
            float sum = fma(of_f16(both & 0xffff), sums.at[k], acc->at[k]);
            acc->at[k] = fma(less, minima.at[k], sum);
        }
    }
    /* Waits for the kernels before, and adds products with every step-th block of columns, from `first`
     * on. */
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &ring,
                              Sums (*acc)[HELD])
    {
        const int32_t count = (int32_t)t.cols / q4_k::weights;
        QT_UNROLL
        for (int turn = 0; turn < DEPTH; turn++)
            ask_all(lanes, first + turn * step, count, turn, ring);
        wait_for_kernels_before();
        uint32_t turn = 0;
        QT_ROLLED
        for (int32_t i = first; i < count; i += step) {
            block(lanes, i, turn, ring, acc);
            meet_warp(); /* all have read the heads that are asked for again */
            ask_all(lanes, i + DEPTH * step, count, turn, ring);
            turn = turn + 1 == DEPTH ? 0 : turn + 1;
        }
    }
    static QT_MEMBER void ask_all(const Lane *lanes, int32_t i, int32_t count, uint32_t turn, Ring &ring)
    {
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            if (i < count)
                ask(lanes[l], i, turn, ring);
            ring.close(lanes[l].thread);
        }
    }
};

} // namespace qt

#endif
