/* Every kernel that dequantizes blocks of GGUF, for checks with nvcc. */
#include "dequantize.h"

#define QT_ALL(name) QT_DEQUANTIZE(name, f32) QT_DEQUANTIZE(name, f16) QT_DEQUANTIZE(name, bf16)
QT_BLOCK_FORMATS(QT_ALL)
