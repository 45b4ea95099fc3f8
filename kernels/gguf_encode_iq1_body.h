/* The encoders of iq1_s and iq1_m: -1, 0 or 1, all moved by an eighth one way or the other. The layouts
 * are told in gguf_dequant_iq.h; the arithmetic agrees with ggml's reference encoders bit for bit.
 *
 * The weights of a sub-block are sorted; every way to cut them into three runs is scored by its
 * least-squares scale; codes beside the lattice then move to its nearest point. */
#ifndef QTOOL_GGUF_ENCODE_IQ1_BODY_H
#define QTOOL_GGUF_ENCODE_IQ1_BODY_H

#include "gguf_near.h"
#include "gguf_search.h"

/* One sub-block of every lane. In x and w, weights stand as they came; sorted, value and weight
 * stand in ascending order, and place says where each came from. */
typedef struct {
    V x[32], w[32], value[32], weight[32];
    I place[32];
    float x_row[LANES][32], w_row[LANES][32];
    V scale, best;
    I first, second; /* cuts: so many codes 0, then 1 up to the second, then 2 */
    I kind;          /* of the shifts: bit g set where group g is moved down; -1: none found */
    I code[4];       /* packed, of each eight weights */
    M empty;
} ternary;

/* Puts two places of a sorting network in order; equal values stay as they came. */
ALWAYS void put_in_order(ternary *b, int i, int j)
{
    V u = b->value[i], v = b->value[j], wu = b->weight[i], wv = b->weight[j];
    I pu = b->place[i], pv = b->place[j];
    M swap = lt(v, u) | (eq(u, v) & ilt(pv, pu));
    b->value[i] = pick(swap, v, u);
    b->value[j] = pick(swap, u, v);
    b->weight[i] = pick(swap, wv, wu);
    b->weight[j] = pick(swap, wu, wv);
    b->place[i] = ipick(swap, pv, pu);
    b->place[j] = ipick(swap, pu, pv);
}

/* Batcher's odd-even merge sort of n, a power of two. */
ALWAYS void sort(ternary *b, int n)
{
    for (int i = 0; i < n; i++) {
        b->value[i] = b->x[i];
        b->weight[i] = b->w[i];
        b->place[i] = isplat(i);
    }
    for (int p = 1; p < n; p *= 2)
        for (int k = p; k >= 1; k /= 2)
            for (int j = k % p; j + k < n; j += 2 * k)
                for (int i = j; i < j + k && i + k < n; i++)
                    if (i / (2 * p) == (i + k) / (2 * p))
                        put_in_order(b, i, i + k);
}

/* Takes a cut and shift if it explains more than the best so far. */
ALWAYS void score(ternary *b, V sum_qx, V sum_q2, int i1, int i2, int kind)
{
    M better = lt(splat(0), sum_q2) & lt(b->best * sum_q2, sum_qx * sum_qx);
    if (!any_lane(better))
        return;
    V scale = sum_qx / sum_q2;
    b->scale = pick(better, scale, b->scale);
    b->best = pick(better, scale * sum_qx, b->best);
    b->first = ipick(better, isplat(i1), b->first);
    b->second = ipick(better, isplat(i2), b->second);
    b->kind = ipick(better, isplat(kind), b->kind);
}

/* All cuts of 32 weights that share one shift. */
ALWAYS void cut_all(ternary *b)
{
    V sx[33], sw[33];
    sx[0] = sw[0] = splat(0);
    for (int i = 0; i < 32; i++) {
        sx[i + 1] = sx[i] + b->weight[i] * b->value[i];
        sw[i + 1] = sw[i] + b->weight[i];
    }
    for (int i1 = 0; i1 <= 32; i1++) {
        V up = sx[i1] * -0.875f, up2 = sw[i1] * -0.875f * -0.875f;
        V down = sx[i1] * -1.125f, down2 = sw[i1] * -1.125f * -1.125f;
        for (int i2 = i1; i2 <= 32; i2++) {
            V middle = (sx[i2] - sx[i1]) * 0.125f, middle2 = (sw[i2] - sw[i1]) * 0.125f * 0.125f;
            V top = sx[32] - sx[i2], top2 = sw[32] - sw[i2];
            score(b, up + middle + top * 1.125f, up2 + middle2 + top2 * 1.125f * 1.125f, i1, i2,
                  0);
            score(b, down - middle + top * 0.875f, down2 + middle2 + top2 * 0.875f * 0.875f, i1,
                  i2, 15);
        }
    }
}

/* All cuts of 16 weights whose halves have shifts of their own. */
ALWAYS void cut_halves(ternary *b)
{
    V px[2][17], pw[2][17], px_up[2], px_down[2], pw_up[2], pw_down[2];
    for (int h = 0; h < 2; h++) {
        px[h][0] = pw[h][0] = splat(0);
        for (int i = 0; i < 16; i++) {
            M mine = ieq(b->place[i] >> 3, isplat(h));
            px[h][i + 1] = pick(mine, px[h][i] + b->weight[i] * b->value[i], px[h][i]);
            pw[h][i + 1] = pick(mine, pw[h][i] + b->weight[i], pw[h][i]);
        }
        px_up[h] = px[h][16] * 1.125f;
        px_down[h] = px[h][16] * 0.875f;
        pw_up[h] = pw[h][16] * 1.125f * 1.125f;
        pw_down[h] = pw[h][16] * 0.875f * 0.875f;
    }
    for (int i1 = 0; i1 <= 16; i1++)
        for (int i2 = i1; i2 <= 16; i2++) {
            V up[2], down[2], up2[2], down2[2];
            for (int h = 0; h < 2; h++) {
                V both = px[h][i1] + px[h][i2];
                up[h] = px_up[h] - both;
                down[h] = px_down[h] - both;
                up2[h] = pw_up[h] + pw[h][i1] * 0.75f + pw[h][i2] * -1.25f;
                down2[h] = pw_down[h] + pw[h][i1] * 1.25f + pw[h][i2] * -0.75f;
            }
            score(b, up[0] + up[1], up2[0] + up2[1], i1, i2, 0);
            score(b, up[0] + down[1], up2[0] + down2[1], i1, i2, 2);
            score(b, down[0] + up[1], down2[0] + up2[1], i1, i2, 1);
            score(b, down[0] + down[1], down2[0] + down2[1], i1, i2, 3);
        }
}

/* What code number i of some groups stands for. */
ALWAYS V value_of(const I *code, I kind, int i)
{
    I moved_down = kind >> (i / 8) & 1;
    V shift = pick(ieq(moved_down, isplat(0)), splat(0.125f), splat(-0.125f));
    return to_float((code[i / 8] >> 2 * (i % 8) & 3) - 1) + shift;
}

/* The codes of the best cut, moved onto the lattice; the scale fitted again where any moved. */
ALWAYS void settle(ternary *b, int n, const gguf_lattice *lattice, const near_values values[2])
{
    const near_shape shape = {2, 8, 0};
    V zero = {0}, sum_qx = zero, sum_q2 = zero;
    M minus = lt(b->scale, zero);
    int groups = n / 8;
    for (int g = 0; g < groups; g++)
        b->code[g] = isplat(0);
    for (int i = 0; i < n; i++) {
        I q = ipick(ilt(isplat(i), b->second), isplat(1), isplat(2));
        q = ipick(ilt(isplat(i), b->first), isplat(0), q);
        q = ipick(minus, 2 - q, q) << 2 * (b->place[i] & 7);
        for (int g = 0; g < groups; g++)
            b->code[g] |= ipick(ieq(b->place[i] >> 3, isplat(g)), q, isplat(0));
    }
    b->scale = pick(minus, -b->scale, b->scale);
    b->kind = ipick(minus, b->kind ^ 15, b->kind);
    unsigned moved = 0, live = mask_bits(not_lanes(b->empty));
    int32_t codes[LANES], kinds[LANES];
    float scales[LANES];
    spread_ilanes(kinds, b->kind);
    spread_lanes(scales, b->scale);
    for (int g = 0; g < groups; g++) {
        spread_ilanes(codes, b->code[g]);
        for (unsigned lanes = live; lanes; lanes &= lanes - 1) {
            int lane = first_lane(lanes);
            int32_t found = lattice->find[codes[lane]];
            if (found >= 0)
                continue;
            moved |= 1u << lane;
            codes[lane] = (int32_t)best_near(neighbours(lattice, found), shape,
                                             &values[kinds[lane] >> g & 1], &b->x_row[lane][8 * g],
                                             &b->w_row[lane][8 * g], scales[lane]);
        }
        b->code[g] = ilanes_of(codes);
    }
    for (int i = 0; i < n; i++) {
        V q = value_of(b->code, b->kind, i), wq = b->w[i] * q;
        sum_qx += wq * b->x[i];
        sum_q2 += wq * q;
    }
    unsigned fits = mask_bits(lt(zero, sum_qx) & lt(zero, sum_q2)) & moved;
    V refit = sum_qx / sum_q2;
    for (int lane = 0; lane < LANES; lane++)
        if (fits >> lane & 1)
            set_lane(&b->scale, lane, lane_of(refit, lane));
}

/* How much an error of a weight counts. */
ALWAYS V weight_of(const panel *p, int i, V sigma2)
{
    V square = p->x[i] * p->x[i];
    return p->weighted ? p->w[i] * lane_sqrt(sigma2 + square) : square;
}

/* Codes, shifts and scale of sub-block j of n weights. */
ALWAYS void encode_ternary(ternary *b, const panel *p, int j, int n, V sigma2, float tiny,
                             const gguf_lattice *lattice, const near_values values[2])
{
    const V *x = p->x + n * j;
    V extent = absolute(x[0]);
    for (int i = 0; i < n; i++) {
        b->x[i] = x[i];
        b->w[i] = weight_of(p, n * j + i, sigma2);
        extent = most(extent, absolute(x[i]));
    }
    store_rows(b->x, n, b->x_row);
    store_rows(b->w, n, b->w_row);
    sort(b, n);
    b->scale = extent;
    b->best = splat(-0x1.fffffep127f);
    b->first = b->second = isplat(0);
    b->kind = isplat(-1);
    if (n == 32)
        cut_all(b);
    else
        cut_halves(b);
    b->empty = lt(extent, splat(tiny)) | ieq(b->kind, isplat(-1));
    settle(b, n, lattice, values);
    b->scale = pick(b->empty, splat(0), b->scale);
    b->kind = ipick(b->empty, isplat(0), b->kind);
    for (int g = 0; g < n / 8; g++)
        b->code[g] = ipick(b->empty, isplat(0), b->code[g]); /* point 0 */
}

ALWAYS void shifted_values(near_values values[2])
{
    const float up[4] = {-0.875f, 0.125f, 1.125f, 0}, down[4] = {-1.125f, -0.125f, 0.875f, 0};
    values[0] = values_of(2, up);
    values[1] = values_of(2, down);
}

ALWAYS unsigned index_of(const gguf_lattice *lattice, I code, int lane)
{
    int32_t found = lattice->find[ilane_of(code, lane)];
    return found < 0 ? 0 : (unsigned)found;
}

/* d of the largest scale, and for each sub-block the code of its own. */
ALWAYS V scale_codes(const V *scale, int n, V largest, I *code)
{
    V d = largest / 15.0f, inverse = 1.0f / d;
    for (int j = 0; j < n; j++)
        code[j] = clamp(nearest(0.5f * (inverse * scale[j] - 1.0f)), 0, 7);
    return d;
}

ENCODER void encode_iq1_s(panel *p)
{
    const gguf_lattice *lattice = lattice_of(p, QT_IQ1); /* built before */
    near_values values[2];
    V sigma2 = 2.0f * square_sum(p->x, 256) / 256.0f, scale[8], largest = {0};
    I kind[8], code[8];
    uint16_t high[LANES][8];
    shifted_values(values);
    for (int j = 0; j < 8; j++) {
        ternary b;
        encode_ternary(&b, p, j, 32, sigma2, 1e-12f, lattice, values);
        scale[j] = b.scale;
        kind[j] = b.kind;
        largest = pick(lt(b.scale, largest), largest, b.scale);
        for (int lane = 0; lane < LANES; lane++) {
            unsigned bits = 0;
            for (int g = 0; g < 4; g++) {
                unsigned index = index_of(lattice, b.code[g], lane);
                p->to[lane][2 + 4 * j + g] = (uint8_t)index;
                bits |= index >> 8 << 3 * g;
            }
            high[lane][j] = (uint16_t)bits;
        }
    }
    V d = scale_codes(scale, 8, largest, code);
    M none = eq(largest, splat(0));
    I half = ipick(none, isplat(0), to_half(d * 1.125f));
    for (int j = 0; j < 8; j++)
        code[j] = ipick(none, isplat(0), code[j] | (kind[j] & 8));
    for (int lane = 0; lane < LANES; lane++) {
        store_16(p->to[lane], (uint16_t)ilane_of(half, lane));
        for (int j = 0; j < 8; j++)
            store_16(p->to[lane] + 34 + 2 * j,
                     (uint16_t)(high[lane][j] | ilane_of(code[j], lane) << 12));
    }
}

ENCODER void encode_iq1_m(panel *p)
{
    const gguf_lattice *lattice = lattice_of(p, QT_IQ1); /* built before */
    near_values values[2];
    V zero = {0}, scale[16], largest = zero, sum_qx = zero, sum_q2 = zero;
    V sigma2 = 2.0f * square_sum(p->x, 256) / 256.0f;
    I group[32], kind[16], code[16], word[4];
    shifted_values(values);
    for (int j = 0; j < 16; j++) {
        ternary b;
        encode_ternary(&b, p, j, 16, sigma2, 1e-7f, lattice, values);
        scale[j] = b.scale;
        kind[j] = b.kind;
        group[2 * j] = b.code[0];
        group[2 * j + 1] = b.code[1];
        largest = pick(lt(b.scale, largest), largest, b.scale);
    }
    V d = scale_codes(scale, 16, largest, code);
    M none = eq(largest, zero);
    for (int j = 0; j < 16; j++) {
        V times = to_float(2 * code[j] + 1);
        for (int i = 0; i < 16; i++) {
            V q = value_of(group + 2 * j, kind[j], i) * times;
            V wq = weight_of(p, 16 * j + i, sigma2) * q;
            sum_qx += wq * p->x[16 * j + i];
            sum_q2 += wq * q;
        }
    }
    d = pick(lt(zero, sum_q2), sum_qx / sum_q2, d);
    I half = to_half(d * 1.1125f);
    for (int k = 0; k < 4; k++) {
        word[k] = (half >> 4 * k & 15) << 12;
        for (int i = 0; i < 4; i++)
            word[k] |= code[4 * k + i] << 3 * i;
        word[k] = ipick(none, isplat(0), word[k]);
    }
    for (int j = 0; j < 16; j++)
        kind[j] = ipick(none, isplat(0), kind[j]);
    for (int lane = 0; lane < LANES; lane++) {
        for (int j = 0; j < 16; j++) {
            unsigned a = index_of(lattice, group[2 * j], lane);
            unsigned c = index_of(lattice, group[2 * j + 1], lane);
            unsigned shifts = (unsigned)ilane_of(kind[j], lane);
            p->to[lane][2 * j] = (uint8_t)a;
            p->to[lane][2 * j + 1] = (uint8_t)c;
            p->to[lane][32 + j] =
                (uint8_t)(a >> 8 | c >> 8 << 4 | (shifts & 1) << 3 | (shifts & 2) << 6);
        }
        for (int k = 0; k < 4; k++)
            store_16(p->to[lane] + 48 + 2 * k, (uint16_t)ilane_of(word[k], lane));
    }
}

#endif
