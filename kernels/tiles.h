/* Tiles of codes between a matrix and its packed words, for pack.c and dequantize.c. */
#ifndef QTOOL_TILES_H
#define QTOOL_TILES_H

#include "qtool_kernels.h"
#include "streams.h"
#include "transpose.h"

/* A tile has `max_rows` rows of `stride` codes. Of those, `together` are decoded at a time: few
 * enough that what is computed from them is still on its way to memory when the next are decoded.
 * Vectors may be read and written past the last code by less than the slack. */
enum { TILE_CODES = 2048, TILE_WORDS = 16384, TILE_SLACK = 64 };

typedef struct {
    int64_t row, rows, col, cols; /* where the tile lies and what of it is used */
    int64_t max_rows, stride, together;
    uint8_t codes[TILE_CODES + TILE_SLACK]; /* [together, stride] */
    uint32_t words[TILE_WORDS + TILE_SLACK / 4];
} qt_tile;

/* A cache line of neighbours where words must be transposed. 960 is a multiple of the codes in a
 * padded word for every width. */
static inline void qt_shape(const qt_packing *p, qt_tile *tile)
{
    static const int16_t shapes[][3] = {
        {1, 1024, 1}, {64, 1024, 1}, {512, 256, 8}, {1, 960, 1}, {4, 256, 4}};
    tile->max_rows = shapes[p->layout][0];
    tile->stride = shapes[p->layout][1];
    tile->together = shapes[p->layout][2];
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

/* Nibble i of the words [cols, rows / 8] is row 8c + order[i]. Eight rows. */
static inline void qt_unpack_across(const qt_packing *p, qt_tile *tile, int64_t row)
{
    const uint32_t *words = tile->words + row / 8 * tile->stride;
    for (int64_t k = 0; k < tile->cols; k += QT_F32_LANES) {
        qt_vu32 w;
        memcpy(&w, words + k, sizeof w);
        for (int i = 0; i < 8; i++) {
            qt_vu8x4 some = __builtin_convertvector(w >> 4 * i & 15, qt_vu8x4);
            memcpy(tile->codes + p->order[i] * tile->stride + k, &some, sizeof some);
        }
    }
}

static inline void qt_pack_across(const qt_packing *p, qt_tile *tile, int64_t row)
{
    uint32_t *words = tile->words + row / 8 * tile->stride;
    for (int64_t k = 0; k < tile->cols; k += QT_F32_LANES) {
        qt_vu32 w = {0};
        for (int i = 0; i < 8; i++) {
            qt_vu8x4 some;
            memcpy(&some, tile->codes + p->order[i] * tile->stride + k, sizeof some);
            w |= __builtin_convertvector(some, qt_vu32) << 4 * i;
        }
        memcpy(words + k, &w, sizeof w);
    }
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

/* One row of codes, or the few that share their words. */
static inline void qt_unpack_rows(const qt_packing *p, qt_tile *tile, int64_t row, int bits)
{
    int64_t count;
    const uint8_t *stream = qt_tile_words(p, tile, tile->row + row, &count);
    const uint8_t *end = (const uint8_t *)(&tile->words + 1);
    switch (p->layout) {
    case QT_ACROSS:
        qt_unpack_across(p, tile, row);
        return;
    case QT_STRIPS:
        qt_strips(p, tile, 0);
        return;
    case QT_ROWS:
        end = (const uint8_t *)p->words + 4 * qt_row_words(p) * p->rows;
        break;
    case QT_PADDED:
        qt_squeeze((uint8_t *)tile->words, stream, count, bits);
        stream = (const uint8_t *)tile->words;
        break;
    default:
        stream = (const uint8_t *)(tile->words + row * (tile->stride * bits / 32));
    }
    qt_decode(tile->codes, stream, end, tile->cols, bits);
}

/* The inverse. Codes past the tile's columns must be zero. */
static inline void qt_pack_rows(const qt_packing *p, qt_tile *tile, int64_t row, int bits)
{
    int64_t count, vectors = (tile->cols + STREAM_CODES - 1) / STREAM_CODES;
    uint8_t *words = qt_tile_words(p, tile, tile->row + row, &count), *room;
    switch (p->layout) {
    case QT_ACROSS:
        qt_pack_across(p, tile, row);
        return;
    case QT_STRIPS:
        qt_strips(p, tile, 1);
        return;
    case QT_COLUMNS:
        room = (uint8_t *)(tile->words + row * (tile->stride * bits / 32));
        qt_encode(room, tile->codes, tile->cols, bits);
        return;
    default:
        room = (uint8_t *)tile->words;
        qt_encode(room, tile->codes, tile->cols, bits);
        memset(room + vectors * STREAM_CODES / 8 * bits, 0, 8);
        if (p->layout == QT_PADDED)
            qt_stretch(words, room, count, bits);
        else
            memcpy(words, room, 4 * (size_t)count);
    }
}

/* Between the file and a tile's words, for the layouts that are transposed. */
static inline void qt_transpose_tile(const qt_packing *p, qt_tile *tile, int writing)
{
    int64_t count = tile->cols, across = tile->rows / 8, width = p->rows / 8, room = tile->stride;
    uint8_t *file = (uint8_t *)p->words + 4 * (tile->col * width + tile->row / 8);
    if (p->layout == QT_COLUMNS) {
        width = p->rows;
        across = tile->rows;
        room = tile->stride * p->bits / 32;
        (void)qt_tile_words(p, tile, 0, &count);
        file = (uint8_t *)p->words + 4 * (tile->col * p->bits / 32 * width + tile->row);
    } else if (p->layout != QT_ACROSS) {
        return;
    }
    if (writing)
        qt_transpose_back(file, width, tile->words, room, count, across);
    else
        qt_transpose(tile->words, room, file, width, count, across);
}

/* While rows of a tile are decoded, a share of the next tile's words is fetched: they lie so far
 * apart that the processor does not see it coming. Nothing is read, so it does no harm where there
 * is no next tile. */
static inline void qt_expect_words(const qt_packing *p, const qt_tile *tile, int64_t row)
{
    int64_t count = tile->stride, stride = p->rows / 8;
    int64_t at = (tile->col + count) * stride + tile->row / 8;
    if (p->layout == QT_COLUMNS) {
        count = tile->stride * p->bits / 32;
        stride = p->rows;
        at = (tile->col + tile->stride) * p->bits / 32 * stride + tile->row;
    } else if (p->layout != QT_ACROSS) {
        return;
    }
    if (tile->col + tile->stride >= p->cols) /* then the next rows', from the left */
        at = p->layout == QT_COLUMNS ? tile->row + tile->max_rows
                                     : (tile->row + tile->max_rows) / 8;
    uintptr_t begin = (uintptr_t)p->words + (uintptr_t)(4 * at);
    int64_t end = (row + tile->together) * count / tile->max_rows;
    int64_t lines = tile->max_rows / (p->layout == QT_COLUMNS ? 16 : 128);
    for (int64_t w = row * count / tile->max_rows; w < end; w++)
        for (int64_t line = 0; line < lines; line++)
            __builtin_prefetch((const void *)(begin + (uintptr_t)(4 * w * stride + 64 * line)));
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
