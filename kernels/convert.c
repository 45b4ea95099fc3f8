/* Between float32, float16 and bfloat16. */
#include "ops.h"
#include "half.h"

static inline void convert(int from, int to, int64_t count, const void *source, void *target)
{
    int64_t at = 0;
    for (; at + QT_F32_LANES <= count; at += QT_F32_LANES)
        qt_write(target, at, to, QT_F32_LANES, qt_read(source, at, from, QT_F32_LANES));
    if (at < count)
        qt_write(target, at, to, (size_t)(count - at),
                 qt_read(source, at, from, (size_t)(count - at)));
}

int QT_NAME(convert)(int32_t from, int32_t to, int64_t count, const void *source, void *target)
{
    /* Constants here make one loop without choices for each pair. */
    if (from == QT_F32 && to == QT_F16)
        convert(QT_F32, QT_F16, count, source, target);
    else if (from == QT_F32 && to == QT_BF16)
        convert(QT_F32, QT_BF16, count, source, target);
    else if (from == QT_F16 && to == QT_F32)
        convert(QT_F16, QT_F32, count, source, target);
    else if (from == QT_BF16 && to == QT_F32)
        convert(QT_BF16, QT_F32, count, source, target);
    else
        return QT_E_ARGUMENT;
    return QT_OK;
}
