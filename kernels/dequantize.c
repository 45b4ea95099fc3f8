/* Packed codes to floats: value = (code - zero) * scale. The difference has at most 9 bits, so it
 * is exact in float32 and the product rounds once: no instruction set can differ. */
#include "gguf_books.h"
#include "ops.h"
#include "put.h"
#include "tiles.h"



/* Of each column of a tile, where groups do not follow whole vectors. */
typedef struct {
    float scale[1024], zero[1024];
} qt_columns;

#define QT_BODY "dequantize_body.h"
#include "each_dtype.h"

int QT_NAME(dequantize)(const qt_dequantizing *d)
{
    if (qt_packing_refused(&d->packing) || d->group_size < 1 || d->groups < 1)
        return QT_E_ARGUMENT;
    switch (d->dtype) {
    case QT_F32:
        return dequantize_f32(d);
    case QT_F16:
        return dequantize_f16(d);
    case QT_BF16:
        return dequantize_bf16(d);
    }
    return QT_E_ARGUMENT;
}
