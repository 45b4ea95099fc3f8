/* The kernels of GGUF blocks, as rows of the table in ops.h.
 *
 * gguf_dequantize: `blocks` blocks of `type` (gguf_types.h) to `dtype` (QT_SCALE_*).
 * gguf_encode: rows * cols finite weights x to blocks of `type`, which must divide cols; importance
 * of each column or NULL.
 * gguf_convert: rows of one type to another, and what that loses. */
#ifndef QTOOL_GGUF_OPS_H
#define QTOOL_GGUF_OPS_H

#include <stdint.h>

/* Types of plain numbers, beside those of gguf_types.h. */
enum { QT_GGUF_F32 = 0, QT_GGUF_F16 = 1, QT_GGUF_BF16 = 30 };

typedef struct {
    int32_t from_type, to_type;
    int64_t rows, cols, step;  /* step: rows at a time */
    const uint8_t *from;       /* [rows] of from_type */
    uint8_t *to;               /* [rows] of to_type, or NULL: only `size` is wanted */
    const float *importance;   /* [cols] or NULL */
    float *values, *back;      /* room for [step, cols] each */
    double size;               /* out: sum of squared weights; where it is not finite, one of them
                                * is not, and nothing behind it was encoded */
    double lost;               /* out: sum of squared differences */
} qt_gguf_piece;

#define QT_GGUF_OPS(X)                                                                          \
    X(gguf_dequantize,                                                                          \
      (int32_t type, int32_t dtype, int64_t blocks, const uint8_t *from, void *to),             \
      (type, dtype, blocks, from, to))                                                          \
    X(gguf_encode,                                                                              \
      (int32_t type, int64_t rows, int64_t cols, const float *x, const float *importance,       \
       uint8_t *to),                                                                            \
      (type, rows, cols, x, importance, to))                                                    \
    X(gguf_convert, (qt_gguf_piece * piece), (piece))

#endif
