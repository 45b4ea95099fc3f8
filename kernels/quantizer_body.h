/* From the weights of a group to its scale and zero, one row a lane, for the type of real.h:
 *
 *     low = min(w, 0), high = max(w, 0)
 *     asymmetric: scale = (high - low) / (2^b - 1),     zero = round(-low / scale)
 *     symmetric:  scale = max|w| / reach,               zero = 2^(b-1)
 *     code = clamp(round(w / scale) + zero, 0, 2^b - 1),   dq = (code - zero) * scale
 *
 * The scale is rounded to its stored dtype before anything is computed with it. */

typedef struct {
    V scale, zero; /* zero as a whole number */
} T(group);

/* The rounded value in units of the scale: code - zero. */
static inline V T(quantize)(V w, T(group) g, REAL most_code)
{
    return T(round)(T(min)(T(max)(w / g.scale, -g.zero), T(splat)(most_code) - g.zero));
}

static inline T(group) T(group_of_range)(const qt_quantizer *quantizer, V low, V high)
{
    REAL most_code = (REAL)((1 << quantizer->bits) - 1);
    T(group) g;
    V range = quantizer->symmetric ? T(max)(high, -low) : high - low;
    V step = range / (quantizer->symmetric ? (REAL)quantizer->reach : most_code);
    g.scale = T(round_scale)(step, quantizer->scale_dtype);
    g.scale = T(select)(range == (REAL)0, T(splat)((REAL)1), g.scale);
    if (quantizer->symmetric)
        g.zero = T(splat)((REAL)(1 << (quantizer->bits - 1)));
    else
        g.zero = T(round)(T(min)(-low / g.scale, T(splat)(most_code)));
    return g;
}

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
