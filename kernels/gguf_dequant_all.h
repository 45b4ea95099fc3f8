/* Every block type for one output type: OUT, PUT, PUT2, D and perhaps
 * PAIR, as gguf_dequant.c sets them. Included once
 * for each; no include guard. A block function reads one block and writes its weights. */
#include "gguf_dequant_simple.h"
#include "gguf_dequant_k.h"
#include "gguf_dequant_iq.h"

static int D(dequantize)(int32_t type, int64_t blocks, const uint8_t *from, OUT *to)
{
    switch (type) {
#define CASE(name, number, weights, bytes)                                      \
    case number:                                                                \
        for (int64_t block = 0; block < blocks; block++)                        \
            D(name)(from + block * bytes, to + block * weights);                \
        return QT_OK;
        QT_GGUF_TYPES(CASE)
#undef CASE
    }
    return QT_E_ARGUMENT;
}
