/* Encodes iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s. */
#include "gguf_encode.h"
#include "gguf_encode_lattice_body.h"

int QT_NAME(gguf_encode_lattice)(int32_t type, int64_t rows, int64_t cols, const float *x,
                                 const float *importance, uint8_t *to)
{
    static const struct {
        int type, which, bytes;
        block_encoder *encode;
    } all[5] = {
        {16, QT_IQ2_XXS, 66, encode_iq2_xxs}, {17, QT_IQ2_XS, 74, encode_iq2_xs},
        {18, QT_IQ3_XXS, 98, encode_iq3_xxs}, {21, QT_IQ3_S, 110, encode_iq3_s},
        {22, QT_IQ2_S, 82, encode_iq2_s},
    };
    for (int k = 0; k < 5; k++) {
        if (all[k].type != type)
            continue;
        if (type <= 17 && !importance)
            return QT_E_ARGUMENT;
        if (!gguf_lattice_of(all[k].which))
            return QT_E_MEMORY;
        encode_panels(all[k].encode, 256, all[k].bytes, rows, cols, x, importance, NULL, to);
        return QT_OK;
    }
    return QT_E_ARGUMENT;
}
