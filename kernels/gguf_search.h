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
    return most(least(nearest_float(scaled), splat((float)top)), (V){0});
}

typedef struct {
    int top;          /* codes are 0 .. top */
    float first, step; /* trial k scales the range to top + first + k step codes */
    int last;         /* trials 0 .. last */
    int absolute;     /* minimize the weighted sum of |error|, not of its square */
} affine_search;

ALWAYS V affine_error(V scale, V minimum, const V *x, const V *w, const V *code, int n, int magnitude)
{
    V sum = {0};
    QT_UNROLL
    for (int i = 0; i < n; i++) {
        V error = scale * code[i] + minimum - x[i];
        error = magnitude ? absolute(error) : error * error;
        sum += w[i] * error;
    }
    return sum;
}

/* The trials of search_affine; 0 when a number in an unflat lane was too large to round exactly.
 * A better trial moves the minimum that the next ones start from. */
ALWAYS int try_affine(affine *grid, const V *x, const V *w, int n, affine_search s, V low, V high,
                      V sum_w, V sum_x, int exact)
{
    V code[32], zero = {0}, inverse = (float)s.top / (high - low), scale = 1.0f / inverse;
    V minimum = low;
    QT_UNROLL
    for (int i = 0; i < n; i++)
        code[i] = affine_trial(inverse * (x[i] - minimum), s.top, exact);
    V best = affine_error(scale, minimum, x, w, code, n, s.absolute);
    grid->inverse = inverse;
    grid->low = low;
    for (int k = 0; k <= s.last; k++) {
        inverse = (s.first + s.step * (float)k + (float)s.top) / (high - minimum);
        V reach = most(absolute(inverse * (low - minimum)), absolute(inverse * (high - minimum)));
        if (!exact && any_lane(not_lanes(lt(reach, splat(0x1p21f)) | grid->flat)))
            return 0;
        V sum_l = zero, sum_l2 = zero, sum_xl = zero;
        QT_UNROLL
        for (int i = 0; i < n; i++) {
            V l = affine_trial(inverse * (x[i] - minimum), s.top, exact), wl = w[i] * l;
            code[i] = l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * x[i];
        }
        V determinant = sum_w * sum_l2 - sum_l * sum_l;
        M solvable = lt(zero, determinant);
        V trial_scale = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        V trial_minimum = (sum_l2 * sum_x - sum_l * sum_xl) / determinant;
        M positive = lt(zero, trial_minimum);
        trial_minimum = pick(positive, zero, trial_minimum);
        trial_scale = pick(positive, sum_xl / sum_l2, trial_scale);
        V error = affine_error(trial_scale, trial_minimum, x, w, code, n, s.absolute);
        M better = solvable & lt(error, best);
        best = pick(better, error, best);
        scale = pick(better, trial_scale, scale);
        grid->inverse = pick(better, inverse, grid->inverse);
        grid->low = pick(better, minimum, grid->low);
        minimum = pick(better, trial_minimum, minimum);
    }
    grid->scale = pick(grid->flat, zero, scale);
    grid->minimum = pick(grid->flat, -low, -minimum);
    return 1;
}

/* make_qkx2_quants and make_qkx3_quants: for every trial range, the weighted least-squares line
 * through (code, weight), its minimum not above zero; the trial with the least error. */
ALWAYS void search_affine(affine *grid, const V *x, const V *w, int n, affine_search s)
{
    V low = x[0], high = x[0], sum_w = w[0], sum_x = w[0] * x[0], zero = {0};
    for (int i = 1; i < n; i++) {
        low = least(x[i], low);
        high = most(x[i], high);
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    low = pick(lt(zero, low), zero, low);
    grid->flat = le(high, low);
    if (!try_affine(grid, x, w, n, s, low, high, sum_w, sum_x, 0))
        try_affine(grid, x, w, n, s, low, high, sum_w, sum_x, 1);
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

/* make_qx_quants with rmse_type 1: of nineteen ranges, the first by the largest weight, the one
 * whose least-squares scale explains most. w may be the squares of x. */
ALWAYS symmetric search_symmetric(const V *x, const V *w, int n, int half)
{
    symmetric grid;
    V zero = {0}, magnitude, wx[32], top = extreme(x, n, &magnitude), best = zero;
    V low = splat((float)-half), high = splat((float)(half - 1));
    grid.empty = lt(magnitude, splat(TINY));
    grid.scale = zero;
    grid.inverse = zero;
    for (int i = 0; i < n; i++)
        wx[i] = w[i] * x[i];
    for (int k = 0; k < 20; k++) {
        if (k == 10) /* trial 0 is the first */
            continue;
        float codes = k ? (float)half + 0.1f * (float)(k - 10) : (float)half;
        V inverse = -codes / top, sum_xl = zero, sum_l2 = zero;
        QT_UNROLL
        for (int i = 0; i < n; i++) {
            V l = most(least(nearest_float(inverse * x[i]), high), low);
            sum_xl += wx[i] * l;
            sum_l2 += w[i] * l * l;
        }
        V scale = sum_xl / sum_l2;
        M better = all_lanes();
        if (k)
            better = lt(zero, sum_l2) & lt(best * sum_l2, sum_xl * sum_xl);
        else
            scale = pick(eq(sum_l2, zero), zero, scale);
        grid.scale = pick(better, scale, grid.scale);
        grid.inverse = pick(better, inverse, grid.inverse);
        best = pick(better, scale * sum_xl, best);
    }
    grid.scale = pick(grid.empty, zero, grid.scale);
    return grid;
}

#endif
