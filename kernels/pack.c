/* Codes to words and back. */
#include "ops.h"
#include "tiles.h"

static void unpack(const qt_packing *p, qt_tile *tile)
{
    qt_unpack_tile(p, tile);
    for (int64_t r = 0; r < tile->rows; r++)
        memcpy(p->codes + (tile->row + r) * p->cols + tile->col, tile->codes[r],
               (size_t)tile->cols);
}

/* Returns the union of the codes' bits. */
static uint8_t pack(const qt_packing *p, qt_tile *tile)
{
    uint8_t seen = 0;
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t *codes = tile->codes[r];
        memcpy(codes, p->codes + (tile->row + r) * p->cols + tile->col, (size_t)tile->cols);
        memset(codes + tile->cols, 0, (size_t)(TILE_COLS - tile->cols));
        for (int64_t k = 0; k < TILE_COLS; k++)
            seen |= codes[k];
    }
    if (seen >> p->bits == 0)
        qt_pack_tile(p, tile);
    return seen;
}

static int refuses(const qt_packing *p)
{
    if (p->bits < 2 || p->bits > 8 || p->first < 0 || p->last > p->rows || p->cols < 1)
        return 1;
    if (p->layout == QT_ACROSS) {
        int places = 0;
        for (int i = 0; i < 8; i++)
            places |= p->order[i] < 8 ? 1 << p->order[i] : 0;
        return p->bits != 4 || p->rows % 8 || p->first % 8 || p->last % 8 || places != 255;
    }
    return p->layout != QT_ROWS && p->layout != QT_COLUMNS;
}

int QT_NAME(unpack)(const qt_packing *p)
{
    qt_tile tile;
    if (refuses(p))
        return QT_E_ARGUMENT;
    QT_FOR_TILES(p, tile, unpack(p, &tile))
    return QT_OK;
}

/* QT_E_ARGUMENT where a code does not fit; words of earlier tiles are written by then. */
int QT_NAME(pack)(const qt_packing *p)
{
    qt_tile tile;
    if (refuses(p))
        return QT_E_ARGUMENT;
    QT_FOR_TILES(p, tile, if (pack(p, &tile) >> p->bits) return QT_E_ARGUMENT)
    return QT_OK;
}
