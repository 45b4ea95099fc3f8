/* Inputs of products with packed weights, and codes as floats that multiply them. */
#ifndef QTOOL_CUDA_GEMV_INPUTS_H
#define QTOOL_CUDA_GEMV_INPUTS_H

#include "grid.h"

namespace qt {

/* Eight inputs of vector b of BATCH from a column on that is a multiple of eight; zeros past the
 * batch. */
template <int BATCH> QT_HD Four eight_inputs(const Task &t, int32_t b, int32_t col)
{
    if (BATCH == 1 || b < t.batch)
        return In<uint16_t>(t.inputs, t.inputs_bytes).wide<Four>(product(b, t.cols) + col);
    return Four{{0, 0, 0, 0}};
}

QT_HD float input(const Four &eight, int i)
{
    return of_f16(eight.word[i / 2] >> (16 * (i & 1)) & 0xffff);
}

/* A code that is left in its place in a word, the rest being masked, is a float by itself: a subnormal
 * one, code * 2^(place - 149), which multiplies as exactly as any. With inputs 2^100 times as large,
 * less 2^place, sums are 2^-49 of what they should be. */
QT_HD float in_place(uint32_t word, int place) { return float_of_bits(word & (15u << place)); }
QT_HD float power_of_two(int exponent) { return float_of_bits((uint32_t)(127 + exponent) << 23); }
enum { RAISED = 100, LOWERED = 149 - RAISED };

} // namespace qt

#endif
