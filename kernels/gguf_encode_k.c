/* Encodes q2_k, q4_k and q5_k. */
#include "gguf_encode.h"
#include "gguf_encode_k_body.h"

int QT_NAME(gguf_encode_k)(int32_t type, int64_t rows, int64_t cols, const float *x,
                           const float *importance, uint8_t *to)
{
    switch (type) {
    case 10:
        encode_panels(encode_q2_k, 256, 84, rows, cols, x, importance, NULL, to);
        return QT_OK;
    case 12:
        encode_panels(encode_q4_k, 256, 144, rows, cols, x, importance, NULL, to);
        return QT_OK;
    case 13:
        encode_panels(encode_q5_k, 256, 176, rows, cols, x, importance, NULL, to);
        return QT_OK;
    }
    return QT_E_ARGUMENT;
}
