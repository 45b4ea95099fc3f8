/* The kernels of GGUF blocks, as rows of the table in ops.h.
 *
 * gguf_dequantize: `blocks` blocks of `type` (gguf_types.h) to `dtype` (QT_SCALE_*). */
#ifndef QTOOL_GGUF_OPS_H
#define QTOOL_GGUF_OPS_H

#define QT_GGUF_OPS(X)                                                                          \
    X(gguf_dequantize,                                                                          \
      (int32_t type, int32_t dtype, int64_t blocks, const uint8_t *from, void *to),             \
      (type, dtype, blocks, from, to))

#endif
