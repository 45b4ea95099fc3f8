/* Encodes iq1_s and iq1_m (gguf_encode_iq1_body.h). */
#include "gguf_encode.h"
#include "gguf_encode_iq1_body.h"

int QT_NAME(gguf_encode_iq1)(int32_t type, int64_t rows, int64_t cols, const float *x,
                             const float *importance, uint8_t *to)
{
    if (type == 19 && !importance)
        return QT_E_ARGUMENT;
    if (!gguf_lattice_of(QT_IQ1))
        return QT_E_MEMORY;
    if (type == 19)
        encode_panels(encode_iq1_s, 256, 50, rows, cols, x, importance, NULL, to);
    else
        encode_panels(encode_iq1_m, 256, 56, rows, cols, x, importance, NULL, to);
    return QT_OK;
}
