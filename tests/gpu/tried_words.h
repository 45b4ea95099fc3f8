/* Products with words of AWQ and GPTQ that come by copies; see tried.h. */
#ifndef QTOOL_GPU_TRIED_WORDS_H
#define QTOOL_GPU_TRIED_WORDS_H

#include "tried_ring.h"

namespace qt {

/* Words by copies. Of 128 columns a warp's 64 rows are 256 bytes of each of GPTQ's 16 rows of words, or 32
 * of each of AWQ's 128, and 128 of scales and 32 of zeros; or a warp has 32 of GPTQ's rows, and half as
 * much of each, or 128 of AWQ's, and twice as much, which it takes as HALVES of 64 rows. They lie where
 * neither the lanes that copy nor those that read meet in a bank.
 *
 * BULK: GPTQ's, a lane a row of words, one more the scales, and one the zeros; a row of words is followed
 * by eight that are nobody's, so that no two lanes meet. */
template <bool AWQ, int OF_BLOCK, int NEXT, int TURNS, int OF_SM, int OF_ROWS = 64, bool BULK = false>
struct WordsRing : GemvWords<AWQ, OF_BLOCK, NEXT, OF_SM> {
    typedef GemvWords<AWQ, OF_BLOCK, NEXT, OF_SM> Base;
    enum { DEPTH = TURNS, COLUMNS = 128, INPUTS = 4, ROWS = OF_ROWS, TILES = ROWS / 16 };
    /* Copies of GPTQ's rows of words, and of AWQ's columns, are PARTS of a run; of one there are so many
     * ACROSS. */
    enum { PARTS = ROWS / 32, COPIES = 4 * PARTS, ACROSS = AWQ ? PARTS : 8 * PARTS };
    enum { HALVES = AWQ ? ROWS / 64 : 1, OWN = TILES / HALVES };
    enum { APART = BULK ? ROWS + 8 : ROWS }; /* words of a row of words */
    enum { SCALES = 16 * APART, ZEROS = SCALES + ROWS / 2, BYTES = 4 * (ZEROS + ROWS / 8) };
    enum { COPIED = (64 + 2) * ROWS + ROWS / 2 };
    typedef typename RingOf<BULK, BYTES, OF_BLOCK / 32, DEPTH>::Ring Ring;
    typedef typename Base::template Read<1> Run;

    static QT_MEMBER int32_t slot(uint32_t row)
    {
        return (int32_t)(row / 64) * 64 + Base::slot(row % 64);
    }
    struct Lane {
        In<uint8_t> words, more; /* of scales, or of zeros */
        Late<uint16_t> inputs;
        uint32_t more_of_group, lane, thread;
    };
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        const uint32_t lane = (uint32_t)thread & 31, pitch = 4 * (uint32_t)t.pitch;
        In<uint8_t> words(t.codes, t.codes_bytes);
        Lane found = {{}, {}, inputs_of(t, (int32_t)lane), 0, lane, (uint32_t)thread};
        if (BULK)
            found.words = words.from(lane & 15, pitch).from(4 * top);
        else
            found.words =
                words.from(lane / ACROSS, pitch).from((AWQ ? top / 2 : 4 * top) + 16 * (lane % ACROSS));
        if (BULK ? lane == 16 : lane < ROWS / 8) {
            found.more = In<uint8_t>(t.scale, t.scale_bytes).from(2 * top + (BULK ? 0 : 16 * lane));
            found.more_of_group = 2 * (uint32_t)t.scale_group;
        } else {
            found.more = In<uint8_t>(t.zero, t.zero_bytes).from(top / 2 + (BULK ? 0 : 16 * (lane % PARTS)));
            found.more_of_group = 4 * (uint32_t)t.zero_group;
        }
        return found;
    }
    static QT_MEMBER void ask_bulk(const Task &t, const Lane &lane, uint32_t i, uint32_t turn, Ring &ring)
    {
        const uint32_t own = lane.lane, group = i * COLUMNS >> (int32_t)t.group_shift;
        if (own < 16)
            ring.fill(turn, own * APART, lane.thread, lane.words.from(i, 64 * (uint32_t)t.pitch), 4 * ROWS);
        else if (own == 16)
            ring.fill(turn, SCALES, lane.thread, lane.more.from(group, lane.more_of_group), 2 * ROWS);
        else if (own == 17)
            ring.fill(turn, ZEROS, lane.thread, lane.more.from(group, lane.more_of_group), ROWS / 2);
    }
    static QT_MEMBER void ask(const Task &t, const Lane &lane, uint32_t i, uint32_t turn, Ring &ring)
    {
        if constexpr (BULK)
            ask_bulk(t, lane, i, turn, ring);
        else
            ask_pieces(t, lane, i, turn, ring);
    }
    /* Where words of column 8 row + c of a run are, of half h of a warp's rows. */
    static QT_MEMBER uint32_t across(uint32_t k, uint32_t h, uint32_t c, uint32_t row)
    {
        return 256 * (HALVES * k + h) + 32 * c + 8 * (row ^ (c & 3) ^ 2 * h);
    }
    static QT_MEMBER void ask_pieces(const Task &t, const Lane &lane, uint32_t i, uint32_t turn, Ring &ring)
    {
        const uint32_t pitch = 4 * (uint32_t)t.pitch, own = lane.lane;
        In<uint8_t> words = lane.words.from(i, (AWQ ? 128 : 16) * pitch);
        QT_UNROLL
        for (uint32_t k = 0; k < COPIES; k++) { /* PARTS of them are of a run of 32 columns */
            uint32_t to, row;
            if (AWQ) {
                row = own / (8 * ACROSS) + 4 / PARTS * (k % PARTS);
                to = across(k / PARTS, own % ACROSS / 2, own / ACROSS & 7, row) + 4 * (own & 1);
            } else {
                row = own / ACROSS + 32 / ACROSS * (k % PARTS);
                to = (k / PARTS * PARTS + own % ACROSS / 8) * 128;
                to += 32 * row + 4 * ((own & 7) ^ (2 * row));
            }
            ring.fill(turn, to, lane.thread, words);
            words = words.next(32 / ACROSS * pitch);
        }
        if (own < ROWS / 8 + PARTS)
            ring.fill(turn, SCALES + 4 * own, lane.thread,
                      lane.more.from(i * COLUMNS >> (int32_t)t.group_shift, lane.more_of_group));
    }
    /* Words of a lane in run k, of half h, as Base reads them. */
    static QT_MEMBER Run words(const Ring &ring, uint32_t turn, const Lane &lane, uint32_t k, uint32_t half)
    {
        const uint32_t g = lane.lane >> 2, own = lane.lane & 3;
        Run found;
        if (AWQ) {
            QT_UNROLL
            for (uint32_t c = 0; c < 8; c++)
                found.word[0][c] =
                    ring.template get<uint32_t>(turn, across(k, half, c, own) + g, lane.thread);
        } else {
            QT_UNROLL
            for (uint32_t h = 0; h < PARTS; h++) {
                const uint32_t from = BULK ? (4 * k + own) * APART + 32 * h + 4 * g
                                           : (PARTS * k + h) * 128 + 32 * own + 4 * (g ^ (2 * own));
                Four four = ring.template get<Four>(turn, from, lane.thread);
                QT_UNROLL
                for (int i = 0; i < 4; i++)
                    found.word[0][4 * h + i] = four.word[i];
            }
        }
        return found;
    }
    static QT_MEMBER uint32_t zeros(const Ring &ring, uint32_t turn, const Lane &lane, uint32_t half)
    {
        const uint32_t g = lane.lane >> 2;
        if (AWQ)
            return ring.template get<uint32_t>(turn, ZEROS + 8 * half + g, lane.thread);
        uint32_t low = ring.template get<uint32_t>(turn, ZEROS + g / 2, lane.thread);
        uint32_t high = ring.template get<uint32_t>(turn, ZEROS + 4 * (PARTS - 1) + g / 2, lane.thread);
        return byte_perm(low >> (16 * (g & 1)), high >> (16 * (g & 1)), 0x5410);
    }
    static QT_MEMBER void scales(const Ring &ring, uint32_t turn, const Lane &lane, uint32_t half,
                                 uint32_t *found)
    {
        const uint32_t from = SCALES + 32 * half + (AWQ ? 4 : 2) * (lane.lane >> 2);
        QT_UNROLL
        for (uint32_t h = 0; h < (AWQ ? 2 : PARTS); h++) {
            Two two = ring.template get<Two>(turn, from + (AWQ ? 2 : 16) * h, lane.thread);
            found[2 * h] = two.word[0];
            found[2 * h + 1] = two.word[1];
        }
    }
    static QT_MEMBER void unit(const Task &t, const Lane *lanes, int32_t next, bool more, uint32_t turn,
                               const Ring &ring, Four (*x)[INPUTS], Sums (*acc)[HELD])
    {
        QT_UNROLL
        for (int h = 0; h < HALVES; h++)
            half(t, lanes, next, more && h == HALVES - 1, turn, ring, x, (uint32_t)h, acc + h * OWN);
    }
    static QT_MEMBER void half(const Task &t, const Lane *lanes, int32_t next, bool more, uint32_t turn,
                               const Ring &ring, Four (*x)[INPUTS], uint32_t h, Sums (*acc)[HELD])
    {
        uint32_t less[HELD][4];
        Sums sums[OWN][HELD] = {};
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            Base::less_zeros(t, zeros(ring, turn, lanes[l], h), less[l]);
        QT_UNROLL
        for (int k = 0; k < INPUTS; k++) {
            Run run[HELD];
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                run[l] = words(ring, turn, lanes[l], (uint32_t)k, h);
            QT_UNROLL
            for (int s = 0; s < 2; s++) {
                Inputs given[HELD];
                QT_UNROLL
                for (int l = 0; l < HELD; l++)
                    given[l] = Base::inputs(x[l][k], s);
                QT_UNROLL
                for (int p = 0; p < OWN; p++) {
                    Weights w[HELD];
                    QT_UNROLL
                    for (int l = 0; l < HELD; l++)
                        w[l] = Base::weights(run[l], less[l], s, p);
                    multiply(w, given, sums[p]);
                }
            }
            QT_UNROLL
            for (int l = 0; more && l < HELD; l++)
                x[l][k] = lanes[l].inputs.from((uint32_t)next, COLUMNS).template wide<Four>(32 * k);
        }
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            uint32_t own[4] = {};
            scales(ring, turn, lanes[l], h, own);
            add_scaled<Base, OWN>(own, l, sums, acc);
        }
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &ring,
                              Sums (*acc)[HELD])
    {
        Turns<WordsRing>::run(t, lanes, first, step, ring, acc);
    }
};

} // namespace qt

#endif
