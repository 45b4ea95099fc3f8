/* Codes to words and back. */
#include "ops.h"
#include "tiles.h"

static void unpack(const qt_packing *p, qt_tile *tile)
{
    qt_unpack_tile(p, tile);
    for (int64_t r = 0; r < tile->rows; r++)
        memcpy(p->codes + (tile->row - p->origin + r) * p->cols + tile->col,
               tile->codes + r * tile->stride, (size_t)tile->cols);
}

/* Returns the union of the codes' bits. */
static uint8_t pack(const qt_packing *p, qt_tile *tile)
{
    uint8_t seen = 0;
    for (int64_t r = 0; r < tile->rows; r++) {
        uint8_t *codes = tile->codes + r * tile->stride;
        memcpy(codes, p->codes + (tile->row - p->origin + r) * p->cols + tile->col,
               (size_t)tile->cols);
        memset(codes + tile->cols, 0, (size_t)(tile->stride - tile->cols));
        for (int64_t k = 0; k < tile->stride; k++)
            seen |= codes[k];
    }
    if (seen >> p->bits == 0)
        qt_pack_tile(p, tile);
    return seen;
}

int QT_NAME(unpack)(const qt_packing *p)
{
    qt_tile tile;
    if (qt_packing_refused(p))
        return QT_E_ARGUMENT;
    QT_FOR_TILES(p, tile, unpack(p, &tile))
    return QT_OK;
}

/* QT_E_ARGUMENT where a code does not fit; words of earlier tiles are written by then. */
int QT_NAME(pack)(const qt_packing *p)
{
    qt_tile tile;
    if (qt_packing_refused(p))
        return QT_E_ARGUMENT;
    QT_FOR_TILES(p, tile, if (pack(p, &tile) >> p->bits) return QT_E_ARGUMENT)
    return QT_OK;
}
