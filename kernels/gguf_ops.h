/* The kernels of GGUF blocks, as rows of the table in ops.h.
 *
 * gguf_dequantize: `blocks` blocks of `type` (gguf_types.h) to `dtype` (QT_SCALE_*).
 * gguf_encode: rows * cols finite weights x to blocks of `type`, which must divide cols; importance
 * of each column or NULL. */
#ifndef QTOOL_GGUF_OPS_H
#define QTOOL_GGUF_OPS_H

#define QT_GGUF_OPS(X)                                                                          \
    X(gguf_dequantize,                                                                          \
      (int32_t type, int32_t dtype, int64_t blocks, const uint8_t *from, void *to),             \
      (type, dtype, blocks, from, to))                                                          \
    X(gguf_encode,                                                                              \
      (int32_t type, int64_t rows, int64_t cols, const float *x, const float *importance,       \
       uint8_t *to),                                                                            \
      (type, rows, cols, x, importance, to))

#endif
