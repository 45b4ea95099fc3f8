/* Codes to words and back. */
#include "ops.h"
#include "tiles.h"

static uint8_t *codes_at(const qt_packing *p, const qt_tile *tile, int64_t row)
{
    return p->codes + (tile->row - p->origin + row) * p->cols + tile->col;
}

static void unpack(const qt_packing *p, qt_tile *tile)
{
    qt_read_words(p, tile, 0, 1);
    for (int64_t row = 0; row < tile->rows; row += tile->together) {
#define QT_UNPACK(bits) qt_unpack_rows(p, tile, row, bits)
        QT_FOR_BITS(p->bits, QT_UNPACK)
#undef QT_UNPACK
        for (int64_t r = 0; r < tile->together; r++)
            memcpy(codes_at(p, tile, row + r), tile->codes + r * tile->stride,
                   (size_t)tile->cols);
    }
}

/* Returns the union of the codes' bits; writes nothing where a code does not fit. */
static uint8_t pack(const qt_packing *p, qt_tile *tile)
{
    uint8_t seen = 0;
    for (int64_t row = 0; row < tile->rows; row += tile->together) {
        for (int64_t r = 0; r < tile->together; r++) {
            uint8_t *codes = tile->codes + r * tile->stride;
            memcpy(codes, codes_at(p, tile, row + r), (size_t)tile->cols);
            memset(codes + tile->cols, 0, (size_t)(tile->stride - tile->cols));
            for (int64_t k = 0; k < tile->stride; k++)
                seen |= codes[k];
        }
        if (seen >> p->bits)
            return seen;
#define QT_PACK(bits) qt_pack_rows(p, tile, row, bits)
        QT_FOR_BITS(p->bits, QT_PACK)
#undef QT_PACK
    }
    qt_write_words(p, tile);
    return seen;
}

int QT_NAME(unpack)(const qt_packing *p)
{
    qt_tile tile;
    if (qt_packing_refused(p))
        return QT_E_ARGUMENT;
    uint32_t *space = qt_tile_space(1);
    if (!space)
        return QT_E_MEMORY;
    for (qt_first_tile(p, &tile, space); tile.rows; qt_next_tile(p, &tile))
        unpack(p, &tile);
    free(space);
    return QT_OK;
}

/* QT_E_ARGUMENT where a code does not fit; words before it are written by then. */
int QT_NAME(pack)(const qt_packing *p)
{
    qt_tile tile;
    int seen = 0;
    if (qt_packing_refused(p))
        return QT_E_ARGUMENT;
    uint32_t *space = qt_tile_space(1);
    if (!space)
        return QT_E_MEMORY;
    for (qt_first_tile(p, &tile, space); tile.rows && !(seen >> p->bits); qt_next_tile(p, &tile))
        seen |= pack(p, &tile);
    free(space);
    return seen >> p->bits ? QT_E_ARGUMENT : QT_OK;
}
