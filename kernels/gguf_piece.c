/* Rows of one GGUF type to another in one pass: to float32, encoded, and dequantized again to see
 * what was lost. A few rows at a time, so that they stay in the first caches from step to step. */
#include "gguf_types.h"
#include "ops.h"
#include "simd.h"

typedef struct {
    int64_t weights, bytes;
} extent;

static extent block_of(int32_t type)
{
    switch (type) {
    case QT_GGUF_F32:
        return (extent){1, 4};
    case QT_GGUF_F16:
    case QT_GGUF_BF16:
        return (extent){1, 2};
#define CASE(name, number, weights, bytes) \
    case number:                           \
        return (extent){weights, bytes};
        QT_GGUF_TYPES(CASE)
#undef CASE
    }
    return (extent){0, 0};
}

/* float32 of `count` stored weights, in `values` unless they are float32 already. */
static int floats(int32_t type, int64_t count, const uint8_t *from, float *values, const float **at)
{
    *at = values;
    switch (type) {
    case QT_GGUF_F32:
        *at = (const float *)from;
        return QT_OK;
    case QT_GGUF_F16:
        return QT_NAME(convert)(QT_F16, QT_F32, count, from, values);
    case QT_GGUF_BF16:
        return QT_NAME(convert)(QT_BF16, QT_F32, count, from, values);
    }
    return QT_NAME(gguf_dequantize)(type, QT_F32, count / block_of(type).weights, from, values);
}

static int encode(const qt_gguf_piece *piece, int64_t rows, const float *values, uint8_t *to)
{
    int64_t count = rows * piece->cols;
    switch (piece->to_type) {
    case QT_GGUF_F32:
        memcpy(to, values, (size_t)count * sizeof *values);
        return QT_OK;
    case QT_GGUF_F16:
        return QT_NAME(convert)(QT_F32, QT_F16, count, values, to);
    case QT_GGUF_BF16:
        return QT_NAME(convert)(QT_F32, QT_BF16, count, values, to);
    }
    return QT_NAME(gguf_encode)(piece->to_type, rows, piece->cols, values, piece->importance, to);
}

int QT_NAME(gguf_convert)(qt_gguf_piece *piece)
{
    extent from = block_of(piece->from_type), to = block_of(piece->to_type);
    int64_t rows = piece->rows, cols = piece->cols;
    if (rows < 0 || cols < 1 || piece->step < 1 || !from.weights || !to.weights ||
        cols % from.weights || cols % to.weights)
        return QT_E_ARGUMENT;
    int64_t from_row = cols / from.weights * from.bytes, to_row = cols / to.weights * to.bytes;
    double size = 0, lost = 0;
    int code = QT_OK;
    for (int64_t row = 0; row < rows && code == QT_OK; row += piece->step) {
        int64_t some = rows - row < piece->step ? rows - row : piece->step;
        const float *values, *back;
        double sum;
        code = floats(piece->from_type, some * cols, piece->from + row * from_row, piece->values,
                      &values);
        if (code == QT_OK)
            code = QT_NAME(squares)(some * cols, values, NULL, &sum);
        if (code != QT_OK)
            break;
        size += sum;
        if (!isfinite(size))
            break; /* encoders take finite weights only */
        if (!piece->to)
            continue;
        uint8_t *at = piece->to + row * to_row;
        code = encode(piece, some, values, at);
        if (code == QT_OK)
            code = floats(piece->to_type, some * cols, at, piece->back, &back);
        if (code == QT_OK)
            code = QT_NAME(squares)(some * cols, values, back, &sum);
        lost += code == QT_OK ? sum : 0;
    }
    piece->size = size;
    piece->lost = lost;
    return code;
}
