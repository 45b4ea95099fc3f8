/* The encoders of q2_k, q4_k and q5_k: sub-blocks on a grid with a minimum. The layouts are told in
 * gguf_dequant_k.h; the arithmetic agrees with ggml's reference encoders bit for bit. */
#ifndef QTOOL_GGUF_ENCODE_K_BODY_H
#define QTOOL_GGUF_ENCODE_K_BODY_H

#include "gguf_search.h"

/* Weights of the errors: importance times sqrt(sigma2 + x^2). */
ALWAYS void weigh(V *w, const V *importance, const V *x, int n, V sigma2)
{
    UNROLL_ALONE
    for (int i = 0; i < n; i++)
        w[i] = importance[i] * lane_sqrt(sigma2 + x[i] * x[i]);
}

ALWAYS V sum_of(const V *v, int n)
{
    V sum = {0};
    UNROLL_ALONE
    for (int i = 0; i < n; i++)
        sum += v[i];
    return sum;
}

/* The codes of a sub-block on the grid that the block can store, those of its search where that
 * grid has no scale. */
ALWAYS void final_codes(I *code, const V *x, int n, int top, const affine *grid, V d, V m)
{
    M none = eq(d, splat(0));
    for (int i = 0; i < n; i++)
        code[i] = clamp(nearest((x[i] + m) / d), 0, top);
    if (any_lane(none))
        for (int i = 0; i < n; i++)
            code[i] = ipick(none, affine_code(grid, x[i], top), code[i]);
}

/* Scales and minima of a block without importance: the largest is the top code. */
ALWAYS void scale_to_largest(const V *value, int n, int top, I *code, V *unit)
{
    V zero = {0}, largest = zero;
    for (int j = 0; j < n; j++)
        largest = pick(lt(largest, value[j]), value[j], largest);
    V inverse = pick(lt(zero, largest), (float)top / largest, zero);
    for (int j = 0; j < n; j++)
        code[j] = nearest(inverse * value[j]) & 255;
    *unit = largest / (float)top;
}

/* Six-bit scales and minima of eight sub-blocks as twelve bytes, and what reading them gives. */
ALWAYS void pack_scales(I *scale, I *minimum, I *word)
{
    I byte[12];
    for (int j = 0; j < 4; j++) {
        byte[j] = (scale[j] | scale[j + 4] >> 4 << 6) & 255;
        byte[j + 4] = (minimum[j] | minimum[j + 4] >> 4 << 6) & 255;
        byte[j + 8] = (scale[j + 4] & 15) | (minimum[j + 4] & 15) << 4;
    }
    words_of(word, byte, 12);
    for (int j = 0; j < 4; j++) {
        scale[j] = byte[j] & 63;
        minimum[j] = byte[j + 4] & 63;
        scale[j + 4] = (byte[j + 8] & 15) | byte[j] >> 6 << 4;
        minimum[j + 4] = byte[j + 8] >> 4 | byte[j + 4] >> 6 << 4;
    }
}

/* q4_k (top 15) and q5_k (top 31). */
ALWAYS void encode_k45(panel *p, int top)
{
    affine grid[8];
    V scale[8], minimum[8], sum_w[8], d, dmin;
    I scale_code[8], minimum_code[8], word[4], code[64], fifth[32];
    V sigma2 = {0};
    if (p->weighted)
        sigma2 = 2.0f * square_sum(p->x, 256) / 256.0f;
    const affine_search with = {top, -0.9f, 0.05f, 36, 0}, four = {top, -1.0f, 0.1f, 20, 0};
    const affine_search five = {top, -0.5f, 0.1f, 15, 0};
    affine_search search = p->weighted ? with : top == 15 ? four : five;
    for (int j = 0; j < 8; j += TWO) {
        V w[32 * TWO];
        for (int u = 0; u < TWO; u++) {
            const V *x = p->x + 32 * (j + u);
            if (p->weighted) {
                weigh(w + 32 * u, p->w + 32 * (j + u), x, 32, sigma2);
                sum_w[j + u] = sum_of(w + 32 * u, 32);
            } else {
                V average = lane_sqrt(square_sum(x, 32) / 32.0f);
                UNROLL_ALONE
                for (int i = 0; i < 32; i++)
                    w[32 * u + i] = average + absolute(x[i]);
            }
        }
        search_affine(&grid[j], p->x + 32 * j, w, 32, search, TWO);
    }
    for (int j = 0; j < 8; j++) {
        scale[j] = grid[j].scale;
        minimum[j] = grid[j].minimum;
    }
    if (p->weighted) {
        d = search_positive(scale, sum_w, 8, 63, scale_code);
        dmin = search_positive(minimum, sum_w, 8, 63, minimum_code);
    } else {
        scale_to_largest(scale, 8, 63, scale_code, &d);
        scale_to_largest(minimum, 8, 63, minimum_code, &dmin);
    }
    if (!p->weighted || top == 31)
        for (int j = 0; j < 8; j++) {
            scale_code[j] = ileast(scale_code[j], isplat(63));
            minimum_code[j] = ileast(minimum_code[j], isplat(63));
        }
    I halves = to_half(d) | to_half(dmin) << 16;
    word[0] = halves;
    pack_scales(scale_code, minimum_code, word + 1);
    put_words(p, 0, word, 4);
    d = from_half(halves & 0xffff);
    dmin = from_half(halves >> 16 & 0xffff);
    for (int i = 0; i < 32; i++)
        fifth[i] = isplat(0);
    for (int j = 0; j < 8; j += 2) {
        for (int k = 0; k < 2; k++)
            final_codes(code + 32 * k, p->x + 32 * (j + k), 32, top, &grid[j + k],
                        d * to_float(scale_code[j + k]), dmin * to_float(minimum_code[j + k]));
        for (int i = 0; i < 32; i++) {
            fifth[i] |= (code[i] >> 4 | code[i + 32] >> 4 << 1) << j;
            code[i] = (code[i] & 15) | (code[i + 32] & 15) << 4;
        }
        put_bytes(p, (top == 31 ? 48 : 16) + 16 * j, code, 32);
    }
    if (top == 31)
        put_bytes(p, 16, fifth, 32);
}

ENCODER void encode_q4_k(panel *p)
{
    encode_k45(p, 15);
}

ENCODER void encode_q5_k(panel *p)
{
    encode_k45(p, 31);
}

ENCODER void encode_q2_k(panel *p)
{
    affine grid[16];
    V scale[16], minimum[16], sum_w[16], d, dmin;
    I scale_code[16], minimum_code[16], code[128];
    V sigma2 = {0};
    if (p->weighted)
        sigma2 = square_sum(p->x, 256) / 256.0f;
    const affine_search with = {3, -0.9f, 0.05f, 36, 0}, without = {3, -0.5f, 0.1f, 15, 1};
    for (int j = 0; j < 16; j += FEW) {
        V w[16 * FEW];
        for (int u = 0; u < FEW; u++) {
            const V *x = p->x + 16 * (j + u);
            if (p->weighted) {
                weigh(w + 16 * u, p->w + 16 * (j + u), x, 16, sigma2);
                sum_w[j + u] = sum_of(w + 16 * u, 16);
            } else {
                UNROLL_ALONE
                for (int i = 0; i < 16; i++)
                    w[16 * u + i] = absolute(x[i]);
            }
        }
        /* Two calls, so that what is constant in each is known when they are compiled. */
        if (p->weighted)
            search_affine(&grid[j], p->x + 16 * j, w, 16, with, FEW);
        else
            search_affine(&grid[j], p->x + 16 * j, w, 16, without, FEW);
    }
    for (int j = 0; j < 16; j++) {
        scale[j] = grid[j].scale;
        minimum[j] = grid[j].minimum;
    }
    if (p->weighted) {
        d = search_positive(scale, sum_w, 16, 15, scale_code);
        dmin = search_positive(minimum, sum_w, 16, 15, minimum_code);
    } else {
        scale_to_largest(scale, 16, 15, scale_code, &d);
        scale_to_largest(minimum, 16, 15, minimum_code, &dmin);
    }
    for (int j = 0; j < 16; j++)
        scale_code[j] = (scale_code[j] | minimum_code[j] << 4) & 255;
    put_bytes(p, 0, scale_code, 16);
    I halves = to_half(d) | to_half(dmin) << 16;
    put_words(p, 80, &halves, 1);
    d = from_half(halves & 0xffff);
    dmin = from_half(halves >> 16 & 0xffff);
    for (int half = 0; half < 2; half++) {
        for (int j = 0; j < 8; j++) {
            int s = 8 * half + j;
            final_codes(code + 16 * j, p->x + 16 * s, 16, 3, &grid[s],
                        d * to_float(scale_code[s] & 15), dmin * to_float(scale_code[s] >> 4));
        }
        for (int i = 0; i < 32; i++)
            code[i] |= code[i + 32] << 2 | code[i + 64] << 4 | code[i + 96] << 6;
        put_bytes(p, 16 + 32 * half, code, 32);
    }
}

#endif
