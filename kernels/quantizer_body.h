/* From the weights of a group to its scale and zero, one row a lane, for the type of real.h. */

#include "grid_body.h"

/* Takes the trial in lanes where its error is less, or in all of them at first. */
static inline void T(keep_better)(int first, V error, T(group) trial, V *least, T(group) *best)
{
    VI better = first ? (VI){0} - 1 : (VI)(error < *least);
    *least = T(select)(better, error, *least);
    best->scale = T(select)(better, trial.scale, best->scale);
    best->zero = T(select)(better, trial.zero, best->zero);
}

/* The range of some columns of a panel (PANEL numbers apart), zero inside it. */
static void T(range_of_columns)(const REAL *panel, const int32_t *columns, int64_t first,
                                int64_t count, V *low, V *high)
{
    *low = *high = (V){0};
    for (int64_t i = 0; i < count; i++) {
        V w = T(load)(panel + (columns ? columns[i] : first + i) * PANEL);
        *low = T(min)(w, *low);
        *high = T(max)(w, *high);
    }
}

/* The best group for some columns of a panel, given in order or consecutive from `first`. */
static T(group) T(group_of_columns)(const qt_quantizer *quantizer, const REAL *panel,
                                    const int32_t *columns, int64_t first, int64_t count,
                                    const REAL *importance)
{
    V low, high, least = {0};
    T(range_of_columns)(panel, columns, first, count, &low, &high);
    T(group) best = T(group_of_range)(quantizer, low, high);
    REAL most_code = (REAL)((1 << quantizer->bits) - 1), norm = (REAL)quantizer->norm;
    for (int step = 0; step < quantizer->ratio_count; step++) {
        REAL keep = (REAL)quantizer->ratios[step];
        T(group) trial = T(group_of_range)(quantizer, low * keep, high * keep);
        V error = {0};
        for (int64_t i = 0; i < count; i++) {
            int64_t column = columns ? columns[i] : first + i;
            V w = T(load)(panel + column * PANEL);
            V d = T(abs)(w - T(quantize)(w, trial, most_code) * trial.scale);
            V cost = norm == (REAL)2 ? d * d : T(power)(d, norm);
            error = error + (importance ? cost * importance[column] : cost);
        }
        T(keep_better)(step == 0, error, trial, &least, &best);
    }
    return best;
}
