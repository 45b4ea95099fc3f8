/* Weights to small floats (E4M3, E5M2, E2M1): scales, the search for better ones, codes, and what
 * these stand for, as the CPU makes them (round_floats.c, qtool/small_floats.py).
 *
 * Everything lies column after column, [cols, rows], and a thread is a row: see quantize.h.
 *
 *     RoundScales   max|w| of all that share a scale -> scales, each a number of its dtype
 *     RoundSearch   weight [cols, rows] and scales [groups, rows]
 *                                                    -> of each group the scale that loses least
 *     RoundFloats   weight, and scales [groups, rows / block_rows]
 *                                                    -> codes uint8, or values float32 [cols, rows]
 *
 * A task's `bits` is the number of the book, a step is scale / outer. */
#ifndef QTOOL_CUDA_ROUND_H
#define QTOOL_CUDA_ROUND_H

#include "grid.h"
#include "integers.h"

namespace qt {

enum { QT_BOOK_E4M3, QT_BOOK_E5M2, QT_BOOK_E2M1 };
/* Of a scale, beside F32, F16 and BF16; of two levels are E4M3's numbers of max|w| times outer. */
enum { POWER_OF_TWO = 3, TWO_LEVELS = 4 };

QT_HD int32_t words_one(float a) { return (int32_t)bits_of_float(a); }
QT_HD float of_words_one(int32_t a) { return float_of_bits((uint32_t)a); }
QT_HD int32_t whole_one(float a) { return (int32_t)a; }
QT_HD int32_t choose_one(bool mask, int32_t yes, int32_t no) { return mask ? yes : no; }

#if !defined(INT32_MAX)
#define INT32_MAX 0x7fffffff
#define INT32_MIN (-INT32_MAX - 1)
#endif
#define QT_INLINE QT_HD
#define V float
#define VI bool
#define VWORD int32_t
#define T(name) name##_one
#include "small_floats_body.h"
#undef QT_INLINE
#undef V
#undef VI
#undef VWORD
#undef T

/* The exponent of two that brings max|w| to the binade of a book's largest number. */
QT_HD float binade(float top, const small_book *b)
{
    int32_t exponent = (int32_t)(bits_of_float(top) >> 23) - (int32_t)(bits_of_float(b->most) >> 23);
    return exponent < -126 ? power(-126) * 0.5f : power(exponent < 126 ? exponent : 126);
}

/* The scale of max|w|; 1 where that is zero. */
QT_HD float scale_of(const Task &t, float top, const small_book *b)
{
    int32_t dtype = (int32_t)t.scale_dtype;
    if (top == 0)
        return 1;
    if (dtype == POWER_OF_TWO)
        return binade(top, b);
    float scale = divide(top, b->most);
    if (dtype == TWO_LEVELS) {
        small_book stored = book_of(QT_BOOK_E4M3);
        scale = nearest_float_one(mul(scale, float_of_bits((uint32_t)t.outer)), &stored);
        return max_one(scale, power(-9));
    }
    if (dtype == F16)
        scale = of_f16(f16_of(scale < 65504.0f ? scale : 65504.0f));
    if (dtype == BF16)
        scale = of_bf16(bf16_of(scale));
    return max_one(scale, dtype == F16 ? power(-24) : power(-126));
}

struct RoundScales {
    enum { BLOCK = 256 };
    typedef NoRoom Room;

    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> tops(t.weight, t.weight_bytes);
        Out<float> scales(t.values, t.values_bytes);
        int64_t at = block.x * BLOCK + thread;
        if (at >= t.cols)
            return;
        small_book book = book_of((int32_t)t.bits);
        scales.put(at, scale_of(t, tops[at], &book));
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* The first scale, or the first of those beside it that leave less: multiples by `ratios`, or so many
 * steps of E4M3 away as `index` says. A row and group a thread; errors are weighed by `importance`
 * [cols], and summed in float64. */
template <bool WEIGHED> struct RoundSearch {
    enum { BLOCK = 64 };
    typedef NoRoom Room;

    static QT_MEMBER double lost(const Task &t, const In<float> &weight, int64_t at, int32_t first,
                                 int32_t count, float scale, const small_book *book)
    {
        In<float> importance(t.importance, t.importance_bytes);
        float step = divide(scale, float_of_bits((uint32_t)t.outer));
        double sum = 0;
        for (int32_t i = 0; i < count; i++) {
            float w = weight[at + i * t.rows];
            float d = sub(mul(nearest_float_one(divide(w, step), book), step), w);
            float cost = mul(d, d);
            sum += (double)(WEIGHED ? mul(cost, importance[first + i]) : cost);
        }
        return sum;
    }
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> weight(t.weight, t.weight_bytes), scales(t.scale, t.scale_bytes);
        In<float> factors(t.ratios, t.ratios_bytes);
        In<int32_t> steps(t.index, t.index_bytes);
        Out<float> best(t.values, t.values_bytes);
        int64_t row = block.x * BLOCK + thread;
        int32_t group = block.y, from = least((int64_t)group * t.group_size, t.cols);
        int32_t count = least(t.group_size, t.cols - from);
        if (row >= t.rows)
            return;
        small_book book = book_of((int32_t)t.bits);
        int64_t at = from * t.rows + row, place = group * t.rows + row;
        float start = scales[place], found = start;
        double error = lost(t, weight, at, from, count, start, &book);
        for (int32_t n = 0; n < t.ratio_count; n++) {
            float trial = t.index ? step_away(start, steps[n])
                                  : multiple_of(start, factors[n]);
            double other = lost(t, weight, at, from, count, trial, &book);
            if (other < error) {
                error = other;
                found = trial;
            }
        }
        best.put(place, found);
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* Eight columns of a row a thread. */
template <class OUT> struct RoundFloats {
    enum { BLOCK = 256, COLUMNS = 8 };
    typedef NoRoom Room;

    static QT_MEMBER uint8_t made(float number, float, const small_book *book,
                                  const uint8_t *)
    {
        return (uint8_t)float_code_one(number, book);
    }
    static QT_MEMBER float made(float number, float step, const small_book *,
                                const float *)
    {
        return mul(number, step);
    }
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        In<float> weight(t.weight, t.weight_bytes), scales(t.scale, t.scale_bytes);
        Out<OUT> values(t.values, t.values_bytes);
        int64_t row = block.x * BLOCK + thread;
        if (row >= t.rows)
            return;
        small_book book = book_of((int32_t)t.bits);
        int64_t wide = (t.rows + t.block_rows - 1) / t.block_rows, own = row / t.block_rows;
        int32_t size = least(t.group_size, t.cols), col = block.y * COLUMNS, group = col / size;
        int32_t next = group * size; /* the column from which on the step is another */
        float step = 0, w[COLUMNS];
        QT_UNROLL
        for (int32_t i = 0; i < COLUMNS; i++) /* all are asked for before one is waited for */
            w[i] = col + i < t.cols ? weight[(col + i) * t.rows + row] : 0.0f;
        QT_UNROLL
        for (int32_t i = 0; i < COLUMNS; i++, col++) {
            if (col >= t.cols)
                return;
            if (col >= next) {
                step = divide(scales[group * wide + own], float_of_bits((uint32_t)t.outer));
                next = ++group * size;
            }
            float number = nearest_float_one(divide(w[i], step), &book);
            values.put(col * t.rows + row, made(number, step, &book, (const OUT *)nullptr));
        }
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

} // namespace qt

#define QT_ROUND_KERNELS(X)                                                                       \
    X(round_scales, qt::RoundScales) X(round_search, qt::RoundSearch<false>)                     \
    X(round_weighed, qt::RoundSearch<true>)                                                      \
    X(round_codes, qt::RoundFloats<uint8_t>) X(round_values, qt::RoundFloats<float>)

#endif
