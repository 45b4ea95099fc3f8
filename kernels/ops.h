/* The table of kernels: X(name, parameters, arguments). Every one exists for each instruction set
 * as name_ISA, is reached through the table that dispatch.c chose, and is exported as qt_name. */
#ifndef QTOOL_OPS_H
#define QTOOL_OPS_H

#include "gguf_ops.h"
#include "qtool_kernels.h"

#define QT_OPS(X)                                                          \
    X(gptq_sweep_f32, (const qt_sweep *sweep), (sweep))                    \
    X(gptq_sweep_f64, (const qt_sweep *sweep), (sweep))                    \
    X(quantize_groups, (const qt_groups *groups), (groups))                \
    X(pack, (const qt_packing *packing), (packing))                        \
    X(unpack, (const qt_packing *packing), (packing))                      \
    X(dequantize, (const qt_dequantizing *dequantizing), (dequantizing))   \
    X(dequantize_bytes, (const qt_bytes *bytes), (bytes))                  \
    X(dequantize_fp4, (const qt_fp4 *fp4), (fp4))                          \
    X(round_floats, (const qt_small_floats *floats), (floats))             \
    X(plain, (const uint8_t *from, int64_t bytes, uint8_t *to, int64_t room, int32_t streaming), \
      (from, bytes, to, room, streaming))                                  \
    X(convert, (int32_t from, int32_t to, int64_t count, const void *source, void *target), \
      (from, to, count, source, target))                                   \
    X(checksum, (uint64_t seed, int64_t count, const void *from, uint64_t *to), \
      (seed, count, from, to))                                             \
    X(squares, (int64_t count, const float *x, const float *y, double *to), (count, x, y, to)) \
    QT_GGUF_OPS(X)

#define QT_DECLARE(name, parameters, isa) int name##_##isa parameters;

#define QT_DECLARE_SCALAR(name, parameters, arguments) QT_DECLARE(name, parameters, scalar)
QT_OPS(QT_DECLARE_SCALAR)
#if defined(__x86_64__)
#define QT_DECLARE_AVX2(name, parameters, arguments) QT_DECLARE(name, parameters, avx2)
#define QT_DECLARE_AVX512(name, parameters, arguments) QT_DECLARE(name, parameters, avx512)
QT_OPS(QT_DECLARE_AVX2)
QT_OPS(QT_DECLARE_AVX512)
#elif defined(__aarch64__)
#define QT_DECLARE_NEON(name, parameters, arguments) QT_DECLARE(name, parameters, neon)
QT_OPS(QT_DECLARE_NEON)
#endif

#endif
