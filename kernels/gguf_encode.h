/* The encoders of GGUF blocks by family, one translation unit each; gguf_encode.c chooses. All take
 * rows * cols finite weights, the importance of each column or NULL, and room for the blocks. */
#ifndef QTOOL_GGUF_ENCODE_H
#define QTOOL_GGUF_ENCODE_H

#include "simd.h"

#define QT_GGUF_ENCODER(family)                                                          \
    int QT_NAME(gguf_encode_##family)(int32_t type, int64_t rows, int64_t cols,          \
                                      const float *x, const float *importance, uint8_t *to)

QT_GGUF_ENCODER(k); /* q2_k q4_k q5_k */
QT_GGUF_ENCODER(k_symmetric); /* q3_k q6_k */
QT_GGUF_ENCODER(iq1); /* iq1_s iq1_m */
QT_GGUF_ENCODER(lattice); /* iq2_xxs iq2_xs iq2_s iq3_xxs iq3_s */
QT_GGUF_ENCODER(legacy); /* q4_0 q4_1 q5_0 q5_1 q8_0 */
QT_GGUF_ENCODER(book); /* iq4_nl iq4_xs mxfp4 nvfp4 tq1_0 tq2_0 q1_0 q2_0 */

#endif
