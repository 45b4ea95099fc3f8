/* The sum of squared differences of two arrays of float32, in float64: how far a quantized matrix is
 * from the original. Sixteen sums side by side whatever the instruction set, so that the result is
 * the same everywhere; it is finite exactly where all values are. */
#include "ops.h"
#include "simd.h"

enum { SUMS = 16 };

int QT_NAME(squares)(int64_t count, const float *x, const float *y, double *to)
{
    double sum[SUMS] = {0}, total = 0;
    int64_t at = 0;
    if (count < 0)
        return QT_E_ARGUMENT;
    if (y) {
        for (; at + SUMS <= count; at += SUMS)
            for (int i = 0; i < SUMS; i++) {
                double apart = (double)x[at + i] - y[at + i];
                sum[i] += apart * apart;
            }
    } else {
        for (; at + SUMS <= count; at += SUMS)
            for (int i = 0; i < SUMS; i++) {
                double value = x[at + i];
                sum[i] += value * value;
            }
    }
    for (int i = 0; at < count; at++, i++) {
        double apart = y ? (double)x[at] - y[at] : x[at];
        sum[i] += apart * apart;
    }
    for (int i = 0; i < SUMS; i++)
        total += sum[i];
    *to = total;
    return QT_OK;
}
