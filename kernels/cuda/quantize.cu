/* Every kernel that quantizes, to integer grids or small floats, for checks with nvcc. */
#include "quantize.h"
#include "round.h"

QT_QUANTIZE_KERNELS(QT_KERNEL)
QT_ROUND_KERNELS(QT_KERNEL)
