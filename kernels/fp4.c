/* Floats of four bits with eight-bit scales (MXFP4, NVFP4): what the sixteen codes stand for under
 * each of the 256 scales is computed first, rounded as the format says, then looked up. */
#include "gguf_books.h"
#include "ops.h"
#include "put.h"
#include "streams.h"

/* 2^(code - 127), 255 is NaN. */
static float from_e8m0(unsigned code)
{
    uint32_t bits = code == 255 ? 0x7fc00000u : code ? (uint32_t)code << 23 : 0x400000u;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static float from_e4m3(unsigned code)
{
    float size = half_ue4m3(code & 127) * 2;
    size = (code & 127) == 127 ? NAN : size;
    return code & 128 ? -size : size;
}

/* The sixteen values of every scale. The book holds doubled numbers: halving is exact. */
static void fill_table(const qt_fp4 *f, float table[256][16])
{
    for (unsigned code = 0; code < 256; code++) {
        float scale = f->scale_kind == QT_SCALE_E8M0 ? from_e8m0(code) : from_e4m3(code);
        /* Both scales are one number before a code is multiplied: so compressed-tensors has it. */
        scale = f->divide ? scale / f->outer : scale * f->outer;
        for (int i = 0; i < 16; i++) {
            float value = ((float)fp4_book[i] * 0.5f) * scale;
            if (i == 8)
                value = -0.0f * scale;
            table[code][i] = qt_plain_nan(value);
        }
    }
}

#define QT_BODY "fp4_body.h"
#include "each_dtype.h"

int QT_NAME(dequantize_fp4)(const qt_fp4 *f)
{
    if (f->rows < 0 || f->cols < 1 || f->group_size < 16 || f->group_size % 16 ||
        f->cols % f->group_size)
        return QT_E_ARGUMENT;
    if (f->scale_kind != QT_SCALE_E8M0 && f->scale_kind != QT_SCALE_E4M3)
        return QT_E_ARGUMENT;
    switch (f->dtype) {
    case QT_F32:
        return fp4_f32(f);
    case QT_F16:
        return fp4_f16(f);
    case QT_BF16:
        return fp4_bf16(f);
    }
    return QT_E_ARGUMENT;
}
