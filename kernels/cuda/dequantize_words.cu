/* Every kernel that dequantizes words and bytes, for checks with nvcc: what is installed compiles
 * the one that is needed, with NVRTC. */
#include "dequantize.h"

#define QT_ALL(name, ...) QT_DEQUANTIZE(name, f32) QT_DEQUANTIZE(name, f16) QT_DEQUANTIZE(name, bf16)
QT_WORD_FORMATS(QT_ALL)
QT_BYTE_FORMATS(QT_ALL)
