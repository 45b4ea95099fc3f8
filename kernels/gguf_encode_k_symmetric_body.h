/* The encoders of q3_k and q6_k: sub-blocks of 16 weights on a grid around zero. The layouts are told
 * in gguf_dequant_k.h; the arithmetic agrees with ggml's reference encoders bit for bit. */
#ifndef QTOOL_GGUF_ENCODE_K_SYMMETRIC_BODY_H
#define QTOOL_GGUF_ENCODE_K_SYMMETRIC_BODY_H

#include "gguf_search.h"

/* The codes of a sub-block for the scale that the block can store. */
ALWAYS void final_codes(I *code, const V *x, int half, V d)
{
    UNROLL_SOME
    for (int i = 0; i < 16; i++)
        code[i] = clamp(nearest(x[i] / d), -half, half - 1) + half;
}

/* Where that scale is zero, those of its search. */
ALWAYS void searched_codes(I *code, const V *x, int half, V d, const symmetric *grid)
{
    M none = eq(d, splat(0));
    if (any_lane(none))
        for (int i = 0; i < 16; i++)
            code[i] = ipick(none, symmetric_code(grid, x[i], half), code[i]);
}

/* Q3_SIDE sub-blocks at once, since every step of refining one waits for the step before. */
enum { Q3_SIDE = LANES > 1 ? 4 : 1 };
#define SIDE QT_UNROLL for (int u = 0; u < Q3_SIDE; u++)

typedef struct {
    V sum_xl[Q3_SIDE], sum_l2[Q3_SIDE], l[Q3_SIDE][16], w[Q3_SIDE][16], wx[Q3_SIDE][16];
} refinement;

/* Gives weight i of each sub-block the code that fits the others' scale best, if that improves the
 * whole fit. skip: look first whether any lane wants another code. Returns where one changed. */
ALWAYS M refine_one(refinement *r, const V *x, int i, int skip)
{
    V zero = {0};
    M changed = lt(zero, zero);
    SIDE {
        V old = r->l[u][i], w = r->w[u][i], wx = r->wx[u][i];
        V xl = r->sum_xl[u] - wx * old, l2 = r->sum_l2[u] - w * old * old;
        V next = to_float(clamp(nearest(x[16 * u + i] * l2 / xl), -4, 3));
        M may = lt(zero, xl) & not_lanes(eq(next, old));
        if (!skip || any_lane(may)) {
            xl += wx * next;
            l2 += w * next * next;
            M fits = lt(r->sum_xl[u] * r->sum_xl[u] * l2, xl * xl * r->sum_l2[u]);
            M better = may & lt(zero, l2) & fits;
            r->l[u][i] = pick(better, next, old);
            r->sum_xl[u] = pick(better, xl, r->sum_xl[u]);
            r->sum_l2[u] = pick(better, l2, r->sum_l2[u]);
            changed |= better;
        }
    }
    return changed;
}

/* The first codes of a sub-block, and the sums of their fit. */
typedef struct {
    V inverse, sum_xl, sum_l2; /* inverse: zero where empty, and then so are the codes */
    V least_xl;                /* of the terms of sum_xl */
    M empty;
} q3_start;

ALWAYS V q3_first_code(const q3_start *s, V x)
{
    return most(least(nearest_float(s->inverse * x), splat(3)), splat(-4));
}

/* `r`: where to leave the terms of sub-block u, or 0. */
ALWAYS void start_q3(q3_start *s, const V *x, refinement *r, int u)
{
    V zero = {0}, magnitude, top = extreme(x, 16, &magnitude);
    s->empty = lt(magnitude, splat(TINY));
    s->inverse = pick(s->empty, zero, -4.0f / top);
    s->sum_xl = s->sum_l2 = zero;
    s->least_xl = splat(INFINITY);
    UNROLL_SOME
    for (int i = 0; i < 16; i++) {
        V w = x[i] * x[i], wx = w * x[i], l = q3_first_code(s, x[i]), xl = wx * l;
        s->sum_xl += xl;
        s->sum_l2 += w * l * l;
        s->least_xl = least(s->least_xl, xl);
        if (r) {
            r->w[u][i] = w;
            r->wx[u][i] = wx;
            r->l[u][i] = l;
        }
    }
}

/* make_q3_quants: least squares by changing one code at a time, five times round. */
ALWAYS void refine_q3(const V *x, V *scale, V *code)
{
    V zero = {0};
    q3_start start;
    refinement r;
    SIDE {
        start_q3(&start, x + 16 * u, &r, u);
        r.sum_xl[u] = start.sum_xl;
        r.sum_l2[u] = start.sum_l2;
    }
    /* In the first round most steps change something; later, most vectors hold no change. */
    UNROLL_ALONE
    for (int i = 0; i < 16; i++)
        refine_one(&r, x, i, 0);
    for (int round = 1, idle = 0; round < 5 && !idle; round++) {
        M changed = lt(zero, zero);
        UNROLL_ALONE
        for (int i = 0; i < 16; i++)
            changed |= refine_one(&r, x, i, 1);
        idle = !any_lane(changed);
    }
    SIDE {
        scale[u] = pick(lt(zero, r.sum_l2[u]), r.sum_xl[u] / r.sum_l2[u], zero);
        UNROLL_ALONE
        for (int i = 0; i < 16; i++)
            code[16 * u + i] = r.l[u][i];
    }
}

/* What the search of a panel found: sub-block j of lane k has the first codes of start[j], or, with
 * slot[j][k] = n, those of lane n mod LANES of refined[n / LANES]. */
typedef struct {
    V scale[16], refined[16 + Q3_SIDE][16];
    q3_start start[16];
    int16_t slot[16][LANES];
} q3_search;

/* Only where the largest weight is below zero can a code be changed (but for rounding, so every
 * step is looked at): those sub-blocks, about half of them, are gathered from all lanes. */
ALWAYS void search_q3(const panel *p, q3_search *s)
{
    uint8_t lanes[16 * LANES + 1], blocks[16 * LANES + 1]; /* one more to write to at the end */
    int found = 0;
    V zero = {0};
    for (int j = 0; j < 16; j++) {
        q3_start *start = &s->start[j];
        start_q3(start, p->x + 16 * j, 0, 0);
        s->scale[j] = pick(lt(zero, start->sum_l2), start->sum_xl / start->sum_l2, zero);
        s->scale[j] = pick(start->empty, zero, s->scale[j]);
        M movable = lt(start->least_xl, start->sum_xl);
        unsigned mask = mask_bits(movable & not_lanes(start->empty));
        for (int lane = 0; lane < LANES; lane++) {
            int moves = mask >> lane & 1;
            s->slot[j][lane] = (int16_t)(moves ? found : -1);
            lanes[found] = (uint8_t)lane;
            blocks[found] = (uint8_t)j;
            found += moves;
        }
    }
    for (int first = 0; first < found; first += Q3_SIDE * LANES) {
        V x[Q3_SIDE * 16], scale[Q3_SIDE];
        for (int u = 0; u < Q3_SIDE; u++) {
            int lane[LANES], at[LANES];
            for (int k = 0; k < LANES; k++) {
                int n = first + u * LANES + k;
                n = n < found ? n : found - 1;
                lane[k] = lanes[n];
                at[k] = 16 * blocks[n];
            }
            gather_columns(p, lane, at, x + 16 * u);
        }
        refine_q3(x, scale, s->refined[first / LANES]);
        for (int k = 0; k < Q3_SIDE * LANES && first + k < found; k++)
            set_lane(&s->scale[blocks[first + k]], lanes[first + k],
                     lane_of(scale[k / LANES], k % LANES));
    }
}

/* The codes of a sub-block as its search left them, in the lanes of `where`. */
ALWAYS void q3_searched(const q3_search *s, int j, const V *x, M where, I *code)
{
    for (int i = 0; i < 16; i++) {
        I first = truncated(q3_first_code(&s->start[j], x[i])) + 4;
        first = ipick(s->start[j].empty, isplat(0), first);
        for (int lane = 0; lane < LANES; lane++) {
            int slot = s->slot[j][lane];
            if (slot >= 0)
                set_ilane(&first, lane, (int)lane_of(s->refined[slot / LANES][i], slot % LANES) + 4);
        }
        code[i] = ipick(where, first, code[i]);
    }
}

/* Six-bit scales of q3_k, each 0 .. 63, as twelve bytes. */
ALWAYS void pack_q3_scales(const I *scale, I *byte)
{
    for (int i = 0; i < 8; i++)
        byte[i] = (scale[i] & 15) | (scale[8 + i] & 15) << 4;
    for (int i = 0; i < 4; i++)
        byte[8 + i] = scale[i] >> 4 | scale[4 + i] >> 4 << 2 | scale[8 + i] >> 4 << 4 |
                      scale[12 + i] >> 4 << 6;
}

ENCODER void encode_q3_k(panel *p)
{
    V scale[16], d;
    I code[256], scale_code[16], byte[32];
    symmetric grid[16];
    q3_search search;
    if (p->weighted) {
        V sigma2 = 2.0f * square_sum(p->x, 256) / 256.0f, sum_w[16];
            for (int j = 0; j < 16; j++) {
            V w[16];
            const V *x = p->x + 16 * j;
            sum_w[j] = splat(0);
            UNROLL_ALONE
            for (int i = 0; i < 16; i++) {
                w[i] = p->w[16 * j + i] * lane_sqrt(sigma2 + x[i] * x[i]);
                sum_w[j] += w[i];
            }
            grid[j] = search_symmetric(x, w, 16, 4, 0);
            scale[j] = grid[j].scale;
        }
        symmetric block = search_symmetric(scale, sum_w, 16, 32, 1);
        for (int j = 0; j < 16; j++)
            scale_code[j] = symmetric_code(&block, scale[j], 32);
        d = block.scale;
    } else {
        search_q3(p, &search);
        for (int j = 0; j < 16; j++)
            scale[j] = search.scale[j];
        V magnitude, top = extreme_in_order(scale, 16, &magnitude), inverse = -32.0f / top;
        M none = eq(top, splat(0));
        for (int j = 0; j < 16; j++) {
            I byte_code = nearest(inverse * scale[j]) << 24 >> 24;
            scale_code[j] = ipick(none, isplat(0), clamp(byte_code, -32, 31) + 32);
        }
        d = pick(none, splat(0), 1.0f / inverse);
    }
    pack_q3_scales(scale_code, byte);
    put_bytes(p, 96, byte, 12);
    I half_d = to_half(d);
    put_half(p, 108, half_d);
    d = from_half(half_d);
    for (int j = 0; j < 16; j++) {
        V unit = d * to_float(scale_code[j] - 32);
        I *q = code + 16 * j;
        final_codes(q, p->x + 16 * j, 4, unit);
        if (p->weighted)
            searched_codes(q, p->x + 16 * j, 4, unit, &grid[j]);
        else if (any_lane(eq(unit, splat(0))))
            q3_searched(&search, j, p->x + 16 * j, eq(unit, splat(0)), q);
    }
    ROLLED
    for (int i = 0; i < 32; i++) {
        byte[i] = isplat(0);
        for (int j = 0; j < 8; j++)
            byte[i] |= code[32 * j + i] >> 2 << j;
    }
    put_bytes(p, 0, byte, 32);
    for (int half = 0; half < 2; half++) {
        const I *q = code + 128 * half;
        for (int i = 0; i < 32; i++)
            byte[i] = (q[i] & 3) | (q[i + 32] & 3) << 2 | (q[i + 64] & 3) << 4 |
                      (q[i + 96] & 3) << 6;
        put_bytes(p, 32 + 32 * half, byte, 32);
    }
}

ENCODER void encode_q6_k(panel *p)
{
    V scale[16], magnitude;
    I code[256], scale_code[16], low[64], high[32];
    symmetric grid[16];
    for (int j = 0; j < 16; j++) {
        const V *x = p->x + 16 * j;
        V w[16];
        UNROLL_ALONE
        for (int i = 0; i < 16; i++)
            w[i] = p->weighted ? p->w[16 * j + i] : x[i] * x[i];
        grid[j] = search_symmetric(x, w, 16, 32, 0);
        scale[j] = grid[j].scale;
    }
    V top = extreme_in_order(scale, 16, &magnitude), inverse = -128.0f / top;
    M empty = lt(magnitude, splat(TINY));
    I half_d = ipick(empty, isplat(0), to_half(1.0f / inverse));
    put_half(p, 208, half_d);
    V d = from_half(half_d);
    for (int j = 0; j < 16; j++) {
        scale_code[j] = ileast(nearest(inverse * scale[j]), isplat(127)) << 24 >> 24;
        scale_code[j] = ipick(empty, isplat(0), scale_code[j]);
        V unit = d * to_float(scale_code[j]);
        final_codes(code + 16 * j, p->x + 16 * j, 32, unit);
        searched_codes(code + 16 * j, p->x + 16 * j, 32, unit, &grid[j]);
    }
    if (any_lane(empty))
        for (int i = 0; i < 256; i++)
            code[i] = ipick(empty, isplat(0), code[i]);
    for (int j = 0; j < 16; j++)
        scale_code[j] &= 255;
    put_bytes(p, 192, scale_code, 16);
    for (int half = 0; half < 2; half++) {
        const I *q = code + 128 * half;
        for (int i = 0; i < 32; i++) {
            low[i] = (q[i] & 15) | (q[i + 64] & 15) << 4;
            low[i + 32] = (q[i + 32] & 15) | (q[i + 96] & 15) << 4;
            high[i] = q[i] >> 4 | q[i + 32] >> 4 << 2 | q[i + 64] >> 4 << 4 | q[i + 96] >> 4 << 6;
        }
        put_bytes(p, 64 * half, low, 64);
        put_bytes(p, 128 + 32 * half, high, 32);
    }
}

#endif
