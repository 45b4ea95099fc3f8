/* Encodes iq4_nl, iq4_xs, mxfp4, nvfp4, tq1_0, tq2_0, q1_0 and q2_0. */
#include "gguf_encode.h"
#include "gguf_encode_book_body.h"

int QT_NAME(gguf_encode_book)(int32_t type, int64_t rows, int64_t cols, const float *x,
                              const float *importance, uint8_t *to)
{
    switch (type) {
    case 20:
        encode_panels(encode_iq4_nl, 32, 18, rows, cols, x, importance, NULL, to);
        break;
    case 23:
        encode_panels(encode_iq4_xs, 256, 136, rows, cols, x, importance, NULL, to);
        break;
    case 34:
        encode_panels(encode_tq1_0, 256, 54, rows, cols, x, NULL, NULL, to);
        break;
    case 35:
        encode_panels(encode_tq2_0, 256, 66, rows, cols, x, NULL, NULL, to);
        break;
    case 39:
        encode_panels(encode_mxfp4, 32, 17, rows, cols, x, NULL, NULL, to);
        break;
    case 40:
        encode_panels(encode_nvfp4, 64, 36, rows, cols, x, NULL, NULL, to);
        break;
    case 41:
        encode_panels(encode_q1_0, 128, 18, rows, cols, x, NULL, NULL, to);
        break;
    case 42:
        encode_panels(encode_q2_0, 64, 18, rows, cols, x, NULL, NULL, to);
        break;
    default:
        return QT_E_ARGUMENT;
    }
    return QT_OK;
}
