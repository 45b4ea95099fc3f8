/* Products with blocks of Q4_K that come by copies; see tried.h. */
#ifndef QTOOL_GPU_TRIED_ROWS_H
#define QTOOL_GPU_TRIED_ROWS_H

#include "tried_ring.h"

namespace qt {

/* Blocks of Q4_K by copies: 128 bytes of codes of four rows at a time, then the heads of all rows. Rows
 * are 160 bytes from one to the next, so that lanes that read meet in no bank; those that copy heads
 * meet two by two. */
template <int OF_BLOCK, int NEXT, int TURNS, int OF_SM, bool BULK = false>
struct RowsRing : GemvQ4K<OF_BLOCK, NEXT, TURNS, OF_SM> {
    typedef GemvQ4K<OF_BLOCK, NEXT, TURNS, OF_SM> Base;
    enum { DEPTH = TURNS, COLUMNS = q4_k::weights, INPUTS = 8, ROWS = 32, TILES = 2, PLACE = 40 };
    enum { COPIED = q4_k::bytes * ROWS };
    typedef typename RingOf<BULK, 4 * PLACE * ROWS, OF_BLOCK / 32, DEPTH>::Ring Ring;
    typedef typename Base::Lane Lane;

    /* Where it copies from: the first of its rows, and that whose head it copies. */
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        const int32_t lane = thread & 31, pitch = (int32_t)t.pitch / Base::UNIT;
        Lane found = {{t.codes, t.codes_bytes}, inputs_of(t, lane), {}, 0, lane, (uint32_t)thread};
        found.row[0] = (uint32_t)((top + (lane >> 3)) * pitch);
        found.head = (uint32_t)((top + lane) * pitch);
        return found;
    }
    static QT_MEMBER void ask(const Task &t, const Lane &lane, uint32_t i, uint32_t turn, Ring &ring)
    {
        const uint32_t from = i * (q4_k::bytes / Base::UNIT), own = (uint32_t)lane.lane;
        if constexpr (BULK) { /* a lane a row */
            ring.fill(turn, own * PLACE, lane.thread, lane.bytes.from(lane.head + from, Base::UNIT),
                      q4_k::bytes);
        } else {
            ask_pieces(t, lane, from, turn, ring);
        }
    }
    static QT_MEMBER void ask_pieces(const Task &t, const Lane &lane, uint32_t from, uint32_t turn,
                                     Ring &ring)
    {
        const uint32_t own = (uint32_t)lane.lane;
        In<uint8_t> codes = lane.bytes.from(lane.row[0] + from, Base::UNIT).from(16 + 16 * (own & 7));
        QT_UNROLL
        for (uint32_t k = 0; k < 8; k++) {
            ring.fill(turn, (4 * k + own / 8) * PLACE + 4 + 4 * (own & 7), lane.thread, codes);
            codes = codes.next(4 * (uint32_t)t.pitch);
        }
        ring.fill(turn, own * PLACE, lane.thread, lane.bytes.from(lane.head + from, Base::UNIT));
    }
    static QT_MEMBER uint32_t place_of(const Lane &lane, int j)
    {
        return (uint32_t)((lane.lane >> 2) + 8 * j) * PLACE;
    }
    static QT_MEMBER void unit(const Task &, const Lane *lanes, int32_t next, bool more, uint32_t turn,
                               const Ring &ring, Four (*x)[INPUTS], Sums (*acc)[HELD])
    {
        Sums sums[TILES][HELD] = {}, of_inputs[HELD] = {};
        uint32_t pairs[HELD][2 * TILES][2];
        Two codes[HELD][2 * TILES];
        Four head[HELD][2 * TILES];
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int j = 0; j < 2 * TILES; j++)
                head[l][j] = ring.template get<Four>(turn, place_of(lanes[l], j), lanes[l].thread);
        QT_UNROLL
        for (int n = 0; n < 8; n++) {
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                QT_UNROLL
                for (int j = 0; j < 2 * TILES; j++) {
                    const uint32_t own = 2 * (uint32_t)(lanes[l].lane & 3) + 8 * (uint32_t)(n / 2);
                    if (n % 4 == 0)
                        Base::scales(head[l][j], n / 4, pairs[l][j]);
                    if (n % 2 == 0)
                        codes[l][j] = ring.template get<Two>(turn, place_of(lanes[l], j) + 4 + own,
                                                             lanes[l].thread);
                }
            Base::part(lanes, codes, pairs, n, x, sums, of_inputs);
            QT_UNROLL
            for (int l = 0; more && l < HELD; l++)
                x[l][n] = lanes[l].inputs.from((uint32_t)next, COLUMNS).template wide<Four>(32 * n);
        }
        Base::add_block(lanes, head, sums, of_inputs, acc);
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &ring,
                              Sums (*acc)[HELD])
    {
        Turns<RowsRing>::run(t, lanes, first, step, ring, acc);
    }
};

} // namespace qt

#endif
