/* Packed codes to floats: value = (code - zero) * scale. The difference has at most 9 bits and a
 * float16 scale 11, so the product is exact in float32 and no instruction set can differ. */
#include "ops.h"
#include "half.h"
#include "tiles.h"

static inline void emit(const qt_dequantizing *d, const qt_tile *tile, int dtype)
{
    const qt_packing *p = &d->packing;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t row = tile->row + r;
        const float *scales = d->scale + row * d->groups;
        const uint8_t *zeros = d->zero + row * d->groups;
        for (int64_t k = 0; k < tile->cols; k += QT_F32_LANES) {
            int64_t col = tile->col + k, rest = tile->cols - k;
            size_t count = (size_t)(rest < QT_F32_LANES ? rest : QT_F32_LANES);
            qt_vf32 scale, zero;
            qt_vu8x4 codes;
            memcpy(&codes, tile->codes[r] + k, sizeof codes);
            int64_t group = d->g_idx ? -1 : col / d->group_size;
            if (group >= 0 && (col + (int64_t)count - 1) / d->group_size == group) {
                scale = (qt_vf32){0} + scales[group];
                zero = (qt_vf32){0} + (float)zeros[group];
            } else {
                scale = zero = (qt_vf32){0};
                for (int64_t lane = 0; lane < (int64_t)count; lane++) {
                    int64_t g = d->g_idx ? d->g_idx[col + lane] : (col + lane) / d->group_size;
                    scale[lane] = scales[g];
                    zero[lane] = (float)zeros[g];
                }
            }
            qt_vi32 wide = __builtin_convertvector(codes, qt_vi32);
            qt_vf32 value = (__builtin_convertvector(wide, qt_vf32) - zero) * scale;
            qt_write(d->values, row * p->cols + col, dtype, count, value);
        }
    }
}

static void dequantize_tile(const qt_dequantizing *d, qt_tile *tile)
{
    qt_unpack_tile(&d->packing, tile);
    if (d->dtype == QT_F32)
        emit(d, tile, QT_F32);
    else if (d->dtype == QT_F16)
        emit(d, tile, QT_F16);
    else
        emit(d, tile, QT_BF16);
}

int QT_NAME(dequantize)(const qt_dequantizing *d)
{
    qt_tile tile;
    if (d->dtype < QT_F32 || d->dtype > QT_BF16 || d->group_size < 1)
        return QT_E_ARGUMENT;
    QT_FOR_TILES(&d->packing, tile, dequantize_tile(d, &tile))
    return QT_OK;
}
