/* Tiles of codes between a matrix and its packed words, for pack.c and dequantize.c. */
#ifndef QTOOL_TILES_H
#define QTOOL_TILES_H

#include "qtool_kernels.h"
#include "streams.h"
#include "transpose.h"

/* A tile has rows of `stride` codes; what a layout keeps together decides how many (qt_shape).
 * Vectors may be read and written past the last code by less than the slack. */
enum { TILE_CODES = 16384, TILE_WORDS = 4096, TILE_SLACK = 64 };

typedef struct {
    int64_t row, rows, col, cols; /* where the tile lies and what of it is used */
    int64_t max_rows, stride;
    uint8_t codes[TILE_CODES + TILE_SLACK];
    uint32_t words[TILE_WORDS + TILE_SLACK / 4];
} qt_tile;

/* Words of a tile lie in a row when their rows are read one by one, in a square when they are
 * transposed: a cache line of neighbours by as many columns as fill the tile. 960 is a multiple of
 * the codes in a padded word for every width. */
static inline void qt_shape(const qt_packing *p, qt_tile *tile)
{
    static const int16_t shapes[][2] = {{1, 1024}, {64, 256}, {128, 128}, {1, 960}, {4, 1024}};
    tile->max_rows = shapes[p->layout][0];
    tile->stride = shapes[p->layout][1];
}

/* Words in a row, or for QT_COLUMNS in a column. */
static inline int64_t qt_row_words(const qt_packing *p)
{
    if (p->layout == QT_PADDED)
        return (p->cols + 32 / p->bits - 1) / (32 / p->bits);
    return (p->cols * p->bits + 31) / 32;
}

/* Padded words, without their unused top bits, to a stream; both counted in words. */
static inline void qt_squeeze(uint8_t *stream, const uint8_t *words, int64_t count, int bits)
{
    int used = 32 / bits * bits, fill = 0;
    uint64_t low = qt_low_bits(used, 64), stock = 0;
    for (int64_t w = 0; w < count; w++) {
        uint32_t word;
        memcpy(&word, words + 4 * w, 4);
        stock |= (word & low) << fill;
        memcpy(stream, &stock, 8);
        int done = (fill + used) / 8;
        stream += done;
        stock = done == 8 ? 0 : stock >> 8 * done;
        fill = (fill + used) % 8;
    }
}

static inline void qt_stretch(uint8_t *words, const uint8_t *stream, int64_t count, int bits)
{
    int used = 32 / bits * bits;
    for (int64_t w = 0; w < count; w++) {
        uint64_t stock;
        memcpy(&stock, stream + w * used / 8, 8);
        uint32_t word = (uint32_t)(stock >> w * used % 8 & qt_low_bits(used, 64));
        memcpy(words + 4 * w, &word, 4);
    }
}

/* Where the tile's words begin, and how many of them a row has. */
static inline uint8_t *qt_tile_words(const qt_packing *p, const qt_tile *tile, int64_t row,
                                     int64_t *count)
{
    int64_t total = qt_row_words(p), per = 32 / p->bits;
    int64_t begin = tile->col * p->bits / 32, end = begin + tile->stride * p->bits / 32;
    if (p->layout == QT_PADDED) {
        begin = tile->col / per;
        end = begin + tile->stride / per;
    }
    *count = (end < total ? end : total) - begin;
    return (uint8_t *)p->words + 4 * (row * total + begin);
}

/* Nibble i of the words [cols, rows / 8] is row 8c + order[i]. */
static inline void qt_unpack_across(const qt_packing *p, qt_tile *tile)
{
    int64_t width = p->rows / 8, count = tile->rows / 8, room = tile->stride;
    const uint8_t *from = (const uint8_t *)p->words + 4 * (tile->col * width + tile->row / 8);
    qt_transpose(tile->words, room, from, width, tile->cols, count);
    for (int64_t c = 0; c < count; c++) {
        const uint32_t *words = tile->words + c * room;
        uint8_t *codes = tile->codes + 8 * c * room;
        for (int64_t k = 0; k < tile->cols; k += QT_F32_LANES) {
            qt_vu32 w;
            memcpy(&w, words + k, sizeof w);
            for (int i = 0; i < 8; i++) {
                qt_vu8x4 some = __builtin_convertvector(w >> 4 * i & 15, qt_vu8x4);
                memcpy(codes + p->order[i] * room + k, &some, sizeof some);
            }
        }
    }
}

static inline void qt_pack_across(const qt_packing *p, qt_tile *tile)
{
    int64_t width = p->rows / 8, count = tile->rows / 8, room = tile->stride;
    for (int64_t c = 0; c < count; c++) {
        uint32_t *words = tile->words + c * room;
        const uint8_t *codes = tile->codes + 8 * c * room;
        for (int64_t k = 0; k < tile->cols; k += QT_F32_LANES) {
            qt_vu32 w = {0};
            for (int i = 0; i < 8; i++) {
                qt_vu8x4 some;
                memcpy(&some, codes + p->order[i] * room + k, sizeof some);
                w |= __builtin_convertvector(some, qt_vu32) << 4 * i;
            }
            memcpy(words + k, &w, sizeof w);
        }
    }
    uint8_t *to = (uint8_t *)p->words + 4 * (tile->col * width + tile->row / 8);
    qt_transpose_back(to, width, tile->words, room, tile->cols, count);
}

/* A run of 32 codes in eight words of sixteen bits: nibble j of word m is code 8j + m. */
static inline void qt_unpack_run(uint8_t *codes, const uint8_t *from)
{
    qt_u16x8 words;
    memcpy(&words, from, sizeof words);
    for (int j = 0; j < 4; j++) {
        qt_u8x8 some = __builtin_convertvector(words >> 4 * j & 15, qt_u8x8);
        memcpy(codes + 8 * j, &some, sizeof some);
    }
}

static inline void qt_pack_run(uint8_t *to, const uint8_t *codes)
{
    qt_u16x8 words = {0};
    for (int j = 0; j < 4; j++) {
        qt_u8x8 some;
        memcpy(&some, codes + 8 * j, sizeof some);
        words |= __builtin_convertvector(some, qt_u16x8) << 4 * j;
    }
    memcpy(to, &words, sizeof words);
}

/* Four rows share 2 * cols bytes: strips of 64 codes, each 32 bytes of row 0, of row 1, ... */
static inline void qt_strips(const qt_packing *p, qt_tile *tile, int writing)
{
    uint8_t *at = (uint8_t *)p->words + 2 * (tile->row / 4 * p->cols + tile->col);
    for (int64_t k = 0; k < tile->cols; k += 64)
        for (int64_t r = 0; r < 4; r++)
            for (int64_t run = 0; run < 2; run++, at += 16) {
                uint8_t *codes = tile->codes + r * tile->stride + k + 32 * run;
                if (writing)
                    qt_pack_run(at, codes);
                else
                    qt_unpack_run(codes, at);
            }
}

static inline void qt_unpack_streams(const qt_packing *p, qt_tile *tile, int bits)
{
    int64_t count;
    const uint8_t *all = (const uint8_t *)p->words, *room_end = (const uint8_t *)(&tile->words + 1);
    for (int64_t r = 0; p->layout == QT_PADDED && r < tile->rows; r++) {
        const uint8_t *words = qt_tile_words(p, tile, tile->row + r, &count);
        qt_squeeze((uint8_t *)tile->words, words, count, bits);
        qt_decode(tile->codes + r * tile->stride, (uint8_t *)tile->words, room_end, tile->cols,
                  bits);
    }
    for (int64_t r = 0; p->layout == QT_ROWS && r < tile->rows; r++) {
        const uint8_t *stream = qt_tile_words(p, tile, tile->row + r, &count);
        const uint8_t *end = all + 4 * qt_row_words(p) * p->rows;
        qt_decode(tile->codes + r * tile->stride, stream, end, tile->cols, bits);
    }
    if (p->layout != QT_COLUMNS)
        return;
    int64_t width = tile->stride * bits / 32;
    (void)qt_tile_words(p, tile, 0, &count);
    const uint8_t *from = all + 4 * (tile->col * bits / 32 * p->rows + tile->row);
    qt_transpose(tile->words, width, from, p->rows, count, tile->rows);
    for (int64_t r = 0; r < tile->rows; r++)
        qt_decode(tile->codes + r * tile->stride, (uint8_t *)(tile->words + r * width), room_end,
                  tile->cols, bits);
}

static inline void qt_pack_streams(const qt_packing *p, qt_tile *tile, int bits)
{
    int64_t count, width = tile->stride * bits / 32;
    uint8_t *room = (uint8_t *)tile->words;
    for (int64_t r = 0; p->layout != QT_COLUMNS && r < tile->rows; r++) {
        uint8_t *words = qt_tile_words(p, tile, tile->row + r, &count);
        qt_encode(room, tile->codes + r * tile->stride, tile->cols, bits);
        if (p->layout == QT_PADDED) {
            int64_t vectors = (tile->cols + STREAM_CODES - 1) / STREAM_CODES;
            memset(room + vectors * STREAM_CODES / 8 * bits, 0, 8);
            qt_stretch(words, room, count, bits);
        } else {
            memcpy(words, room, 4 * (size_t)count);
        }
    }
    if (p->layout != QT_COLUMNS)
        return;
    (void)qt_tile_words(p, tile, 0, &count);
    for (int64_t r = 0; r < tile->rows; r++)
        qt_encode(room + 4 * r * width, tile->codes + r * tile->stride, tile->cols, bits);
    uint8_t *to = (uint8_t *)p->words + 4 * (tile->col * bits / 32 * p->rows + tile->row);
    qt_transpose_back(to, p->rows, tile->words, width, count, tile->rows);
}

/* Codes past the tile's columns come out as anything. */
static inline void qt_unpack_tile(const qt_packing *p, qt_tile *tile)
{
    if (p->layout == QT_ACROSS) {
        qt_unpack_across(p, tile);
        return;
    }
    if (p->layout == QT_STRIPS) {
        qt_strips(p, tile, 0);
        return;
    }
#define QT_UNPACK(bits) qt_unpack_streams(p, tile, bits)
    QT_FOR_BITS(p->bits, QT_UNPACK)
#undef QT_UNPACK
}

/* Codes past the tile's columns must be zero. */
static inline void qt_pack_tile(const qt_packing *p, qt_tile *tile)
{
    if (p->layout == QT_ACROSS) {
        qt_pack_across(p, tile);
        return;
    }
    if (p->layout == QT_STRIPS) {
        qt_strips(p, tile, 1);
        return;
    }
#define QT_PACK(bits) qt_pack_streams(p, tile, bits)
    QT_FOR_BITS(p->bits, QT_PACK)
#undef QT_PACK
}

/* Whether the layout cannot be read with these sizes. */
static inline int qt_packing_refused(const qt_packing *p)
{
    if (p->layout < QT_ROWS || p->layout > QT_STRIPS || p->bits < 2 || p->bits > 8)
        return 1;
    if (p->rows < 1 || p->cols < 1 || p->first < 0 || p->last > p->rows || p->origin > p->first)
        return 1;
    if (p->layout == QT_STRIPS)
        return p->bits != 4 || p->cols % 64 || p->rows % 4 || p->first % 4 || p->last % 4;
    if (p->layout != QT_ACROSS)
        return 0;
    int places = 0;
    for (int i = 0; i < 8; i++)
        places |= p->order[i] < 8 ? 1 << p->order[i] : 0;
    return p->bits != 4 || p->rows % 8 || p->first % 8 || p->last % 8 || places != 255;
}

static inline int64_t qt_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* Calls `body` for every tile of the rows asked for. */
#define QT_FOR_TILES(p, tile, body)                                                            \
    qt_shape(p, &(tile));                                                                      \
    for ((tile).row = (p)->first; (tile).row < (p)->last; (tile).row += (tile).max_rows) {     \
        (tile).rows = qt_least((p)->last - (tile).row, (tile).max_rows);                       \
        for ((tile).col = 0; (tile).col < (p)->cols; (tile).col += (tile).stride) {            \
            (tile).cols = qt_least((p)->cols - (tile).col, (tile).stride);                     \
            body;                                                                              \
        }                                                                                      \
    }

#endif
