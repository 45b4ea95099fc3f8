/* Codes of a byte each to floats: integers, or floats of eight bits, times the scale of a tensor,
 * a row, a group or a block. Every code is exact in float32, so the product rounds once. */
#include "ops.h"
#include "put.h"

/* E4M3: four bits of exponent (bias 7), three of mantissa; 0x7f is NaN, nothing is infinite. */
ALWAYS V from_e4m3(I code)
{
    I size = code & 127;
    V small = to_float(size) * 0x1p-9f;
    I normal = (size << 20) + (120 << 23);
    I bits = ipick(ilt(size, isplat(8)), (I)small, normal);
    bits = ipick(ieq(size, isplat(127)), isplat(0x7fc00000), bits);
    return (V)(bits | (code & 128) << 24);
}

/* E5M2: the upper half of a float16. */
ALWAYS V from_e5m2(I code)
{
#if defined(QT_ISA_AVX512)
    return (V)_mm512_cvtph_ps(_mm256_slli_epi16(_mm512_cvtepi32_epi16((__m512i)code), 8));
#else
    I size = (code & 127) << 21, sign = (code & 128) << 24;
    V small = to_float(code & 127) * 0x1p-16f;
    I normal = size + (112 << 23), infinite = size | 0x7f800000;
    I bits = ipick(ilt(code & 127, isplat(4)), (I)small, normal);
    bits = ipick(ilt(isplat(0x7b), code & 127), infinite, bits);
    return (V)(bits | sign);
#endif
}

ALWAYS V value_of(int kind, I code)
{
    return kind == QT_E4M3 ? from_e4m3(code) : kind == QT_E5M2 ? from_e5m2(code) : to_float(code);
}

ALWAYS I codes_at(int kind, const uint8_t *from)
{
    return kind == QT_I8 ? load_i8(from) : load_u8(from);
}

#define QT_BODY "bytes_body.h"
#include "each_dtype.h"

static int refused(const qt_bytes *b)
{
    if (b->rows < 1 || b->cols < 1 || b->block_rows < 1 || b->block_cols < 1)
        return 1;
    if (b->first < 0 || b->last > b->rows || b->origin > b->first)
        return 1;
    return b->zero && b->code != QT_I8 && b->code != QT_U8;
}

int QT_NAME(dequantize_bytes)(const qt_bytes *b)
{
    if (refused(b))
        return QT_E_ARGUMENT;
    switch (b->dtype) {
    case QT_F32:
        return bytes_f32(b);
    case QT_F16:
        return bytes_f16(b);
    case QT_BF16:
        return bytes_bf16(b);
    }
    return QT_E_ARGUMENT;
}
