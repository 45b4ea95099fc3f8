/* Packed weights times a few vectors, as decoding needs: y = x W', x [batch, cols] in float16.
 *
 * Codes are exact, products with inputs are summed in float32 by fused multiply-adds, and a zero or a
 * minimum is taken off by way of the sum of the inputs. Sums are made in a fixed order (atomics only
 * count), so a result depends on the number of splits but on nothing else, and the host computes the same
 * bits. Where blocks share rows, each leaves partial sums [splits, batch, rows] in float32; the last of
 * them to be done adds all (`sums` and `done`, a counter for each x of the grid that is zero before and
 * after), or gemv_sum does, where the sums are `values`. The result is float16. */
#ifndef QTOOL_CUDA_GEMV_H
#define QTOOL_CUDA_GEMV_H

#include "gemv_blocks.h"
#include "gemv_words.h"

namespace qt {

/* Sums over splits, codes [splits, batch * rows] in float32, to float16. */
struct GemvSum {
    enum { BLOCK = 256 };
    struct Room {
#if defined(QT_CHECKED)
        void clear() {}
#endif
    };
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> parts(t.codes, t.codes_bytes);
        int64_t count = t.batch * t.rows, at = block.x * BLOCK + thread;
        if (at >= count)
            return;
        float sum = parts[at];
        for (int32_t split = 1; split < t.splits; split++)
            sum = add(sum, parts[split * count + at]);
        Out<uint16_t>(t.values, t.values_bytes).put(at, f16::one(sum));
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

} // namespace qt

#define QT_GEMV_KERNELS(X)                                                          \
    X(gemv_across_4_1, qt::GemvWords<true, 1>) X(gemv_across_4_2, qt::GemvWords<true, 2>)   \
    X(gemv_across_4_4, qt::GemvWords<true, 4>) X(gemv_across_4_8, qt::GemvWords<true, 8>)   \
    X(gemv_columns_4_1, qt::GemvWords<false, 1>) X(gemv_columns_4_2, qt::GemvWords<false, 2>) \
    X(gemv_columns_4_4, qt::GemvWords<false, 4>) X(gemv_columns_4_8, qt::GemvWords<false, 8>) \
    X(gemv_q4_k_1, qt::GemvQ4K<1>) X(gemv_q4_k_2, qt::GemvQ4K<2>)                   \
    X(gemv_q4_k_4, qt::GemvQ4K<4>) X(gemv_q4_k_8, qt::GemvQ4K<8>)                   \
    X(gemv_sum, qt::GemvSum)

#endif
