/* Products with AWQ's words by warps of more rows; see tried.h. */
#ifndef QTOOL_GPU_TRIED_WIDE_H
#define QTOOL_GPU_TRIED_WIDE_H

#include "tried_ahead.h"

namespace qt {

/* qtool's kernel for AWQ's words, but that a lane has WIDE words of each of its columns, which lie
 * together, where that one has one: what a warp reads of a column at once is 64 bytes, of 128 rows,
 * or 128, of 256. Word w of lane 4 g + t is of rows 8 (WIDE g + w) to 8 (WIDE g + w) + 7, whose sums are
 * tiles 4 w to 4 w + 3. A warp takes RUNS runs of 32 columns at a time, which is as many registers as
 * WIDE * RUNS says. */
template <int OF_BLOCK, int NEXT, int OF_SM, int RUNS, int OF_ROWS>
struct WordsWide : GemvWords<true, OF_BLOCK, NEXT, OF_SM> {
    typedef GemvWords<true, OF_BLOCK, NEXT, OF_SM> Base;
    enum { ROWS = OF_ROWS, WIDE = ROWS / Base::ROWS, TILES = WIDE * Base::TILES, COLUMNS = 32 * RUNS };
    typedef typename Base::template Read<RUNS> Read;
    union Words {
        Two two;
        Four four;
        uint32_t word[4];
    };

    static QT_MEMBER int32_t slot(uint32_t row)
    {
        return (int32_t)(row / 8 % WIDE) * Base::ROWS + Base::slot(row / (8 * WIDE) * 8 + row % 8);
    }
    struct Lane {
        In<uint32_t> words;
        Late<uint16_t> inputs;
        uint32_t row; /* the first of its own */
    };
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        const int32_t lane = thread & 31, row = top + 8 * WIDE * (lane >> 2);
        In<uint32_t> words(t.codes, t.codes_bytes);
        return Lane{words.from(product(8 * (lane & 3), t.pitch) + (row >> 3)), inputs_of(t, lane),
                    (uint32_t)row};
    }
    /* Words that lie together. */
    static QT_MEMBER Words together(const In<uint32_t> &in)
    {
        Words found;
        if constexpr (WIDE == 2)
            found.two = in.template here<Two>(0);
        else
            found.four = in.template here<Four>(0);
        return found;
    }
    static QT_MEMBER void read(const Task &t, const Lane &lane, int32_t col, Read *found)
    {
        const uint32_t group = (uint32_t)col >> (int32_t)t.group_shift, pitch = (uint32_t)t.pitch;
        QT_UNROLL
        for (int k = 0; k < RUNS; k++) {
            In<uint32_t> words = lane.words.from((uint32_t)col + 32 * k, pitch);
            QT_UNROLL
            for (int c = 0; c < 8; c++) {
                const Words of_column = together(words);
                QT_UNROLL
                for (int w = 0; w < WIDE; w++)
                    found[w].word[k][c] = of_column.word[w];
                words = words.next(pitch);
            }
        }
        /* By numbers, of which one takes a register, not two. */
        In<uint16_t> scales(t.scale, t.scale_bytes);
        In<uint32_t> all_zeros(t.zero, t.zero_bytes);
        scales = scales.from(group * (uint32_t)t.scale_group + lane.row, 1);
        const Words zeros = together(all_zeros.from(group * (uint32_t)t.zero_group + lane.row / 8, 1));
        QT_UNROLL
        for (int w = 0; w < WIDE; w++) {
            Four own = scales.template here<Four>(8 * w);
            QT_UNROLL
            for (int i = 0; i < 4; i++)
                found[w].scales[i] = own.word[i];
            found[w].zeros = zeros.word[w];
        }
    }
    /* Of word w of every lane. */
    static QT_MEMBER void part(const Task &t, const Read (*found)[WIDE], const Four (*given)[RUNS], int w,
                               Sums (*acc)[HELD])
    {
        uint32_t less[HELD][4];
        Sums sums[Base::TILES][HELD] = {};
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            Base::less_zeros(t, found[l][w].zeros, less[l]);
        QT_UNROLL
        for (int s = 0; s < 2 * RUNS; s++) {
            Inputs x[HELD];
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                x[l] = Base::inputs(given[l][s / 2], s);
            QT_UNROLL
            for (int p = 0; p < Base::TILES; p++) {
                Weights weights[HELD];
                QT_UNROLL
                for (int l = 0; l < HELD; l++)
                    weights[l] = Base::weights(found[l][w], less[l], s, p);
                multiply(weights, x, sums[p]);
            }
        }
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            add_scaled<Base, Base::TILES>(found[l][w].scales, l, sums, acc);
    }
    static QT_MEMBER void unit(const Task &t, const Lane *lanes, int32_t col, bool wait, Sums (*acc)[HELD])
    {
        Read found[HELD][WIDE];
        Four given[HELD][RUNS];
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            read(t, lanes[l], col, found[l]);
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
        for (int w = 0; w < WIDE; w++)
            part(t, found, given, w, acc + w * Base::TILES);
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, NoRoom &,
                              Sums (*acc)[HELD])
    {
        const int32_t from = first * COLUMNS;
        let_next_begin();
        if (from >= (int32_t)t.cols)
            return wait_for_kernels_before();
        QT_ROLLED
        for (int32_t col = from; col < (int32_t)t.cols; col += step * COLUMNS)
            unit(t, lanes, col, col == from, acc);
    }
};

} // namespace qt

#endif
