/* Encodes q3_k and q6_k. */
#include "gguf_encode.h"
#include "gguf_encode_k_symmetric_body.h"

int QT_NAME(gguf_encode_k_symmetric)(int32_t type, int64_t rows, int64_t cols, const float *x,
                                     const float *importance, uint8_t *to)
{
    switch (type) {
    case 11:
        encode_panels(encode_q3_k, 256, 110, rows, cols, x, importance, NULL, to);
        return QT_OK;
    case 14:
        encode_panels(encode_q6_k, 256, 210, rows, cols, x, importance, NULL, to);
        return QT_OK;
    }
    return QT_E_ARGUMENT;
}
