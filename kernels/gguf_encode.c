/* Encodes weights to GGUF blocks, byte for byte as ggml's reference encoders do. */
#include "gguf_encode.h"
#include "gguf_types.h"
#include "ops.h"

static int64_t block_weights(int32_t type)
{
    switch (type) {
#define CASE(name, number, weights, bytes) \
    case number:                           \
        return weights;
        QT_GGUF_TYPES(CASE)
#undef CASE
    }
    return 0;
}

int QT_NAME(gguf_encode)(int32_t type, int64_t rows, int64_t cols, const float *x,
                         const float *importance, uint8_t *to)
{
    int64_t weights = block_weights(type);
    if (!weights || rows < 0 || cols < 0 || cols % weights)
        return QT_E_ARGUMENT;
    if (!rows || !cols)
        return QT_OK;
    switch (type) {
    case 10:
    case 12:
    case 13:
        return QT_NAME(gguf_encode_k)(type, rows, cols, x, importance, to);
    case 2:
    case 3:
    case 6:
    case 7:
    case 8:
        return QT_NAME(gguf_encode_legacy)(type, rows, cols, x, importance, to);
    case 20:
    case 23:
    case 34:
    case 35:
    case 39:
    case 40:
    case 41:
    case 42:
        return QT_NAME(gguf_encode_book)(type, rows, cols, x, importance, to);
    case 16:
    case 17:
    case 18:
    case 21:
    case 22:
        return QT_NAME(gguf_encode_lattice)(type, rows, cols, x, importance, to);
    case 19:
    case 29:
        return QT_NAME(gguf_encode_iq1)(type, rows, cols, x, importance, to);
    case 11:
    case 14:
        return QT_NAME(gguf_encode_k_symmetric)(type, rows, cols, x, importance, to);
    }
    return QT_E_ARGUMENT;
}
