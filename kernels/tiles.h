/* Tiles of codes between a matrix and its packed words, for pack.c and dequantize.c. */
#ifndef QTOOL_TILES_H
#define QTOOL_TILES_H

#include "qtool_kernels.h"
#include "streams.h"
#include "transpose.h"

#include <stdlib.h>

static inline int64_t qt_least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A tile has `max_rows` rows of `stride` codes. Of those, `together` are decoded at a time: few
 * enough that what is computed from them is still on its way to memory when the next are decoded.
 * Vectors may be read and written past the last code by less than the slack. */
enum { TILE_CODES = 2048, TILE_WORDS = 16384, TILE_SLACK = 64, LINE_WORDS = 16 };

/* Where the words of a transposed tile lie in the file: `count` rows of `across` words, a stride
 * apart; a row of the tile has room for `room` of them. Zero across for the other layouts. */
typedef struct {
    uint8_t *file;
    int64_t stride, count, across, room;
} qt_area;

/* Where a tile's words are being read: in squares of a cache line by as many word rows, of which
 * `wide` lie beside each other. */
typedef struct {
    qt_area area;
    uint32_t wide, squares, read;
    /* The lines of the squares below: the next to fetch, where in its square it is, which of the
     * squares beside each other that is, how many were to be fetched up to now, and are left. */
    uintptr_t line;
    uint32_t line_row, line_square, lines, left;
} qt_reading;

typedef struct {
    int64_t row, rows, col, cols; /* where the tile lies and what of it is used */
    int64_t max_rows, stride, together;
    qt_reading reading;                     /* for QT_COLUMNS and QT_ACROSS */
    uint32_t *words;                        /* TILE_WORDS and the slack */
    uint8_t codes[TILE_CODES + TILE_SLACK]; /* [together, stride] */
} qt_tile;

/* A cache line of neighbours where words must be transposed. 960 is a multiple of the codes in a
 * padded word for every width. */
static inline void qt_shape(const qt_packing *p, qt_tile *tile)
{
    static const int16_t shapes[][3] = {
        {1, 1024, 1}, {64, 1024, 1}, {512, 256, 8}, {1, 960, 1}, {4, 512, 4}};
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

/* The codes of padded words. Writes up to sixteen bytes past the last. Every word's codes are
 * spread over eight bytes (two and three bits: twice); those it does not have are written over. */
static inline __attribute__((always_inline)) void qt_decode_padded(uint8_t *codes,
                                                                   const uint8_t *words,
                                                                   int64_t count, int bits)
{
    typedef uint32_t words_of_a_vector __attribute__((vector_size(QT_VECTOR_BYTES / 2)));
    const int each = 32 / bits;
    int64_t w = 0;
    for (; bits == 7 && w + QT_F32_LANES <= count; w += QT_F32_LANES) {
        qt_vu32 x;
        memcpy(&x, words + 4 * w, sizeof x);
        x = (x & 0x7f) | (x << 1 & 0x7f00) | (x << 2 & 0x7f0000) | (x << 3 & 0x7f000000);
        memcpy(codes + 4 * w, &x, sizeof x);
    }
    for (; w + QT_F64_LANES <= count; w += QT_F64_LANES) {
        words_of_a_vector some;
        memcpy(&some, words + 4 * w, sizeof some);
        qt_vu64 x = __builtin_convertvector(some, qt_vu64);
        qt_vu64 first = qt_spread_codes(x, bits), rest = qt_spread_codes(x >> 8 * bits % 32, bits);
        uint64_t eight[2][QT_F64_LANES];
        memcpy(eight[0], &first, sizeof first);
        memcpy(eight[1], &rest, sizeof rest);
        QT_UNROLL
        for (int lane = 0; lane < QT_F64_LANES; lane++) {
            uint8_t *to = codes + (w + lane) * each;
            memcpy(to, &eight[0][lane], 8);
            if (each > 8)
                memcpy(to + 8, &eight[1][lane], (size_t)each - 8);
        }
    }
    for (; w < count; w++) {
        uint32_t word;
        memcpy(&word, words + 4 * w, 4);
        for (int i = 0; i < each; i++)
            codes[w * each + i] = (uint8_t)(word >> bits * i & qt_low_bits(bits, 64));
    }
}

/* The words of a stream of codes, `32 / bits` of them in each. */
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
static inline __attribute__((always_inline)) void qt_unpack_rows(const qt_packing *p, qt_tile *tile,
                                                                 int64_t row, int bits)
{
    int64_t count;
    const uint8_t *stream = qt_tile_words(p, tile, tile->row + row, &count);
    const uint8_t *end = (const uint8_t *)(tile->words + TILE_WORDS + TILE_SLACK / 4);
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
    case QT_PADDED: /* decoded by qt_read_words */
        return;
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
        for (int64_t end = vectors * STREAM_CODES / 8 * bits; end < 4 * count; end++)
            room[end] = 0;
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

static inline qt_area qt_area_of(const qt_packing *p, const qt_tile *tile)
{
    qt_area area = {p->words, 0, 0, 0, 0};
    if (p->layout == QT_COLUMNS) {
        (void)qt_tile_words(p, tile, 0, &area.count);
        area.stride = p->rows;
        area.across = tile->rows;
        area.room = tile->stride * p->bits / 32;
        area.file += 4 * (tile->col * p->bits / 32 * area.stride + tile->row);
    } else if (p->layout == QT_ACROSS) {
        area.count = tile->cols;
        area.stride = p->rows / 8;
        area.across = tile->rows / 8;
        area.room = tile->stride;
        area.file += 4 * (tile->col * area.stride + tile->row / 8);
    }
    return area;
}

/* Before the first words of a tile are read. */
static inline void qt_begin_reading(const qt_packing *p, qt_tile *tile)
{
    qt_reading *r = &tile->reading;
    *r = (qt_reading){0};
    if (!tile->rows || (p->layout != QT_COLUMNS && p->layout != QT_ACROSS))
        return;
    r->area = qt_area_of(p, tile);
    r->wide = (uint32_t)(r->area.across + LINE_WORDS - 1) / LINE_WORDS;
    r->squares = r->wide * ((uint32_t)(r->area.count + LINE_WORDS - 1) / LINE_WORDS);
    r->line = (uintptr_t)r->area.file + (uintptr_t)(4 * LINE_WORDS * r->area.stride);
}

/* Fetches up to `count` more of the lines that are to be read next. Below a tile's last squares
 * lies the next tile, or nothing, which does no harm. */
static inline void qt_fetch_lines(qt_reading *r, uint32_t count)
{
    uintptr_t stride = (uintptr_t)(4 * r->area.stride);
    for (; count && r->left; count--, r->left--) {
        __builtin_prefetch((const void *)r->line);
        r->line += stride;
        if (++r->line_row < LINE_WORDS)
            continue;
        r->line_row = 0;
        r->line += 4 * LINE_WORDS - LINE_WORDS * stride;
        if (++r->line_square < r->wide)
            continue;
        r->line_square = 0;
        r->line += LINE_WORDS * stride - 4 * LINE_WORDS * r->wide;
    }
}

/* How many of them while a run of transposed codes is put: as many as hold such a run. */
static inline uint32_t qt_lines_of(int64_t run, int bits)
{
    return (uint32_t)((run * bits + 32 * LINE_WORDS - 1) / (32 * LINE_WORDS));
}

/* Reads part `part` of `parts` of a tile's words. The squares below them are to be fetched
 * meanwhile: the words lie so far apart that the processor does not see it coming. They are fetched
 * by qt_fetch_lines, a few at a time between the stores of what was read before: all at once, they
 * and the stores would wait for each other. A whole tile, which has no such stores, fetches them
 * here.
 *
 * Padded words, which have one row to a tile, are decoded here: their codes are written in pieces
 * of eight, which wide loads find only once they have reached the cache. */
static inline void qt_read_words(const qt_packing *p, qt_tile *tile, int64_t part, int64_t parts)
{
    if (p->layout == QT_PADDED) {
        int64_t count = 0;
        const uint8_t *words = qt_tile_words(p, tile, tile->row, &count);
#define QT_DECODE(bits) qt_decode_padded(tile->codes, words, count, bits)
        if (part == 0 && tile->rows)
            QT_FOR_BITS(p->bits, QT_DECODE)
#undef QT_DECODE
        return;
    }
    qt_reading *r = &tile->reading;
    if (!r->squares)
        return;
    const qt_area *area = &r->area;
    uint32_t done = (uint32_t)part + 1, of = (uint32_t)parts;
    uint32_t lines = done * r->squares * LINE_WORDS / of;
    r->left += lines - r->lines;
    r->lines = lines;
    for (uint32_t end = lines / LINE_WORDS; r->read < end; r->read++) {
        int64_t w = r->read / r->wide * LINE_WORDS, at = r->read % r->wide * LINE_WORDS;
        if (parts == 1)
            qt_fetch_lines(r, LINE_WORDS);
        const uint8_t *from = area->file + 4 * (w * area->stride + at);
        qt_transpose(tile->words + at * area->room + w, area->room, from, area->stride,
                     qt_least(area->count - w, LINE_WORDS),
                     qt_least(area->across - at, LINE_WORDS));
    }
}

static inline void qt_write_words(const qt_packing *p, const qt_tile *tile)
{
    qt_area area = qt_area_of(p, tile);
    if (area.across)
        qt_transpose_back(area.file, area.stride, tile->words, area.room, area.count, area.across);
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

/* The first tile of the rows asked for, and the one after a tile; no rows where there is none. */
static inline void qt_place_tile(const qt_packing *p, qt_tile *tile, int64_t row, int64_t col)
{
    if (col >= p->cols) {
        row += tile->max_rows;
        col = 0;
    }
    tile->row = row;
    tile->col = col;
    tile->rows = row < p->last ? qt_least(p->last - row, tile->max_rows) : 0;
    tile->cols = qt_least(p->cols - col, tile->stride);
    qt_begin_reading(p, tile);
}

static inline void qt_first_tile(const qt_packing *p, qt_tile *tile, uint32_t *words)
{
    qt_shape(p, tile);
    tile->words = words;
    qt_place_tile(p, tile, p->first, 0);
}

static inline void qt_next_tile(const qt_packing *p, qt_tile *tile)
{
    qt_place_tile(p, tile, tile->row, tile->col + tile->stride);
}

/* Space for the words of `count` tiles, or NULL. */
static inline uint32_t *qt_tile_space(int count)
{
    return malloc((size_t)count * (TILE_WORDS + TILE_SLACK / 4) * sizeof(uint32_t));
}

#endif
