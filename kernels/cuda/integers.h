/* The arithmetic of integer grids (grid_body.h) and of levels (nearest_body.h), one number a thread:
 * group_one, quantize_one, group_of_range_one, nearest_level_one. */
#ifndef QTOOL_CUDA_INTEGERS_H
#define QTOOL_CUDA_INTEGERS_H

#include "base.h"

namespace qt {

enum { QT_SCALE_F32, QT_SCALE_F16, QT_SCALE_BF16 };

/* What is read of the CPU's qt_quantizer. */
struct qt_quantizer {
    int32_t bits, symmetric, scale_dtype;
    float reach;
};

/* Both give b where a is a NaN. */
QT_HD float min_one(float a, float b) { return a < b ? a : b; }
QT_HD float max_one(float a, float b) { return a > b ? a : b; }
QT_HD float select_one(bool mask, float yes, float no) { return mask ? yes : no; }
QT_HD float splat_one(float x) { return x; }
QT_HD float round_one(float a) { return sub(add(a, 0x1.8p23f), 0x1.8p23f); }
QT_HD float power_of_two_one(float a) { return float_of_bits(bits_of_float(a) & 0x7f800000); }

/* Levels in order: see nearest_body.h. */
struct book_one {
    int32_t count;
    bool consecutive;
    In<float> value, code, middle;
};

#define QT_INLINE QT_HD
#define REAL float
#define V float
#define VI bool
#define SINGLE(v) (v)
#define ROUND_MAGIC 0x1.8p23f
#define T(name) name##_one
#include "grid_body.h"
#include "nearest_body.h"
#undef QT_INLINE
#undef REAL
#undef V
#undef VI
#undef SINGLE
#undef ROUND_MAGIC
#undef T

} // namespace qt

#endif
