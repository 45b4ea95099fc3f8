/* Formats whose columns lie one after the other: neighbouring threads read neighbouring rows, and the
 * tile is transposed in shared memory, so that what is written lies along rows. */
#ifndef QTOOL_CUDA_TURNED_H
#define QTOOL_CUDA_TURNED_H

#include "grid.h"
#include "words.h"

namespace qt {

/* A tile of what is written. Runs of 16 bytes of a row change places with the row's number, so that
 * no two of eight threads meet in a bank: neither those that write a column of runs, in rows that
 * follow each other or lie eight apart, nor those that read a row. */
template <class OUT, int DOWN, int ACROSS> struct Tile {
    typedef typename OUT::Bits Bits;
    enum { IN_FOUR = 16 / (int)sizeof(Bits), RUNS = ACROSS / IN_FOUR };
    Shared<Bits, DOWN * ACROSS> bits;
#if defined(QT_CHECKED)
    void clear() { bits.clear(); }
#endif
    static QT_MEMBER int32_t place(int32_t down, int32_t run)
    {
        return down * ACROSS + (run ^ ((down ^ down >> 3) & 7)) * IN_FOUR;
    }
    /* Eight columns from a multiple of eight on. */
    QT_MEMBER void put(int32_t down, int32_t to, const float *w)
    {
        Four fours[OUT::FOURS];
        OUT::eight(w, fours);
        QT_UNROLL
        for (int i = 0; i < OUT::FOURS; i++)
            bits.put_wide(place(down, to / IN_FOUR + i), fours[i]);
    }
    /* Writes what the matrix has of the tile, by `threads` threads. */
    template <int BLOCK>
    QT_MEMBER void write(const Task &t, Place block, int32_t thread) const
    {
        Out<Bits> values(t.values, t.values_bytes);
        int32_t top = block.y * DOWN, from = (int32_t)block.x * ACROSS;
        int32_t run = (uint32_t)thread % RUNS, col = from + run * IN_FOUR;
        if (whole_tile(t, top + DOWN, from + ACROSS)) {
            int32_t down = (uint32_t)thread / RUNS;
            int64_t at = product(top + down, t.cols) + col, step = BLOCK / RUNS * t.cols;
            enum { EACH = DOWN * RUNS / BLOCK };
            Four four[EACH];
            QT_UNROLL
            for (int k = 0; k < EACH; k++)
                four[k] = bits.template wide<Four>(place(down + k * (BLOCK / RUNS), run));
            QT_UNROLL
            for (int k = 0; k < EACH; k++)
                values.put_wide(at + k * step, four[k]);
            return;
        }
        QT_ROLLED
        for (int32_t down = thread / RUNS; down < DOWN; down += BLOCK / RUNS) {
            int64_t at = product(top + down, t.cols) + col;
            if (top + down >= t.rows || col >= t.cols)
                return;
            if ((t.cols & 7) == 0)
                values.put_wide(at, bits.template wide<Four>(place(down, run)));
            else
                for (int32_t i = 0; i < IN_FOUR; i++)
                    if (col + i < t.cols)
                        values.put(at + i, bits.get(place(down, run) + i));
        }
    }
};

/* Words [ceil(cols * BITS / 32), rows], each row a stream: a thread has 32 columns of a row, which are
 * BITS words. */
template <int BITS, class OUT> struct Columns {
    enum { BLOCK = THREADS, TILE_ROWS = 64, TILE_COLS = 128, UNIT = 32 };
    typedef Tile<OUT, TILE_ROWS, TILE_COLS> Room;

    /* Codes of run k of four, each of eight columns. */
    static QT_MEMBER void codes(const uint32_t *raw, int k, float *code)
    {
        const int bit = 8 * BITS * k, word = bit / 32;
        Raw own = {{raw[word], word + 1 < BITS ? raw[word + 1] : 0, 0, 0}};
        eight_of_stream<BITS>(own, bit % 32, code);
    }
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        int32_t down = (uint32_t)thread % TILE_ROWS, to = (uint32_t)thread / TILE_ROWS * UNIT;
        int32_t top = block.y * TILE_ROWS, row = top + down;
        int32_t from = (int32_t)block.x * TILE_COLS, col = from + to;
        int32_t word = (uint32_t)col / UNIT * BITS;
        uint32_t raw[BITS];
        if (whole_tile(t, top + TILE_ROWS, from + TILE_COLS) && !t.index &&
            (int32_t)t.group_shift >= 5) {
            int64_t at = product(word, t.pitch) + row;
            QT_UNROLL
            for (int k = 0; k < BITS; k++, at += t.pitch)
                raw[k] = words[at];
            int32_t group = col >> (int32_t)t.group_shift;
            float scale;
            int32_t zero = zero_and_scale(t, row, group, &scale);
            QT_UNROLL
            for (int k = 0; k < UNIT / 8; k++) {
                float code[8], w[8];
                codes(raw, k, code);
                QT_UNROLL
                for (int i = 0; i < 8; i++)
                    w[i] = value_of(code[i], zero, scale);
                room.put(down, to + 8 * k, w);
            }
            return;
        }
        if (row >= t.rows || col >= t.cols)
            return;
        int32_t count = (int32_t)((t.cols * BITS + 31) >> 5);
        QT_ROLLED
        for (int32_t end = to + UNIT; to < end && col < t.cols; to += 8, col += 8) {
            int32_t bit = (col >> 3) * (8 * BITS);
            float code[8], w[8];
            word = bit >> 5;
            Raw own = {{words[product(word, t.pitch) + row], 0, 0, 0}};
            if ((BITS == 8 || (BITS == 3 && (bit & 31) > 8)) && word + 1 < count)
                own.word[1] = words[product(word + 1, t.pitch) + row];
            eight_of_stream<BITS>(own, bit & 31, code);
            eight_values(t, row, col, code, w);
            room.put(down, to, w);
        }
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        room.template write<BLOCK>(t, block, thread);
    }
};

template <int BITS, class OUT> struct Parts<Columns<BITS, OUT>> {
    enum { four = 0, resident = MANY_BLOCKS };
};

/* AWQ GEMM: words [cols, rows / 8], each of eight rows of a column: a thread has eight columns of
 * eight rows, sixteen threads half a line of memory, which is what a GPU fetches at least. */
template <class OUT> struct Across {
    enum { BLOCK = 128, TILE_ROWS = 128, TILE_COLS = 64, ABREAST = TILE_ROWS / 8 };
    typedef Tile<OUT, TILE_ROWS, TILE_COLS> Room;

    /* Scales and zeros of eight rows in AWQ's own layout, two loads for all of them. */
    static QT_MEMBER void of_eight_rows(const Task &t, int64_t row, int32_t group, float *scale,
                                        int32_t *zero)
    {
        Four halves = In<uint16_t>(t.scale, t.scale_bytes).wide<Four>(product(group, t.scale_group) + row);
        uint32_t word =
            In<uint32_t>(t.zero, t.zero_bytes)[product(group, t.zero_group) + (row >> 3)];
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            scale[i] = of_f16(halves.word[i / 2] >> (16 * (i & 1)) & 0xffff);
            zero[i] = (int32_t)(word >> awq_shift(i) & 15);
        }
    }
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        int32_t down = (uint32_t)thread % ABREAST * 8, to = (uint32_t)thread / ABREAST * 8;
        int32_t top = block.y * TILE_ROWS, row = top + down;
        int32_t from = (int32_t)block.x * TILE_COLS, col = from + to;
        int64_t at = product(col, t.pitch) + (row >> 3);
        uint32_t raw[8];
        if (whole_tile(t, top + TILE_ROWS, from + TILE_COLS) && !t.index &&
            (int32_t)t.group_shift >= 3 && (int32_t)t.scale_dtype == F16 && t.scale_row == 1 &&
            (int32_t)t.zero_kind == ZERO_ACROSS) {
            float scale[8];
            int32_t zero[8];
            QT_UNROLL
            for (int k = 0; k < 8; k++)
                raw[k] = words[at + k * t.pitch];
            of_eight_rows(t, row, col >> (int32_t)t.group_shift, scale, zero);
            QT_UNROLL
            for (int i = 0; i < 8; i++) {
                float w[8];
                QT_UNROLL
                for (int k = 0; k < 8; k++) {
                    uint32_t nibbles = raw[k] >> (awq_shift(i) & 4) & 0x0f0f0f0f;
                    w[k] = value_of(above_byte(nibbles, awq_shift(i) / 8), zero[i], scale[i]);
                }
                room.put(down + i, to, w);
            }
            return;
        }
        if (row >= t.rows || col >= t.cols) /* rows come in eights */
            return;
        QT_UNROLL
        for (int k = 0; k < 8; k++)
            raw[k] = col + k < t.cols ? words[at + k * t.pitch] : 0;
        QT_ROLLED
        for (int i = 0; i < 8; i++) {
            float code[8], w[8];
            QT_UNROLL
            for (int k = 0; k < 8; k++)
                code[k] = above_masked(raw[k] >> awq_shift(i), 15);
            eight_values(t, row + i, col, code, w);
            room.put(down + i, to, w);
        }
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        room.template write<BLOCK>(t, block, thread);
    }
};

} // namespace qt

#endif
