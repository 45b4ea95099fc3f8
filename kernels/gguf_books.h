/* Code books of four bits, and looking numbers up in sixteen. */
#ifndef QTOOL_GGUF_BOOKS_H
#define QTOOL_GGUF_BOOKS_H

#include "gguf_lanes.h"

/* What the codes of the four-bit books stand for; E2M1 is doubled. */
static const int8_t iq4_book[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                    1,    13,   25,  38,  53,  69,  89,  113};
static const int8_t fp4_book[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

/* Half the value of an unsigned E4M3 code; zero for 0 and for 0x7f. The top bit is ignored. */
ALWAYS float half_ue4m3(unsigned code)
{
    unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    uint32_t bits = (exponent + 119) << 23 | mantissa << 20;
    float normal;
    memcpy(&normal, &bits, 4);
    float value = exponent ? normal : (float)mantissa * 0x1p-10f;
    return code == 0x7f ? 0.0f : value;
}

/* Sixteen numbers to look up by the low four bits of an index. */
typedef struct {
    V part[16 / LANES];
} table16;

ALWAYS table16 table_times(const int8_t *values, float scale)
{
    table16 table;
    for (int i = 0; i < 16 / LANES; i++)
        table.part[i] = to_float(load_i8(values + LANES * i)) * scale;
    return table;
}

ALWAYS V look_up(const table16 *table, I index)
{
#if defined(QT_ISA_AVX512)
    return (V)_mm512_permutexvar_ps((__m512i)index, (__m512)table->part[0]);
#elif defined(QT_ISA_AVX2)
    V low = (V)_mm256_permutevar8x32_ps((__m256)table->part[0], (__m256i)index);
    V high = (V)_mm256_permutevar8x32_ps((__m256)table->part[1], (__m256i)index);
    return pick(index << 28, high, low);
#else
    const float *values = (const float *)table;
    V found;
    for (int lane = 0; lane < LANES; lane++)
        found[lane] = values[index[lane] & 15];
    return found;
#endif
}

#endif
