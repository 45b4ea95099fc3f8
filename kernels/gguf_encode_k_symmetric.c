/* Encodes q3_k and q6_k: sub-blocks of 16 weights on a grid around zero. The layouts are told in
 * gguf_dequant_k.h; the arithmetic agrees with ggml's reference encoders bit for bit. */
#include "gguf_encode.h"
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
    M none = eq(d, (V){0});
    if (any_lane(none))
        for (int i = 0; i < 16; i++)
            code[i] = ipick(none, symmetric_code(grid, x[i], half), code[i]);
}

/* Q3_SIDE sub-blocks at once, since every step of refining one waits for the step before. */
enum { Q3_SIDE = 4 };
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

/* make_q3_quants: least squares by changing one code at a time, five times round. */
ALWAYS void refine_q3(const V *x, V *scale, V *code)
{
    V zero = {0}, low = splat(-4), high = splat(3);
    M empty[Q3_SIDE];
    refinement r;
    SIDE {
        V magnitude, top = extreme(x + 16 * u, 16, &magnitude), inverse = -4.0f / top;
        empty[u] = lt(magnitude, splat(TINY));
        r.sum_xl[u] = r.sum_l2[u] = zero;
        for (int i = 0; i < 16; i++) {
            V at = x[16 * u + i], w = at * at;
            V first = most(least(nearest_float(inverse * at), high), low);
            r.w[u][i] = w;
            r.wx[u][i] = w * at;
            r.l[u][i] = pick(empty[u], zero, first);
            r.sum_xl[u] += w * at * r.l[u][i];
            r.sum_l2[u] += w * r.l[u][i] * r.l[u][i];
        }
    }
    /* In the first rounds most steps change something; later, most vectors hold no change. */
    for (int i = 0; i < 16; i++)
        refine_one(&r, x, i, 0);
    for (int round = 1, idle = 0; round < 5 && !idle; round++) {
        M changed = lt(zero, zero);
        for (int i = 0; i < 16; i++)
            changed |= refine_one(&r, x, i, 1);
        idle = !any_lane(changed);
    }
    SIDE {
        V fit = pick(lt(zero, r.sum_l2[u]), r.sum_xl[u] / r.sum_l2[u], zero);
        scale[u] = pick(empty[u], zero, fit);
        for (int i = 0; i < 16; i++)
            code[16 * u + i] = pick(empty[u], zero, r.l[u][i] + 4.0f);
    }
}

/* Six-bit scales of q3_k, each 0 .. 63, as three words. */
ALWAYS void pack_q3_scales(const I *scale, I *word)
{
    for (int k = 0; k < 2; k++) {
        I byte[4];
        for (int i = 0; i < 4; i++)
            byte[i] = (scale[4 * k + i] & 15) | (scale[8 + 4 * k + i] & 15) << 4;
        word[k] = word_of(byte[0], byte[1], byte[2], byte[3]);
    }
    I top[4];
    for (int i = 0; i < 4; i++)
        top[i] = scale[i] >> 4 | scale[4 + i] >> 4 << 2 | scale[8 + i] >> 4 << 4 |
                 scale[12 + i] >> 4 << 6;
    word[2] = word_of(top[0], top[1], top[2], top[3]);
}

static void encode_q3_k(panel *p)
{
    V scale[16], d, searched[256];
    I code[256], scale_code[16], word[8], byte[32];
    symmetric grid[16];
    if (p->weighted) {
        V sigma2 = 2.0f * square_sum(p->x, 256) / 256.0f, sum_w[16];
        for (int j = 0; j < 16; j++) {
            V w[16];
            const V *x = p->x + 16 * j;
            sum_w[j] = (V){0};
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
        for (int j = 0; j < 16; j += Q3_SIDE)
            refine_q3(p->x + 16 * j, scale + j, searched + 16 * j);
        V magnitude, top = extreme(scale, 16, &magnitude), inverse = -32.0f / top;
        M none = eq(top, (V){0});
        for (int j = 0; j < 16; j++) {
            I byte_code = nearest(inverse * scale[j]) << 24 >> 24;
            scale_code[j] = ipick(none, isplat(0), clamp(byte_code, -32, 31) + 32);
        }
        d = pick(none, (V){0}, 1.0f / inverse);
    }
    pack_q3_scales(scale_code, word);
    put_words(p, 96, word, 3);
    I half_d = to_half(d);
    put_half(p, 108, half_d);
    d = from_half(half_d);
    for (int j = 0; j < 16; j++) {
        V unit = d * to_float(scale_code[j] - 32);
        I *q = code + 16 * j;
        final_codes(q, p->x + 16 * j, 4, unit);
        if (p->weighted)
            searched_codes(q, p->x + 16 * j, 4, unit, &grid[j]);
        else if (any_lane(eq(unit, (V){0})))
            for (int i = 0; i < 16; i++)
                q[i] = ipick(eq(unit, (V){0}), truncated(searched[16 * j + i]), q[i]);
    }
    for (int i = 0; i < 32; i++) {
        byte[i] = isplat(0);
        for (int j = 0; j < 8; j++)
            byte[i] |= code[32 * j + i] >> 2 << j;
    }
    for (int i = 0; i < 8; i++)
        word[i] = word_of(byte[4 * i], byte[4 * i + 1], byte[4 * i + 2], byte[4 * i + 3]);
    put_words(p, 0, word, 8);
    for (int half = 0; half < 2; half++) {
        const I *q = code + 128 * half;
        for (int i = 0; i < 32; i++)
            byte[i] = (q[i] & 3) | (q[i + 32] & 3) << 2 | (q[i + 64] & 3) << 4 |
                      (q[i + 96] & 3) << 6;
        for (int i = 0; i < 8; i++)
            word[i] = word_of(byte[4 * i], byte[4 * i + 1], byte[4 * i + 2], byte[4 * i + 3]);
        put_words(p, 32 + 32 * half, word, 8);
    }
}

static void encode_q6_k(panel *p)
{
    V scale[16], magnitude;
    I code[256], scale_code[16], word[16], low[64], high[32];
    symmetric grid[16];
    for (int j = 0; j < 16; j++) {
        const V *x = p->x + 16 * j, *w = p->w + 16 * j;
        V squares[16];
        if (!p->weighted) {
            for (int i = 0; i < 16; i++)
                squares[i] = x[i] * x[i];
            w = squares;
        }
        grid[j] = search_symmetric(x, w, 16, 32, 0);
        scale[j] = grid[j].scale;
    }
    V top = extreme(scale, 16, &magnitude), inverse = -128.0f / top;
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
    for (int k = 0; k < 4; k++) {
        const I *s = scale_code + 4 * k;
        word[k] = word_of(s[0] & 255, s[1] & 255, s[2] & 255, s[3]);
    }
    put_words(p, 192, word, 4);
    for (int half = 0; half < 2; half++) {
        const I *q = code + 128 * half;
        for (int i = 0; i < 32; i++) {
            low[i] = (q[i] & 15) | (q[i + 64] & 15) << 4;
            low[i + 32] = (q[i + 32] & 15) | (q[i + 96] & 15) << 4;
            high[i] = q[i] >> 4 | q[i + 32] >> 4 << 2 | q[i + 64] >> 4 << 4 | q[i + 96] >> 4 << 6;
        }
        for (int i = 0; i < 16; i++)
            word[i] = word_of(low[4 * i], low[4 * i + 1], low[4 * i + 2], low[4 * i + 3]);
        put_words(p, 64 * half, word, 16);
        for (int i = 0; i < 8; i++)
            word[i] = word_of(high[4 * i], high[4 * i + 1], high[4 * i + 2], high[4 * i + 3]);
        put_words(p, 128 + 32 * half, word, 8);
    }
}

int QT_NAME(gguf_encode_k_symmetric)(int32_t type, int64_t rows, int64_t cols, const float *x,
                                     const float *importance, uint8_t *to)
{
    switch (type) {
    case 11:
        encode_panels(encode_q3_k, 256, 110, rows, cols, x, importance, NULL, to);
        return QT_OK;
    case 14:
        encode_panels(encode_q6_k, 256, 210, rows, cols, x, importance, NULL, to);
        return QT_OK;
    }
    return QT_E_ARGUMENT;
}
