/* The searches for scales that ggml's encoders make, a block in every lane. Names say what is
 * found; each note says which of ggml's functions it must agree with to the last bit. */
#ifndef QTOOL_GGUF_SEARCH_H
#define QTOOL_GGUF_SEARCH_H

#include "gguf_encode_lanes.h"

#define TINY 1e-15f /* magnitudes below it count as zero */

/* A grid w = scale q - minimum found for one sub-block, and what its codes were found with. */
typedef struct {
    V scale, minimum; /* minimum >= 0 as it is stored */
    V inverse, low;   /* q = clamp(nearest(inverse (x - low))) */
    M flat;           /* all weights equal (and not above zero): every code is zero */
} affine;

/* Codes of a sub-block on the grid of its search. */
ALWAYS I affine_code(const affine *grid, V x, int top)
{
    I code = clamp(nearest(grid->inverse * (x - grid->low)), 0, top);
    return ipick(grid->flat, isplat(0), code);
}

/* A code as a float; `exact` where the number may be too large for adding 1.5 * 2^23 to round. */
ALWAYS V affine_trial(V scaled, int top, int exact)
{
    if (exact)
        return to_float(clamp(nearest(scaled), 0, top));
    return most(least(nearest_float(scaled), splat((float)top)), splat(0));
}

typedef struct {
    int top;          /* codes are 0 .. top */
    float first, step; /* trial k scales the range to top + first + k step codes */
    int last;         /* trials 0 .. last */
    int absolute;     /* minimize the weighted sum of |error|, not of its square */
} affine_search;

/* At most so many sub-blocks at a time: each trial waits for the last one's sums, and the
 * arithmetic of other sub-blocks fills the wait. A GPU fills it with other threads. */
enum { FEW = LANES > 1 ? 4 : 1, TWO = LANES > 1 ? 2 : 1 };
#define EACH QT_UNROLL for (int u = 0; u < count; u++)

/* Weighted errors of the codes on a grid. */
ALWAYS void affine_error(V sum[FEW], const V *scale, const V *minimum, const V *x, const V *w,
                         V code[FEW][32], int n, int magnitude, int count)
{
    EACH sum[u] = splat(0);
    UNROLL_SOME
    for (int i = 0; i < n; i++)
        EACH {
            V error = scale[u] * code[u][i] + minimum[u] - x[n * u + i];
            error = magnitude ? absolute(error) : error * error;
            sum[u] += w[n * u + i] * error;
        }
}

/* What the trials of a sub-block start from. */
typedef struct {
    V low, high, sum_w, sum_x;
} extent;

/* The trials of search_affine; 0 when a number in an unflat lane was too large to round exactly.
 * A better trial moves the minimum that the next ones start from. */
ALWAYS int try_affine(affine *grid, const V *x, const V *w, int n, affine_search s,
                      const extent *given, int exact, int count)
{
    V code[FEW][32], zero = {0}, inverse[FEW], scale[FEW], minimum[FEW], best[FEW];
    EACH {
        minimum[u] = grid[u].low = given[u].low;
        inverse[u] = grid[u].inverse = (float)s.top / (given[u].high - given[u].low);
        scale[u] = 1.0f / inverse[u];
    }
    QT_UNROLL
    for (int i = 0; i < n; i++)
        EACH code[u][i] = affine_trial(inverse[u] * (x[n * u + i] - minimum[u]), s.top, exact);
    affine_error(best, scale, minimum, x, w, code, n, s.absolute, count);
    for (int k = 0; k <= s.last; k++) {
        V sum_l[FEW], sum_l2[FEW], sum_xl[FEW], trial_scale[FEW], trial_minimum[FEW];
        M solvable[FEW];
        EACH {
            V low = given[u].low, high = given[u].high;
            inverse[u] = (s.first + s.step * (float)k + (float)s.top) / (high - minimum[u]);
            V reach = most(absolute(inverse[u] * (low - minimum[u])),
                           absolute(inverse[u] * (high - minimum[u])));
            if (!exact && any_lane(not_lanes(lt(reach, splat(0x1p21f)) | grid[u].flat)))
                return 0;
            sum_l[u] = sum_l2[u] = sum_xl[u] = zero;
        }
        UNROLL_SOME
        for (int i = 0; i < n; i++)
            EACH {
                V at = x[n * u + i];
                V l = affine_trial(inverse[u] * (at - minimum[u]), s.top, exact);
                V wl = w[n * u + i] * l;
                code[u][i] = l;
                sum_l[u] += wl;
                sum_l2[u] += wl * l;
                sum_xl[u] += wl * at;
            }
        EACH {
            V sum_w = given[u].sum_w, sum_x = given[u].sum_x;
            V determinant = sum_w * sum_l2[u] - sum_l[u] * sum_l[u];
            solvable[u] = lt(zero, determinant);
            V slope = (sum_w * sum_xl[u] - sum_x * sum_l[u]) / determinant;
            V start = (sum_l2[u] * sum_x - sum_l[u] * sum_xl[u]) / determinant;
            M positive = lt(zero, start);
            trial_minimum[u] = pick(positive, zero, start);
            trial_scale[u] = pick(positive, sum_xl[u] / sum_l2[u], slope);
        }
        V error[FEW];
        affine_error(error, trial_scale, trial_minimum, x, w, code, n, s.absolute, count);
        EACH {
            M better = solvable[u] & lt(error[u], best[u]);
            best[u] = pick(better, error[u], best[u]);
            scale[u] = pick(better, trial_scale[u], scale[u]);
            grid[u].inverse = pick(better, inverse[u], grid[u].inverse);
            grid[u].low = pick(better, minimum[u], grid[u].low);
            minimum[u] = pick(better, trial_minimum[u], minimum[u]);
        }
    }
    EACH {
        grid[u].scale = pick(grid[u].flat, zero, scale[u]);
        grid[u].minimum = pick(grid[u].flat, -given[u].low, -minimum[u]);
    }
    return 1;
}

/* make_qkx2_quants and make_qkx3_quants for `count` sub-blocks of n weights: for every
 * trial range, the weighted least-squares line through (code, weight), its minimum not above zero;
 * the trial with the least error. */
ALWAYS void search_affine(affine *grid, const V *from, const V *w, int n, affine_search s, int count)
{
    extent given[FEW];
    NEARBY(x, from, n * count);
    EACH {
        const V *at = x + n * u, *weigh = w + n * u;
        V low = at[0], high = at[0], sum_w = weigh[0], sum_x = weigh[0] * at[0], zero = {0};
        UNROLL_ALONE
        for (int i = 1; i < n; i++) {
            low = least(at[i], low);
            high = most(at[i], high);
            sum_w += weigh[i];
            sum_x += weigh[i] * at[i];
        }
        low = pick(lt(zero, low), zero, low);
        grid[u].flat = le(high, low);
        given[u].low = low;
        given[u].high = high;
        given[u].sum_w = sum_w;
        given[u].sum_x = sum_x;
    }
    if (!try_affine(grid, x, w, n, s, given, 0, count))
        try_affine(grid, x, w, n, s, given, 1, count);
}

/* make_qp_quants: codes 0 .. top of numbers that are not negative, by the best of nine ranges and
 * then changing one code at a time while the fit improves. Returns the scale. Codes are bytes. */
ALWAYS V search_positive(const V *x, const V *w, int n, int top, I *code)
{
    V zero = {0}, high = zero;
    for (int i = 0; i < n; i++)
        high = pick(lt(x[i], high), high, x[i]);
    M empty = lt(high, splat(TINY));
    V inverse = (float)top / high, scale = 1.0f / inverse, best = zero;
    for (int i = 0; i < n; i++) {
        V error = x[i] - scale * to_float(nearest(inverse * x[i]) & 255);
        best += w[i] * error * error;
    }
    for (int k = -4; k <= 4; k++) {
        if (k == 0)
            continue;
        V trial = (0.1f * (float)k + (float)top) / high, trial_scale = 1.0f / trial, sum = zero;
        for (int i = 0; i < n; i++) {
            I l = ileast(nearest(trial * x[i]), isplat(top));
            V error = x[i] - trial_scale * to_float(l);
            sum += w[i] * error * error;
        }
        M better = lt(sum, best);
        best = pick(better, sum, best);
        inverse = pick(better, trial, inverse);
    }
    V sum_xl = zero, sum_l2 = zero;
    for (int i = 0; i < n; i++) {
        I l = ileast(nearest(inverse * x[i]), isplat(top));
        V f = to_float(l);
        code[i] = l & 255;
        sum_xl += w[i] * x[i] * f;
        sum_l2 += w[i] * f * f;
    }
    for (int round = 0; round < 5; round++) {
        M changed = lt(zero, zero);
        for (int i = 0; i < n; i++) {
            V f = to_float(code[i]);
            V xl = sum_xl - w[i] * x[i] * f, l2 = sum_l2 - w[i] * f * f;
            I l = ileast(nearest(x[i] * l2 / xl), isplat(top));
            V g = to_float(l);
            M may = lt(zero, xl) & lt(zero, l2) & not_lanes(ieq(l, code[i]));
            xl += w[i] * x[i] * g;
            l2 += w[i] * g * g;
            M better = may & lt(sum_xl * sum_xl * l2, xl * xl * sum_l2);
            code[i] = ipick(better, l & 255, code[i]);
            sum_xl = pick(better, xl, sum_xl);
            sum_l2 = pick(better, l2, sum_l2);
            changed |= better;
        }
        if (!any_lane(changed))
            break;
    }
    for (int i = 0; i < n; i++)
        code[i] = ipick(empty, isplat(0), code[i]);
    V fit = pick(lt(zero, sum_l2), sum_xl / sum_l2, zero);
    return pick(empty, zero, fit);
}

/* What a search for codes -half .. half - 1 found: q = clamp(nearest(inverse x)) + half. */
typedef struct {
    V scale, inverse;
    M empty; /* the largest magnitude is below TINY: stored codes are 0, not half */
} symmetric;

ALWAYS I symmetric_code(const symmetric *grid, V x, int half)
{
    I code = clamp(nearest(grid->inverse * x), -half, half - 1) + half;
    return ipick(grid->empty, isplat(0), code);
}

/* Least squares of codes found with `count` inverses, which share the loads. */
ALWAYS void fit_symmetric(const V *x, const V *w, const V *wx, int n, int half, int exact,
                          int count, const V *inverse, V *sum_xl, V *sum_l2)
{
    V low = splat((float)-half), high = splat((float)(half - 1));
    EACH sum_xl[u] = sum_l2[u] = splat(0);
    UNROLL_SOME
    for (int i = 0; i < n; i++)
        EACH {
            V l = most(least(nearest_float(inverse[u] * x[i]), high), low);
            if (exact)
                l = to_float(clamp(nearest(inverse[u] * x[i]), -half, half - 1));
            sum_xl[u] += wx[i] * l;
            sum_l2[u] += w[i] * l * l;
        }
}

/* make_qx_quants with rmse_type 1: of nineteen ranges, the first by the largest weight, the one
 * whose least-squares scale explains most. w may be the squares of x. exact: x may be no number. */
ALWAYS symmetric search_symmetric(const V *from, const V *weights, int n, int half, int exact)
{
    enum { TRIALS = 3 };
    symmetric grid;
    NEARBY(x, from, n);
    NEARBY(w, weights, n);
    V zero = {0}, magnitude, wx[32], sum_xl[TRIALS], sum_l2[TRIALS];
    V top = exact ? extreme_in_order(x, n, &magnitude) : extreme(x, n, &magnitude);
    grid.empty = lt(magnitude, splat(TINY));
    grid.inverse = (float)-half / top;
    UNROLL_SOME
    for (int i = 0; i < n; i++)
        wx[i] = w[i] * x[i];
    fit_symmetric(x, w, wx, n, half, exact, 1, &grid.inverse, sum_xl, sum_l2);
    grid.scale = over(sum_xl[0], sum_l2[0]);
    V best = grid.scale * sum_xl[0];
    for (int k = 0; k < 18; k += TRIALS) {
        V inverse[TRIALS];
        UNROLL_ALONE
        for (int t = 0; t < TRIALS; t++) {
            int step = k + t < 9 ? k + t - 9 : k + t - 8; /* -9 .. 9, not 0 */
            inverse[t] = -((float)half + 0.1f * (float)step) / top;
        }
        fit_symmetric(x, w, wx, n, half, exact, TRIALS, inverse, sum_xl, sum_l2);
        UNROLL_ALONE
        for (int t = 0; t < TRIALS; t++) {
            M better = lt(zero, sum_l2[t]) & lt(best * sum_l2[t], sum_xl[t] * sum_xl[t]);
            V scale = sum_xl[t] / sum_l2[t];
            grid.scale = pick(better, scale, grid.scale);
            grid.inverse = pick(better, inverse[t], grid.inverse);
            best = pick(better, scale * sum_xl[t], best);
        }
    }
    grid.scale = pick(grid.empty, zero, grid.scale);
    return grid;
}

#endif
