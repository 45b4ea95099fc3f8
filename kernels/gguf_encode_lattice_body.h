/* The encoders of iq2_xxs, iq2_xs, iq2_s, iq3_xxs and iq3_s: magnitudes from a lattice, signs apart.
 * The layouts are told in gguf_dequant_iq.h; the arithmetic agrees with ggml's reference encoders bit
 * for bit. Where ggml ends the process (a search that stays beside the lattice), point 0 stands. */
#ifndef QTOOL_GGUF_ENCODE_LATTICE_BODY_H
#define QTOOL_GGUF_ENCODE_LATTICE_BODY_H

#include "gguf_near.h"
#include "gguf_search.h"

typedef struct {
    int which;
    int bits, size;     /* bits of a code; weights of a sub-block */
    int top;            /* the largest code; codes stand for 2 q + 1 */
    int even;           /* an even number of signs in each eight weights */
    int trials;         /* ranges tried on either side of the usual one ... */
    float step;         /* ... and how far apart */
    float empty;        /* weights below it count as zero */
    int again;          /* at last look at: 0 groups beside the lattice, 1 all groups */
    float fudge;        /* of the scale that is stored */
} lattice_type;

/* One sub-block of every lane. Groups are the weights that share a point. */
typedef struct {
    V x[32], w[32], wx[32];
    float x_row[LANES][32], root_row[LANES][32];
    I code[8];
    unsigned beside[8]; /* lanes whose group was not on the lattice by itself */
    I signs[4];
    M live;             /* lanes that are not empty */
    V scale;
} sub_block;

/* What all sub-blocks of the lanes have found. */
typedef struct {
    uint16_t index[LANES][64];
    uint8_t signs[LANES][32];
    V scale[16];
    M empty[16];
} findings;

/* Magnitudes and signs; with an even number of signs, the weight that costs least changes its own. */
ALWAYS void take_signs(sub_block *b, const V *x, const V *w, lattice_type t)
{
    for (int k = 0; k < t.size / 8; k++) {
        I signs = isplat(0), at = isplat(0);
        V least_cost = {0};
        for (int i = 8 * k; i < 8 * k + 8; i++) {
            M minus = not_lanes(le(splat(0), x[i]));
            b->x[i] = pick(minus, -x[i], x[i]);
            signs ^= ipick(minus, isplat(1 << i % 8 | 256), isplat(0)); /* bit 8: their parity */
            V cost = w[i] * x[i] * x[i];
            M cheaper = i % 8 ? lt(cost, least_cost) : all_lanes();
            least_cost = pick(cheaper, cost, least_cost);
            at = ipick(cheaper, isplat(i % 8), at);
        }
        if (t.even) {
            M odd = ilt(isplat(255), signs);
            for (int i = 0; i < 8; i++) {
                M flip = odd & ieq(at, isplat(i));
                b->x[8 * k + i] = pick(flip, -b->x[8 * k + i], b->x[8 * k + i]);
                signs ^= ipick(flip, isplat(1 << i), isplat(0));
            }
        }
        b->signs[k] = signs & (t.even ? 127 : 255);
    }
}

/* Codes of the lanes in `lanes` for a scale; the lattice's nearest point where they are none. */
ALWAYS void snap(sub_block *b, const gguf_lattice *lattice, near_shape shape, const near_values *values, lattice_type t,
                 int group, V inverse, V scale, unsigned lanes, I *code, unsigned *beside)
{
    int n = shape.coordinates, from = group * n;
    int32_t codes[LANES];
    float scales[LANES];
    I packed = isplat(0);
    QT_UNROLL
    for (int i = 0; i < n; i++) {
        I q = clamp(nearest(0.5f * (inverse * b->x[from + i] - 1.0f)), 0, t.top);
        packed |= q << (t.bits * i);
    }
    spread_ilanes(codes, packed);
    spread_lanes(scales, scale);
    *beside = 0;
    for (; lanes; lanes &= lanes - 1) {
        int lane = first_lane(lanes);
        int32_t found = lattice->find[codes[lane]];
        if (found >= 0)
            continue;
        *beside |= 1u << lane;
        codes[lane] = (int32_t)best_near(neighbours(lattice, found), shape, values,
                                         &b->x_row[lane][from], &b->root_row[lane][from],
                                         scales[lane]);
    }
    *code = ilanes_of(codes);
}

/* sum w x q and sum w q^2. */
ALWAYS void fit(const sub_block *b, const I *code, lattice_type t, V *sum_qx, V *sum_q2)
{
    int n = t.bits == 2 ? 8 : 4;
    *sum_qx = *sum_q2 = splat(0);
    for (int i = 0; i < t.size; i++) {
        V q = to_float((code[i / n] >> (t.bits * (i % n)) & ((1 << t.bits) - 1)) * 2 + 1);
        *sum_qx += b->wx[i] * q;
        *sum_q2 += b->w[i] * q * q;
    }
}

/* The best of the trial ranges, then once more the points nearest at the scale it gave. */
ALWAYS void search(sub_block *b, const gguf_lattice *lattice, near_shape shape, const near_values *values,
                   lattice_type t, V extent)
{
    int groups = t.size / (t.bits == 2 ? 8 : 4);
    V best = {0}, zero = {0}, sum_qx, sum_q2;
    unsigned live = mask_bits(b->live);
    for (int k = -t.trials; k <= t.trials; k++) {
        I code[8];
        unsigned beside[8];
        V inverse = ((float)(t.bits == 2 ? 5 : 15) + (float)k * t.step) / extent;
        V scale = 1.0f / inverse;
        for (int g = 0; g < groups; g++)
            snap(b, lattice, shape, values, t, g, inverse, scale, live, &code[g], &beside[g]);
        fit(b, code, t, &sum_qx, &sum_q2);
        M better = lt(zero, sum_q2) & lt(best * sum_q2, sum_qx * sum_qx);
        V trial = sum_qx / sum_q2;
        b->scale = pick(better, trial, b->scale);
        best = pick(better, trial * sum_qx, best);
        unsigned lanes = mask_bits(better);
        for (int g = 0; g < groups; g++) {
            b->code[g] = ipick(better, code[g], b->code[g]);
            b->beside[g] = (b->beside[g] & ~lanes) | (beside[g] & lanes);
        }
    }
    unsigned again = 0, positive = mask_bits(lt(zero, b->scale)) & live;
    for (int g = 0; g < groups; g++)
        again |= t.which == QT_IQ2_XXS ? positive : b->beside[g] & positive;
    if (!again)
        return;
    V inverse = 1.0f / b->scale;
    for (int g = 0; g < groups; g++) {
        I code;
        unsigned unused, lanes = t.again ? again : again & b->beside[g];
        snap(b, lattice, shape, values, t, g, inverse, b->scale, lanes, &code, &unused);
        for (int lane = 0; lane < LANES; lane++)
            if (lanes >> lane & 1)
                set_ilane(&b->code[g], lane, ilane_of(code, lane));
    }
    fit(b, b->code, t, &sum_qx, &sum_q2);
    V refit = sum_qx / sum_q2;
    M fits = lt(zero, sum_q2);
    for (int lane = 0; lane < LANES; lane++)
        if ((again & mask_bits(fits)) >> lane & 1)
            set_lane(&b->scale, lane, lane_of(refit, lane));
}

ALWAYS void encode_sub_block(panel *p, findings *f, const gguf_lattice *lattice,
                             near_shape shape, const near_values *values, lattice_type t, int j, V sigma2)
{
    const V *x = p->x + t.size * j;
    int n = t.bits == 2 ? 8 : 4, groups = t.size / n;
    V root[32], zero = {0};
    sub_block b;
    b.x[0] = zero; /* written below, which a compiler may not see */
    for (int i = 0; i < t.size; i++) {
        V square = x[i] * x[i];
        if (p->weighted)
            b.w[i] = p->w[t.size * j + i] * lane_sqrt(sigma2 + square);
        else
            b.w[i] = t.which == QT_IQ2_S ? 0.25f * sigma2 + square : square;
        root[i] = lane_sqrt(b.w[i]);
    }
    take_signs(&b, x, b.w, t);
    V extent = b.x[0];
    for (int i = 0; i < t.size; i++) {
        extent = pick(lt(b.x[i], extent), extent, b.x[i]);
        b.wx[i] = b.w[i] * b.x[i];
    }
    store_rows(b.x, t.size, b.x_row);
    store_rows(root, t.size, b.root_row);
    M empty = t.empty > 0 ? lt(extent, splat(t.empty)) : eq(extent, zero);
    for (int g = 0; g < groups; g++) {
        b.code[g] = isplat(0);
        b.beside[g] = t.which == QT_IQ3_S ? ~0u : 0u;
    }
    b.scale = extent / (float)(t.bits == 2 ? 5 : 15);
    if (t.which == QT_IQ2_XXS) {
        I code[32];
        b.scale = search_positive(b.x, b.w, 32, 4, code);
        extent = b.scale * 3.0f;
        empty |= le(extent, zero);
        for (int i = 0; i < 32; i++)
            b.code[i / 8] |= (code[i] & 3) << 2 * (i % 8);
    }
    b.live = not_lanes(empty);
    search(&b, lattice, shape, values, t, extent);
    M minus = lt(b.scale, zero);
    b.scale = pick(empty, zero, pick(minus, -b.scale, b.scale));
    f->scale[j] = b.scale;
    f->empty[j] = empty;
    for (int k = 0; k < t.size / 8; k++) {
        I signs = b.signs[k] ^ ipick(minus, isplat(t.even ? 127 : 255), isplat(0));
        signs = ipick(empty, isplat(0), signs);
        for (int lane = 0; lane < LANES; lane++)
            f->signs[lane][t.size / 8 * j + k] = (uint8_t)ilane_of(signs, lane);
    }
    for (int g = 0; g < groups; g++) {
        I code = ipick(empty, isplat(0), b.code[g]);
        for (int lane = 0; lane < LANES; lane++) {
            int32_t found = lattice->find[ilane_of(code, lane)];
            f->index[lane][groups * j + g] = (uint16_t)(found < 0 ? 0 : found);
        }
    }
}

/* ggml's encoder of iq3_s does not step past a sub-block of zeros when it writes points and signs:
 * those of the sub-blocks that follow move up, while the ninth bits stay where they belong. Such
 * blocks do not stand for their weights, but these are the bytes. */
ALWAYS void close_up(findings *f, int lane)
{
    int to = 0;
    for (int j = 0; j < 8; j++) {
        if (mask_bits(f->empty[j]) >> lane & 1)
            continue;
        for (int k = 0; to < j && k < 8; k++) {
            uint16_t low = f->index[lane][8 * j + k] & 255;
            f->index[lane][8 * to + k] = (uint16_t)((f->index[lane][8 * to + k] & 256) | low);
        }
        for (int k = 0; k < 4; k++)
            f->signs[lane][4 * to + k] = f->signs[lane][4 * j + k];
        to++;
    }
    for (; to < 8; to++) {
        for (int k = 0; k < 8; k++)
            f->index[lane][8 * to + k] &= 256;
        for (int k = 0; k < 4; k++)
            f->signs[lane][4 * to + k] = 0;
    }
}

/* Lays out one block; scale holds the codes of its sub-blocks. */
ALWAYS void put_block(uint8_t *to, uint16_t d, const uint16_t *index, const uint8_t *signs,
                      const uint8_t *scale, lattice_type t)
{
    uint8_t *at = to + 2;
    store_16(to, d);
    if (t.which == QT_IQ2_XXS || t.which == QT_IQ3_XXS)
        for (int j = 0; j < 8; j++) {
            uint32_t word = (uint32_t)scale[j] << 28;
            for (int k = 0; k < 4; k++)
                word |= (uint32_t)signs[4 * j + k] << 7 * k;
            if (t.which == QT_IQ2_XXS) {
                for (int k = 0; k < 4; k++)
                    at[8 * j + k] = (uint8_t)index[4 * j + k];
                store_32(at + 8 * j + 4, word);
            } else {
                for (int k = 0; k < 8; k++)
                    at[8 * j + k] = (uint8_t)index[8 * j + k];
                store_32(at + 64 + 4 * j, word);
            }
        }
    if (t.which == QT_IQ2_XS)
        for (int k = 0; k < 32; k++)
            store_16(at + 2 * k, (uint16_t)(index[k] | signs[k] << 9));
    if (t.which == QT_IQ2_S)
        for (int k = 0; k < 32; k++) {
            at[k] = (uint8_t)index[k];
            at[32 + k] = signs[k];
            at[64 + k / 4] = (uint8_t)((k % 4 ? at[64 + k / 4] : 0) | index[k] >> 8 << 2 * (k % 4));
        }
    if (t.which == QT_IQ3_S)
        for (int k = 0; k < 64; k++) {
            at[k] = (uint8_t)index[k];
            at[64 + k / 8] = (uint8_t)((k % 8 ? at[64 + k / 8] : 0) | index[k] >> 8 << k % 8);
            if (k < 32)
                at[72 + k] = signs[k];
        }
    int offset = t.which == QT_IQ2_XS ? 64 : t.which == QT_IQ2_S ? 72 : 104;
    if (t.which == QT_IQ2_XS || t.which == QT_IQ2_S || t.which == QT_IQ3_S)
        for (int k = 0; k < 128 / t.size; k++)
            at[offset + k] = (uint8_t)(scale[2 * k] | scale[2 * k + 1] << 4);
}

ALWAYS void encode_lattice(panel *p, lattice_type t)
{
    const gguf_lattice *lattice = lattice_of(p, t.which); /* built before */
    const float odd[8] = {1, 3, 5, 7, 9, 11, 13, 15};
    near_shape shape = {t.bits, t.bits == 2 ? 8 : 4, t.bits == 3 || t.which == QT_IQ2_S};
    near_values values = values_of(t.bits, odd);
    findings f;
    V zero = {0}, sigma2 = square_sum(p->x, 256), largest = zero;
    if (t.which == QT_IQ2_XXS || t.which == QT_IQ2_XS)
        sigma2 = sigma2 / 256.0f;
    else
        sigma2 = 2.0f * sigma2 / 256.0f;
    int blocks = 256 / t.size;
    for (int j = 0; j < blocks; j++) {
        encode_sub_block(p, &f, lattice, shape, &values, t, j, sigma2);
        largest = pick(lt(f.scale[j], largest), largest, f.scale[j]);
    }
    V d = largest / 31.0f, inverse = 1.0f / d;
    M none = eq(largest, zero);
    I half = ipick(none, isplat(0), to_half(d * t.fudge)), code[16];
    for (int j = 0; j < blocks; j++)
        code[j] = clamp(nearest(0.5f * (inverse * f.scale[j] - 1.0f)), 0, 15);
    for (int lane = 0; lane < LANES; lane++) {
        uint8_t scale[16];
        int zeros = mask_bits(none) >> lane & 1;
        for (int j = 0; j < blocks; j++)
            scale[j] = zeros ? 0 : (uint8_t)ilane_of(code[j], lane);
        if (zeros && t.which != QT_IQ2_S && t.which != QT_IQ3_S) {
            for (int k = 0; k < 64; k++)
                f.index[lane][k] = 0;
            for (int k = 0; k < 32; k++)
                f.signs[lane][k] = 0;
        }
        if (t.which == QT_IQ3_S)
            close_up(&f, lane);
        put_block(p->to[lane], (uint16_t)ilane_of(half, lane), f.index[lane], f.signs[lane], scale, t);
    }
}

ENCODER void encode_iq2_xxs(panel *p)
{
    const lattice_type t = {QT_IQ2_XXS, 2, 32, 2, 1, 6, 0.1f, TINY, 1, 1.0f};
    encode_lattice(p, t);
}

ENCODER void encode_iq2_xs(panel *p)
{
    const lattice_type t = {QT_IQ2_XS, 2, 16, 2, 1, 9, 0.1f, TINY, 0, 1.0f};
    encode_lattice(p, t);
}

ENCODER void encode_iq2_s(panel *p)
{
    const lattice_type t = {QT_IQ2_S, 2, 16, 2, 0, 9, 0.1f, 1e-8f, 0, 0.9875f};
    encode_lattice(p, t);
}

ENCODER void encode_iq3_xxs(panel *p)
{
    const lattice_type t = {QT_IQ3_XXS, 3, 32, 7, 1, 15, 0.2f, 1e-8f, 0, 1.0125f};
    encode_lattice(p, t);
}

ENCODER void encode_iq3_s(panel *p)
{
    const lattice_type t = {QT_IQ3_S, 3, 32, 7, 0, 9, 0.2f, 0.0f, 1, 1.033f};
    encode_lattice(p, t);
}

#endif
