/* Every kernel that encodes GGUF blocks, for checks with nvcc. */
#include "encode.h"

#define QT_ONE(name, ...) QT_ENCODE(name)
QT_ENCODED(QT_ONE)
QT_ENCODED_WHOLE(QT_ONE)
QT_MEASURE_KERNELS(QT_KERNEL)
