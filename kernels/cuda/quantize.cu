/* Every kernel that quantizes to integer grids, for checks with nvcc. */
#include "quantize.h"

QT_QUANTIZE_KERNELS(QT_KERNEL)
