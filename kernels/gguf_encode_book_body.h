/* The encoders of the types with a code book or three values: iq4_nl, iq4_xs, mxfp4, nvfp4, tq1_0,
 * tq2_0, q1_0 and q2_0. The layouts are told in gguf_dequant_simple.h; the arithmetic agrees with
 * ggml's reference encoders bit for bit. */
#ifndef QTOOL_GGUF_ENCODE_BOOK_BODY_H
#define QTOOL_GGUF_ENCODE_BOOK_BODY_H

#include "gguf_search.h"
#if defined(QT_ONE_LANE)
#include "cuda/lane_books.h"
#else
#include "gguf_book_lanes.h"
#endif

/* The scale of 32 weights: of sixteen, the one that explains most. Zero for tiny weights. */
ALWAYS V search_iq4(const iq4_tables *t, const V *from, const V *w)
{
    enum { TRIALS = LANES > 1 ? 2 : 1 };
    NEARBY(x, from, 32);
    V zero = {0}, magnitude, top = extreme(x, 32, &magnitude), scale = zero, best = zero;
    for (int k = -8; k <= 7; k += TRIALS) { /* -8 stands for the first: the largest on the end */
        V inverse[TRIALS], sum_qx[TRIALS] = {zero}, sum_q2[TRIALS] = {zero};
        UNROLL_ALONE
        for (int u = 0; u < TRIALS; u++)
            inverse[u] = (float)(k + u - 127) / top;
        if (k == -8)
            inverse[0] = 1.0f / (-top / -127.0f);
        UNROLL_SOME
        for (int i = 0; i < 32; i++)
            for (int u = 0; u < TRIALS; u++) {
                V q = iq4_value(t, iq4_index(t, inverse[u] * x[i])), wq = w[i] * q;
                sum_qx[u] += wq * x[i];
                sum_q2[u] += wq * q;
            }
        for (int u = 0; u < TRIALS; u++) {
            V trial = sum_qx[u] / sum_q2[u];
            M better = lt(zero, sum_q2[u]);
            if (k + u > -8)
                better &= lt(best * sum_q2[u], sum_qx[u] * sum_qx[u]);
            scale = pick(better, trial, scale);
            best = pick(better, trial * sum_qx[u], best);
        }
    }
    return pick(lt(magnitude, splat(TINY)), zero, scale);
}

ALWAYS void weigh_iq4(V *w, const panel *p, int from, V sigma2)
{
    UNROLL_ALONE
    for (int i = 0; i < 32; i++) {
        V square = p->x[from + i] * p->x[from + i];
        w[i] = p->weighted ? p->w[from + i] * lane_sqrt(sigma2 + square) : square;
    }
}

/* 32 codes as nibbles: i and i + `half` share byte i of each run of `half`. */
ALWAYS void put_nibbles(const panel *p, int offset, const I *code)
{
    I byte[16];
    UNROLL_ALONE
    for (int i = 0; i < 16; i++)
        byte[i] = code[i] | code[i + 16] << 4;
    put_bytes(p, offset, byte, 16);
}

ENCODER void encode_iq4_nl(panel *p)
{
    iq4_tables t;
    V w[32], sigma2 = square_sum(p->x, 32) * (2.0f / 32.0f);
    I code[32];
    fill_iq4_tables(&t);
    weigh_iq4(w, p, 0, sigma2);
    V scale = search_iq4(&t, p->x, w), inverse = over(splat(1.0f), scale);
    for (int i = 0; i < 32; i++)
        code[i] = iq4_index(&t, inverse * p->x[i]);
    put_half(p, 0, to_half(scale));
    put_nibbles(p, 2, code);
}

ENCODER void encode_iq4_xs(panel *p)
{
    iq4_tables t;
    V scale[8], magnitude, sigma2 = square_sum(p->x, 256) * (2.0f / 256.0f);
    I word[2] = {isplat(0), isplat(0)}, code[32];
    fill_iq4_tables(&t);
    for (int j = 0; j < 8; j++) {
        V w[32];
        weigh_iq4(w, p, 32 * j, sigma2);
        scale[j] = search_iq4(&t, p->x + 32 * j, w);
    }
    V d = -extreme_in_order(scale, 8, &magnitude) / 32.0f, inverse = over(splat(1.0f), d);
    for (int j = 0; j < 8; j++) {
        I l = clamp(nearest(inverse * scale[j]), -32, 31);
        V inverse_scale = over(splat(1.0f), d * to_float(l));
        for (int i = 0; i < 32; i++)
            code[i] = iq4_index(&t, inverse_scale * p->x[32 * j + i]);
        put_nibbles(p, 8 + 16 * j, code);
        l += 32;
        word[0] |= l >> 4 << (16 + 2 * j);
        word[1] |= (l & 15) << 4 * j;
    }
    word[0] |= to_half(d);
    put_words(p, 0, word, 2);
}

/* Nearest of 0 1 2 3 4 6 8 12 times d and their negatives, by |q d - x| in float32, the first of
 * equals: the sixteen in turn. */
ALWAYS I fp4_code_slowly(V x, V d)
{
    V best = absolute(splat(0) * d - x);
    I code = isplat(0);
    for (int k = 1; k < 16; k++) {
        V error = absolute(fp4_value(k) * d - x);
        M better = lt(error, best);
        best = pick(better, error, best);
        code = ipick(better, isplat(k), code);
    }
    return code;
}

/* The same for |x| below 2^12 d, where the errors next to a middle are exact. */
ALWAYS I fp4_code(V x, V d)
{
    const float middle[7] = {0.5f, 1.5f, 2.5f, 3.5f, 5.0f, 7.0f, 10.0f};
    V size = absolute(x);
    if (any_lane(not_lanes(lt(size, d * 0x1p12f))))
        return fp4_code_slowly(x, d);
    I code = isplat(0);
    for (int k = 0; k < 7; k++)
        code = ipick(lt(d * middle[k], size), isplat(k + 1), code);
    I minus = ipick(ieq(code, isplat(0)), isplat(0), isplat(8));
    return code | (minus & bits_of(x) >> 31);
}

/* floor(log2f(a)) - 2 + 127 as a byte. log2f rounds to the power above when that is nearer than
 * half its last place: for a within ln 2 times 2^f last places of 2^k, where 2^f <= |k|. */
ALWAYS uint8_t e8m0_of(float a)
{
    uint32_t bits = bits_of_one(a);
    if (!(a > 0.0f))
        return 0;
    int exponent = (int)(bits >> 23), next, reach;
    int64_t distance; /* to 2^next, in last places of a */
    if (exponent) {
        next = exponent - 126;
        distance = (int64_t)(1 << 23) - (bits & 0x7fffff);
        int size = next < 0 ? -next : next, f = size ? 31 - leading_zeros((uint32_t)size) : 0;
        reach = f < 7 ? 44 >> (6 - f) : 88;
        if (next > 0 && !(size & (size - 1)))
            reach /= 2;
    } else {
        next = 32 - leading_zeros(bits) - 149;
        distance = ((int64_t)1 << (next + 149)) - bits;
        reach = 44 >> (-125 - next);
    }
    int power = distance <= reach ? next : next - 1;
    return (uint8_t)(power - 2 + 127);
}

ENCODER void encode_mxfp4(panel *p)
{
    V magnitude, d = splat(0);
    I code[32], power = isplat(0);
    extreme(p->x, 32, &magnitude);
    for (int lane = 0; lane < LANES; lane++) {
        uint8_t e = e8m0_of(lane_of(magnitude, lane));
        set_lane(&d, lane, one_of_bits(e < 2 ? 0x200000u << e : (e - 1u) << 23));
        set_ilane(&power, lane, e);
    }
    put_byte(p, 0, power);
    for (int i = 0; i < 32; i++)
        code[i] = fp4_code(p->x[i], d);
    put_nibbles(p, 1, code);
}

/* The unsigned E4M3 code next to x, halves up; 448 for all that would round to 256 and more. */
ALWAYS uint8_t ue4m3_of(float x)
{
    if (!(x > 0.0f))
        return 0;
    x = x > 448.0f ? 448.0f : x;
    uint32_t bits = bits_of_one(x);
    int exponent = (int)(bits >> 23) - 127 + 7;
    if (exponent <= 0) {
        int mantissa = (int)(x * 512.0f + 0.5f);
        return (uint8_t)(mantissa > 7 ? 7 : mantissa);
    }
    int code = (exponent << 3) + (int)(bits >> 20 & 7) + (int)(bits >> 19 & 1);
    return (uint8_t)(code >= 15 << 3 ? 0x7e : code);
}

ENCODER void encode_nvfp4(panel *p)
{
    I byte[8];
    for (int j = 0; j < 4; j++) {
        const V *x = p->x + 16 * j;
        V magnitude, d = splat(0);
        I code[16], scale = isplat(0);
        extreme(x, 16, &magnitude);
        for (int lane = 0; lane < LANES; lane++) {
            uint8_t found = ue4m3_of(lane_of(magnitude, lane) / 6.0f);
            set_lane(&d, lane, half_ue4m3(found));
            set_ilane(&scale, lane, found);
        }
        put_byte(p, j, scale);
        for (int i = 0; i < 16; i++)
            code[i] = fp4_code(x[i], d);
        for (int i = 0; i < 8; i++)
            byte[i] = code[i] | code[i + 8] << 4;
        put_bytes(p, 4 + 8 * j, byte, 8);
    }
}

/* The largest magnitude, and its reciprocal or zero. */
ALWAYS V largest(const panel *p, int n, V *inverse)
{
    V magnitude;
    extreme(p->x, n, &magnitude);
    *inverse = over(splat(1.0f), magnitude);
    return magnitude;
}

/* x / largest rounded to -1, 0, 1, and one added. */
ALWAYS I trit_of(V x, V inverse)
{
    return rounded_away(x * inverse) + 1;
}

/* A byte whose top trits, one after the other, are those of q, a number of five trits. */
ALWAYS I trit_byte(I q)
{
    return (q * 256 + 242) * 17261 >> 22 & 255; /* / 243, by 2^22 / 243 rounded up */
}

ENCODER void encode_tq1_0(panel *p)
{
    V inverse, d = largest(p, 256, &inverse);
    I byte[52];
    for (int i = 0; i < 48; i++) {
        int stride = i < 32 ? 32 : 16, from = i < 32 ? i : 160 + i - 32;
        I q = isplat(0);
        for (int n = 0; n < 5; n++)
            q = q * 3 + trit_of(p->x[from + n * stride], inverse);
        byte[i] = trit_byte(q);
    }
    for (int i = 0; i < 4; i++) {
        I q = isplat(0);
        for (int n = 0; n < 4; n++)
            q = q * 3 + trit_of(p->x[240 + i + 4 * n], inverse);
        byte[48 + i] = trit_byte(q * 3);
    }
    put_bytes(p, 0, byte, 52);
    put_half(p, 52, to_half(d));
}

ENCODER void encode_tq2_0(panel *p)
{
    V inverse, d = largest(p, 256, &inverse);
    I byte[64];
    for (int i = 0; i < 64; i++) {
        const V *x = p->x + i / 32 * 128 + i % 32;
        byte[i] = isplat(0);
        for (int n = 0; n < 4; n++)
            byte[i] |= (trit_of(x[32 * n], inverse) & 3) << 2 * n;
    }
    put_bytes(p, 0, byte, 64);
    put_half(p, 64, to_half(d));
}

ENCODER void encode_q1_0(panel *p)
{
    V sum = {0};
    I word[4];
    for (int k = 0; k < 4; k++) {
        word[k] = isplat(0);
        for (int i = 0; i < 32; i++) {
            V x = p->x[32 * k + i];
            sum += absolute(x);
            word[k] |= ipick(le(splat(0), x), isplat((int32_t)(1u << i)), isplat(0));
        }
    }
    put_half(p, 0, to_half(sum / 128.0f));
    put_words(p, 2, word, 4);
}

ENCODER void encode_q2_0(panel *p)
{
    V inverse, d = largest(p, 64, &inverse);
    I word[4];
    for (int k = 0; k < 4; k++) {
        word[k] = isplat(0);
        for (int i = 0; i < 16; i++) {
            V ratio = p->x[16 * k + i] * inverse;
            I q = clamp(rounded_away(ratio) + 1, 0, 3);
            q = ipick(lt(absolute(ratio), splat(2.0f)), q, isplat(0)); /* 1 / d overflowed */
            word[k] |= q << 2 * i;
        }
    }
    put_half(p, 0, to_half(d));
    put_words(p, 2, word, 4);
}

#endif
