/* Every kernel that packs, or multiplies packed weights, for checks with nvcc. */
#include "gemv.h"
#include "pack.h"

QT_PACK_KERNELS(QT_KERNEL)
QT_GEMV_KERNELS(QT_KERNEL)
