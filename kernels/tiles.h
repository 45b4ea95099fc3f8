/* Tiles of codes between a matrix and its packed words, for pack.c and dequantize.c. */
#ifndef QTOOL_TILES_H
#define QTOOL_TILES_H

#include "qtool_kernels.h"
#include "simd.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed formats are read as little-endian words"
#endif

/* 16 words of AWQ across, one cache line; two words a bit of GPTQ along. */
enum { TILE_ROWS = 128, TILE_COLS = 64 };

typedef struct {
    int64_t row, rows, col, cols; /* where the tile lies and what of it is used */
    uint8_t codes[TILE_ROWS][TILE_COLS];
} qt_tile;

static inline uint64_t qt_low_bits(int count, int every)
{
    uint64_t mask = 0;
    for (int at = 0; at < 64; at += every)
        mask |= ((UINT64_C(1) << count) - 1) << at;
    return mask;
}

/* Eight codes, from 8 * bits bits to a byte each: halves move apart, then quarters, then codes. */
static inline uint64_t qt_spread_codes(uint64_t x, int bits)
{
    if (bits == 8)
        return x;
    uint64_t low = qt_low_bits(4 * bits, 64);
    x = (x & low) | ((x >> (4 * bits) & low) << 32);
    low = qt_low_bits(2 * bits, 32);
    x = (x & low) | ((x >> (2 * bits) & low) << 16);
    low = qt_low_bits(bits, 16);
    return (x & low) | ((x >> bits & low) << 8);
}

/* The inverse; bits of the bytes beyond a code must be zero. */
static inline uint64_t qt_gather_codes(uint64_t x, int bits)
{
    if (bits == 8)
        return x;
    uint64_t low = qt_low_bits(bits, 16);
    x = (x & low) | (x >> (8 - bits) & low << bits);
    low = qt_low_bits(2 * bits, 32);
    x = (x & low) | (x >> (16 - 2 * bits) & low << (2 * bits));
    low = qt_low_bits(4 * bits, 64);
    return (x & low) | (x >> (32 - 4 * bits) & low << (4 * bits));
}

static inline int64_t qt_row_words(const qt_packing *p)
{
    return (p->cols * p->bits + 31) / 32;
}

/* TILE_COLS codes of a row <-> the 2 * bits words they fill. */
static inline void qt_decode(uint8_t *codes, const uint8_t *stream, int bits)
{
    for (int run = 0; run < TILE_COLS / 8; run++) {
        uint64_t x = 0;
        memcpy(&x, stream + run * bits, (size_t)bits);
        x = qt_spread_codes(x, bits);
        memcpy(codes + run * 8, &x, 8);
    }
}

static inline void qt_encode(uint8_t *stream, const uint8_t *codes, int bits)
{
    for (int run = 0; run < TILE_COLS / 8; run++) {
        uint64_t x;
        memcpy(&x, codes + run * 8, 8);
        x = qt_gather_codes(x, bits);
        memcpy(stream + run * bits, &x, (size_t)bits);
    }
}

/* Constant widths, so that copies of `bits` bytes become moves. */
#define QT_FOR_BITS(bits, call) \
    switch (bits) {             \
    case 2: call(2); break;     \
    case 3: call(3); break;     \
    case 4: call(4); break;     \
    case 5: call(5); break;     \
    case 6: call(6); break;     \
    case 7: call(7); break;     \
    default: call(8); break;    \
    }

/* The words of a tile, one row after another; words beyond the end are zero. */
static inline void qt_words_of_tile(const qt_packing *p, const qt_tile *tile,
                                    uint32_t words[TILE_ROWS][16], int writing)
{
    int64_t total = qt_row_words(p), begin = tile->col * p->bits / 32;
    int64_t count = total - begin < 2 * p->bits ? total - begin : 2 * p->bits;
    for (int64_t r = 0; p->layout == QT_ROWS && r < tile->rows; r++) {
        uint32_t *at = p->words + (tile->row + r) * total + begin;
        if (writing) {
            memcpy(at, words[r], (size_t)count * 4);
        } else {
            memset(words[r], 0, sizeof words[r]);
            memcpy(words[r], at, (size_t)count * 4);
        }
    }
    for (int64_t w = 0; p->layout == QT_COLUMNS && w < 2 * p->bits; w++) {
        uint32_t *at = p->words + (begin + w) * p->rows + tile->row;
        for (int64_t r = 0; r < tile->rows; r++) {
            if (!writing)
                words[r][w] = w < count ? at[r] : 0;
            else if (w < count)
                at[r] = words[r][w];
        }
    }
}

/* Words across 8 rows each; a tile's rows are a multiple of 8. */
static inline void qt_across(const qt_packing *p, qt_tile *tile, int writing)
{
    int64_t width = p->rows / 8;
    uint32_t words[TILE_COLS];
    for (int64_t c = 0; c < tile->rows / 8; c++) {
        uint32_t *at = p->words + tile->col * width + tile->row / 8 + c;
        for (int64_t k = 0; k < TILE_COLS; k++)
            words[k] = writing || k >= tile->cols ? 0 : at[k * width];
        for (int i = 0; i < 8; i++) {
            uint8_t *codes = tile->codes[c * 8 + p->order[i]];
            if (writing)
                for (int64_t k = 0; k < TILE_COLS; k++)
                    words[k] |= (uint32_t)codes[k] << (4 * i);
            else
                for (int64_t k = 0; k < TILE_COLS; k++)
                    codes[k] = (uint8_t)(words[k] >> (4 * i) & 15);
        }
        for (int64_t k = 0; writing && k < tile->cols; k++)
            at[k * width] = words[k];
    }
}

static inline void qt_unpack_tile(const qt_packing *p, qt_tile *tile)
{
    if (p->layout == QT_ACROSS) {
        qt_across(p, tile, 0);
        return;
    }
    uint32_t words[TILE_ROWS][16];
    qt_words_of_tile(p, tile, words, 0);
#define QT_DECODE_ROWS(bits)                     \
    for (int64_t r = 0; r < tile->rows; r++)     \
        qt_decode(tile->codes[r], (const uint8_t *)words[r], bits)
    QT_FOR_BITS(p->bits, QT_DECODE_ROWS)
#undef QT_DECODE_ROWS
}

static inline void qt_pack_tile(const qt_packing *p, qt_tile *tile)
{
    if (p->layout == QT_ACROSS) {
        qt_across(p, tile, 1);
        return;
    }
    uint32_t words[TILE_ROWS][16];
#define QT_ENCODE_ROWS(bits)                     \
    for (int64_t r = 0; r < tile->rows; r++)     \
        qt_encode((uint8_t *)words[r], tile->codes[r], bits)
    QT_FOR_BITS(p->bits, QT_ENCODE_ROWS)
#undef QT_ENCODE_ROWS
    qt_words_of_tile(p, tile, words, 1);
}

/* Calls `body` for every tile of the rows asked for. */
#define QT_FOR_TILES(p, tile, body)                                                            \
    for ((tile).row = (p)->first; (tile).row < (p)->last; (tile).row += TILE_ROWS) {           \
        (tile).rows = (p)->last - (tile).row < TILE_ROWS ? (p)->last - (tile).row : TILE_ROWS; \
        for ((tile).col = 0; (tile).col < (p)->cols; (tile).col += TILE_COLS) {                \
            (tile).cols =                                                                      \
                (p)->cols - (tile).col < TILE_COLS ? (p)->cols - (tile).col : TILE_COLS;       \
            body;                                                                              \
        }                                                                                      \
    }

#endif
