/* Weights to codes on integer grids, and the column sweep of GPTQ, onto these or onto given levels.
 *
 * Everything lies column after column, [cols, rows], and a thread is a row: neighbouring threads
 * read neighbouring numbers, and what a row sums it sums in the order of its columns, as the CPU
 * does (quantizer_body.h, quantize_groups.c, gptq_sweep_body.h).
 *
 *     FindGroups    weight [cols, rows]             -> scale and zero [groups, rows, 2]
 *     RoundWeights  weight, scale and zero          -> codes uint8, or values float32 [cols, rows]
 *     SweepBlock    a block of columns, and what the sweep's factor has for it
 *                                                   -> minus the errors and the codes, float32
 *                                                      [2, cols, rows] */
#ifndef QTOOL_CUDA_QUANTIZE_H
#define QTOOL_CUDA_QUANTIZE_H

#include "grid.h"
#include "integers.h"

namespace qt {

enum { MOST_IN_BLOCK = 128, MOST_IN_GRAM = 256, COLUMNS_OF_THREAD = 8 };

QT_HD qt_quantizer quantizer_of(const Task &t)
{
    qt_quantizer found;
    found.bits = (int32_t)t.bits;
    found.symmetric = (int32_t)t.symmetric;
    found.scale_dtype = (int32_t)t.scale_dtype;
    found.reach = float_of_bits((uint32_t)t.reach);
    return found;
}

QT_HD float most_code_of(const Task &t) { return (float)((1 << (int32_t)t.bits) - 1); }

QT_HD group_one group_at(const In<float> &scales, int64_t at)
{
    group_one g = {scales[2 * at], scales[2 * at + 1]};
    return g;
}

enum { FULL, SEARCHED, WEIGHED, BY_GRAM };

/* The grid of each group: its full range, or the best of `ratios` by the sum of squared errors, that
 * sum weighed by `importance` [cols], or e'He with `gram` [groups, pitch, pitch], which holds twice the
 * entries of H above its diagonal and none below. A row and group a thread. */
template <int BY> struct FindGroups {
    enum { BLOCK = 64 };
    typedef NoRoom Room;

    static QT_MEMBER float squares(const Task &t, const In<float> &weight, int64_t at, int32_t first,
                                   int32_t count, group_one trial)
    {
        In<float> importance(t.importance, t.importance_bytes);
        float sum = 0, most_code = most_code_of(t);
        for (int32_t i = 0; i < count; i++) {
            float w = weight[at + i * t.rows];
            float d = sub(w, mul(quantize_one(w, trial, most_code), trial.scale)), cost = mul(d, d);
            sum = add(sum, BY == WEIGHED ? mul(cost, importance[first + i]) : cost);
        }
        return sum;
    }
    /* Four sums side by side: what is above the diagonal, or beyond the last column, is zero. */
    static QT_MEMBER float product(const Task &t, const In<float> &weight, int64_t at, int32_t group,
                                   int32_t count, group_one trial)
    {
        In<float> gram(t.gram, t.gram_bytes);
        float e[MOST_IN_GRAM], most_code = most_code_of(t), sum = 0;
        int32_t padded = (count + 3) / 4 * 4;
        for (int32_t i = 0; i < padded; i++) {
            e[i] = 0;
            if (i < count) {
                float w = weight[at + i * t.rows];
                e[i] = sub(w, mul(quantize_one(w, trial, most_code), trial.scale));
            }
        }
        for (int32_t c = 0; c < padded; c += 4) {
            float p[4] = {0, 0, 0, 0};
            for (int32_t k = 0; k < c + 4; k++) {
                Four row = gram.wide<Four>((group * t.pitch + k) * t.pitch + c);
                QT_UNROLL
                for (int i = 0; i < 4; i++)
                    p[i] = fma(e[k], float_of_bits(row.word[i]), p[i]);
            }
            QT_UNROLL
            for (int i = 0; i < 4; i++)
                sum = fma(e[c + i], p[i], sum);
        }
        return sum;
    }
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> weight(t.weight, t.weight_bytes), ratios(t.ratios, t.ratios_bytes);
        Out<float> scales(t.values, t.values_bytes);
        int64_t row = block.x * BLOCK + thread;
        int32_t group = block.y, from = least((int64_t)group * t.group_size, t.cols);
        int32_t count = least(t.group_size, t.cols - from);
        if (row >= t.rows)
            return;
        int64_t at = from * t.rows + row;
        float low = 0, high = 0, error = 0;
        for (int32_t i = 0; i < count; i++) {
            float w = weight[at + i * t.rows];
            low = min_one(w, low);
            high = max_one(w, high);
        }
        qt_quantizer quantizer = quantizer_of(t);
        group_one best = group_of_range_one(&quantizer, low, high);
        for (int32_t step = 0; BY != FULL && step < t.ratio_count; step++) {
            float keep = ratios[step];
            group_one trial = group_of_range_one(&quantizer, mul(low, keep), mul(high, keep));
            float found = BY == BY_GRAM ? product(t, weight, at, group, count, trial)
                                        : squares(t, weight, at, from, count, trial);
            if (step == 0 || found < error) {
                error = found;
                best = trial;
            }
        }
        scales.put(2 * (group * t.rows + row), best.scale);
        scales.put(2 * (group * t.rows + row) + 1, best.zero);
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* Eight columns of a row a thread. */
template <class OUT> struct RoundWeights {
    enum { BLOCK = 256 };
    typedef NoRoom Room;

    static QT_MEMBER uint8_t made(float steps, group_one g, const uint8_t *)
    {
        return (uint8_t)(int32_t)add(steps, g.zero);
    }
    static QT_MEMBER float made(float steps, group_one g, const float *) { return mul(steps, g.scale); }
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> weight(t.weight, t.weight_bytes), scales(t.scale, t.scale_bytes);
        Out<OUT> values(t.values, t.values_bytes);
        int64_t row = block.x * BLOCK + thread;
        if (row >= t.rows)
            return;
        for (int32_t i = 0; i < COLUMNS_OF_THREAD; i++) {
            int64_t col = (int64_t)block.y * COLUMNS_OF_THREAD + i;
            if (col >= t.cols)
                return;
            group_one g = group_at(scales, col / t.group_size * t.rows + row);
            float steps = quantize_one(weight[col * t.rows + row], g, most_code_of(t));
            values.put(col * t.rows + row, made(steps, g, (const OUT *)nullptr));
        }
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* A sweep onto an integer grid of `bits` bits. */
struct OntoGrid {
    float most_code;

    QT_MEMBER OntoGrid(const Task &t) : most_code(most_code_of(t)) {}
    /* What a weight becomes, and its code. */
    QT_MEMBER float level(float w, group_one g, float *code) const
    {
        float steps = quantize_one(w, g, most_code);
        *code = add(steps, g.zero);
        return mul(steps, g.scale);
    }
};

/* A sweep onto levels, scale * number - zero, of a book of ratio_count numbers: ratios [3, ratio_count],
 * value, code and middle of each as nearest_body.h has them, `symmetric` where they are consecutive. */
struct OntoLevels {
    book_one book;

    QT_MEMBER OntoLevels(const Task &t)
    {
        In<float> numbers(t.ratios, t.ratios_bytes);
        book.count = (int32_t)t.ratio_count;
        book.consecutive = t.symmetric != 0;
        book.value = numbers;
        book.code = numbers.from(t.ratio_count);
        book.middle = numbers.from(2 * t.ratio_count);
    }
    QT_MEMBER float level(float w, group_one g, float *code) const
    {
        return nearest_level_one(&book, w, g.scale, g.zero, code);
    }
};

/* Columns of a block, one after the other: what the ones before it owe a column is added in their
 * order, it is rounded with scale and zero of group index[i], and leaves its own error,
 *
 *     minus[i] = -(w_i - dq_i) / U[i,i]        w_i = fma(minus[k], U[k,i], w_i) for k < i in order
 *
 * factor: gram [cols, pitch], U' of the block: row i has U[k,i] for k <= i and zeros after. */
template <class ONTO> struct SweepBlock {
    enum { BLOCK = 64 };
    typedef NoRoom Room;

    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> weight(t.weight, t.weight_bytes), scales(t.scale, t.scale_bytes);
        In<float> factor(t.gram, t.gram_bytes);
        In<int32_t> index(t.index, t.index_bytes);
        Out<float> values(t.values, t.values_bytes);
        int64_t row = block.x * BLOCK + thread;
        if (row >= t.rows)
            return;
        const ONTO onto(t);
        float minus[MOST_IN_BLOCK];
        for (int32_t i = 0; i < MOST_IN_BLOCK; i++)
            minus[i] = 0;
        for (int32_t i = 0; i < t.cols; i++) {
            float w = weight[i * t.rows + row];
            for (int32_t k = 0; k < i; k += 4) { /* of those from i on, minus is zero */
                Four u = factor.wide<Four>(i * t.pitch + k);
                QT_UNROLL
                for (int n = 0; n < 4; n++)
                    w = fma(minus[k + n], float_of_bits(u.word[n]), w);
            }
            group_one g = group_at(scales, index[i] * t.rows + row);
            float code, level = onto.level(w, g, &code);
            float err = divide(sub(w, level), factor[i * t.pitch + i]);
            minus[i] = -err;
            values.put(i * t.rows + row, minus[i]);
            values.put((t.cols + i) * t.rows + row, code);
        }
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

} // namespace qt

#define QT_QUANTIZE_KERNELS(X)                                                                   \
    X(quantize_groups_full, qt::FindGroups<qt::FULL>)                                            \
    X(quantize_groups_searched, qt::FindGroups<qt::SEARCHED>)                                    \
    X(quantize_groups_weighed, qt::FindGroups<qt::WEIGHED>)                                      \
    X(quantize_groups_by_gram, qt::FindGroups<qt::BY_GRAM>)                                      \
    X(quantize_codes, qt::RoundWeights<uint8_t>) X(quantize_values, qt::RoundWeights<float>)     \
    X(quantize_sweep, qt::SweepBlock<qt::OntoGrid>)                                              \
    X(quantize_sweep_levels, qt::SweepBlock<qt::OntoLevels>)

#endif
