/* The encoders of q4_0, q4_1, q5_0 and q5_1. The layouts are told in gguf_dequant_simple.h; the
 * arithmetic agrees with ggml's reference encoders bit for bit. */
#ifndef QTOOL_GGUF_ENCODE_LEGACY_BODY_H
#define QTOOL_GGUF_ENCODE_LEGACY_BODY_H

#include "gguf_search.h"

/* Codes of 32 weights: nibbles at an offset, fifth bits (if there are any) four bytes before. */
ALWAYS void put_codes(const panel *p, int offset, const I *code, int fifth)
{
    I byte[16], high = isplat(0);
    UNROLL_ALONE
    for (int i = 0; i < 16; i++)
        byte[i] = (code[i] & 15) | (code[16 + i] & 15) << 4;
    put_bytes(p, offset, byte, 16);
    if (!fifth)
        return;
    UNROLL_ALONE
    for (int i = 0; i < 32; i++)
        high |= (code[i] >> 4 & 1) << i;
    put_words(p, offset - 4, &high, 1);
}

ALWAYS void weigh(V *w, const panel *p, int n)
{
    UNROLL_ALONE
    for (int i = 0; i < n; i++)
        w[i] = p->w[i] * lane_sqrt(p->row_sigma2 + p->x[i] * p->x[i]);
}

/* A reciprocal, and zero for zero. */
ALWAYS V inverse_of(V d)
{
    return pick(eq(d, splat(0)), splat(0), 1.0f / d);
}

/* The low byte of an integer as a signed number, as a conversion to int8 leaves it. */
ALWAYS I as_int8(I a)
{
    return a << 24 >> 24;
}

/* q4_0 (half 8) and q5_0 (half 16). */
ALWAYS void encode_symmetric(panel *p, int half)
{
    I code[32];
    V d;
    if (p->weighted) {
        V w[32];
        weigh(w, p, 32);
        symmetric grid = search_symmetric(p->x, w, 32, half, 0);
        d = grid.scale;
        UNROLL_ALONE
        for (int i = 0; i < 32; i++)
            code[i] = symmetric_code(&grid, p->x[i], half);
    } else {
        V magnitude;
        d = extreme(p->x, 32, &magnitude) / (float)-half;
        V inverse = inverse_of(d);
        UNROLL_ALONE
        for (int i = 0; i < 32; i++) {
            I q = as_int8(truncated(p->x[i] * inverse + ((float)half + 0.5f)));
            code[i] = ileast(q, isplat(2 * half - 1));
        }
    }
    put_half(p, 0, to_half(d));
    put_codes(p, half == 16 ? 6 : 2, code, half == 16);
}

ENCODER void encode_q4_0(panel *p)
{
    encode_symmetric(p, 8);
}

ENCODER void encode_q5_0(panel *p)
{
    encode_symmetric(p, 16);
}

/* A block of q4_1 (top 15) or q5_1 (top 31), at a byte offset. */
ALWAYS void put_affine(const panel *p, int offset, V d, V low, const I *code, int top)
{
    put_half(p, offset, to_half(d));
    put_half(p, offset + 2, to_half(low));
    put_codes(p, offset + (top == 31 ? 8 : 4), code, top == 31);
}

ALWAYS void encode_affine(panel *p, int top)
{
    I code[32];
    V high = splat(-0x1.fffffep127f), low = -high;
    UNROLL_ALONE
    for (int i = 0; i < 32; i++) {
        low = least(p->x[i], low);
        high = most(p->x[i], high);
    }
    V d = (high - low) / (float)top, inverse = inverse_of(d);
    UNROLL_ALONE
    for (int i = 0; i < 32; i++) {
        I q = truncated((p->x[i] - low) * inverse + 0.5f);
        code[i] = top == 15 ? ileast(as_int8(q), isplat(15)) : q & 255;
    }
    put_affine(p, 0, d, low, code, top);
}

/* With importance; `count` (1 or 2) blocks of each lane, whose searches go on side by side. */
ALWAYS void search_blocks(panel *p, int top, int count)
{
    V w[32 * TWO];
    affine grid[TWO];
    const affine_search search = {top, -0.9f, 0.05f, 36, 0};
    weigh(w, p, 32 * count);
    search_affine(grid, p->x, w, 32, search, count);
    for (int u = 0; u < count; u++) {
        I code[32];
        UNROLL_ALONE
        for (int i = 0; i < 32; i++)
            code[i] = affine_code(&grid[u], p->x[32 * u + i], top);
        put_affine(p, u * (top == 31 ? 24 : 20), grid[u].scale, -grid[u].minimum, code, top);
    }
}

ENCODER void encode_q4_1(panel *p)
{
    encode_affine(p, 15);
}

ENCODER void encode_q5_1(panel *p)
{
    encode_affine(p, 31);
}

ENCODER void search_q4_1(panel *p)
{
    search_blocks(p, 15, 1);
}

ENCODER void search_q5_1(panel *p)
{
    search_blocks(p, 31, 1);
}

#endif
