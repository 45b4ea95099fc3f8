/* Codes of a byte each, [rows, cols], to 32-bit words: the inverse of words.h.
 *
 *     ACROSS_WORDS    words [cols, rows / 8], AWQ's order of nibbles
 *     COLUMN_WORDS    words [ceil(cols * bits / 32), rows] (GPTQ's weights)
 *     ROW_WORDS       words [rows, ceil(cols * bits / 32)] (GPTQ's zeros, of the transposed matrix)
 *
 * A kernel cannot refuse: of a code that does not fit, the low bits are taken. */
#ifndef QTOOL_CUDA_PACK_H
#define QTOOL_CUDA_PACK_H

#include "grid.h"

namespace qt {

enum { ACROSS_WORDS, COLUMN_WORDS, ROW_WORDS };

template <int LAYOUT, int BITS> struct Pack {
    enum {
        BLOCK = 256,
        TILE = 64,
        PITCH = TILE + 4, /* no two of 32 threads meet in a bank */
        WORDS_ALONG = TILE * BITS / 32,
        WORDS = LAYOUT == ACROSS_WORDS ? TILE * TILE / 8 : TILE * WORDS_ALONG
    };
    struct Room {
        Shared<uint8_t, TILE * PITCH> codes;
#if defined(QT_CHECKED)
        void clear() { codes.clear(); }
#endif
    };
    /* 64 threads read along a row; what the matrix has not is zero. */
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        In<uint8_t> codes(t.codes, t.codes_bytes);
        int32_t along = thread % TILE, col = block.y * TILE + along;
        for (int32_t down = thread / TILE; down < TILE; down += BLOCK / TILE) {
            int64_t row = block.x * TILE + down;
            uint8_t code = row < t.rows && col < t.cols ? codes[row * t.cols + col] : 0;
            room.codes.put(down * PITCH + along, code & ((1 << BITS) - 1));
        }
    }
    /* Eight rows of a column. */
    static QT_MEMBER uint32_t across(const Room &room, int32_t group, int32_t along)
    {
        uint32_t word = 0;
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            int32_t down = group * 8 + (i < 4 ? 2 * i : 2 * i - 7);
            word |= (uint32_t)room.codes.get(down * PITCH + along) << (4 * i);
        }
        return word;
    }
    /* Word k of the stream of a row of the tile. */
    static QT_MEMBER uint32_t along(const Room &room, int32_t down, int32_t k)
    {
        uint32_t word = 0;
        int32_t begin = 32 * k / BITS, end = (32 * k + 31) / BITS;
        for (int32_t i = begin; i <= end; i++) {
            uint32_t code = room.codes.get(down * PITCH + i);
            int32_t shift = i * BITS - 32 * k;
            word |= shift < 0 ? code >> -shift : code << shift;
        }
        return word;
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        Out<uint32_t> words(t.values, t.values_bytes);
        for (int32_t i = thread; i < WORDS; i += BLOCK) {
            if (LAYOUT == ACROSS_WORDS) {
                int32_t group = i % (TILE / 8), to = i / (TILE / 8);
                int64_t column = block.x * (TILE / 8) + group;
                int32_t col = block.y * TILE + to;
                if (column < t.pitch && col < t.cols)
                    words.put(col * t.pitch + column, across(room, group, to));
                continue;
            }
            int32_t down = LAYOUT == COLUMN_WORDS ? i % TILE : i / WORDS_ALONG;
            int32_t k = LAYOUT == COLUMN_WORDS ? i / TILE : i % WORDS_ALONG;
            int64_t row = block.x * TILE + down, word = (int64_t)block.y * WORDS_ALONG + k;
            if (row >= t.rows || word * 32 >= t.cols * BITS)
                continue;
            if (LAYOUT == COLUMN_WORDS)
                words.put(word * t.pitch + row, along(room, down, k));
            else
                words.put(row * t.pitch + word, along(room, down, k));
        }
    }
};

} // namespace qt

#define QT_PACK_KERNELS(X)                                                                     \
    X(pack_across_4, qt::Pack<qt::ACROSS_WORDS, 4>)                                            \
    X(pack_columns_2, qt::Pack<qt::COLUMN_WORDS, 2>) X(pack_columns_3, qt::Pack<qt::COLUMN_WORDS, 3>) \
    X(pack_columns_4, qt::Pack<qt::COLUMN_WORDS, 4>) X(pack_columns_8, qt::Pack<qt::COLUMN_WORDS, 8>) \
    X(pack_rows_2, qt::Pack<qt::ROW_WORDS, 2>) X(pack_rows_3, qt::Pack<qt::ROW_WORDS, 3>)      \
    X(pack_rows_4, qt::Pack<qt::ROW_WORDS, 4>) X(pack_rows_8, qt::Pack<qt::ROW_WORDS, 8>)

#endif
