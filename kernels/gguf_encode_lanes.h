/* Blocks side by side: lane k of every vector belongs to block k of a panel of LANES blocks, so
 * that what ggml computes for one block, sums in its order included, is computed for all of them
 * at once. On a GPU (QT_ONE_LANE) a thread has a block, and a vector is one number. */
#ifndef QTOOL_GGUF_ENCODE_LANES_H
#define QTOOL_GGUF_ENCODE_LANES_H

#if defined(QT_ONE_LANE)
#include "cuda/lane_panel.h"
#else
#include "gguf_panel.h"
#endif

/* n bytes as n / 4 words, the first lowest; what is above a byte must be zero but in the last of
 * each four. */
ALWAYS void words_of(I *word, const I *byte, int n)
{
    for (int i = 0; i < n; i += 4)
        word[i / 4] = byte[i] | byte[i + 1] << 8 | byte[i + 2] << 16 | byte[i + 3] << 24;
}

/* Writes n bytes of each block, at most 64, at an offset. */
ALWAYS void put_bytes(const panel *p, int offset, const I *byte, int n)
{
    I word[16];
    words_of(word, byte, n);
    put_words(p, offset, word, n / 4);
}

/* Nearest integer, halves away from zero; 0 for what does not fit, and for a NaN. */
ALWAYS I rounded_away(V a)
{
    a = pick(lt(absolute(a), splat(0x1p30f)), a, splat(0));
    I whole = truncated(a), sign = bits_of(a) >> 31 | 1;
    return whole + ipick(lt(absolute(a - to_float(whole)), splat(0.5f)), isplat(0), sign);
}

/* The same for |a| < 2^22: the float before one half carries no number below a half up. */
ALWAYS I rounded_small(V a)
{
    I half = (bits_of(a) & INT32_MIN) | bits_of(splat(0x1.fffffep-2f));
    return truncated(a + of_bits(half));
}

ALWAYS I clamp(I a, int low, int high)
{
    return ileast(imost(a, isplat(low)), isplat(high));
}

/* a / b, and zero where b is zero (and only there). */
ALWAYS V over(V a, V b)
{
    return pick(eq(b, splat(0)), splat(0), a / b);
}

/* The number of largest magnitude, the first of equals, and that magnitude; NaN is passed over. */
ALWAYS V extreme_in_order(const V *x, int n, V *magnitude)
{
    V most_seen = {0}, at = {0};
    UNROLL_ALONE
    for (int i = 0; i < n; i++) {
        V size = absolute(x[i]);
        M larger = lt(most_seen, size);
        most_seen = pick(larger, size, most_seen);
        at = pick(larger, x[i], at);
    }
    *magnitude = most_seen;
    return at;
}

/* The same of weights, which are finite; scales of weights beyond 1e19 may not be. */
ALWAYS V extreme(const V *x, int n, V *magnitude)
{
    V high = x[0], low = x[0];
    UNROLL_ALONE
    for (int i = 1; i < n; i++) {
        high = most(high, x[i]);
        low = least(low, x[i]);
    }
    *magnitude = most(high, -low);
    if (any_lane(eq(high, -low)))
        return extreme_in_order(x, n, magnitude);
    return pick(lt(high, -low), low, high);
}

/* The sum of squares, in order, from zero. */
ALWAYS V square_sum(const V *x, int n)
{
    V sum = {0};
    for (int i = 0; i < n; i++)
        sum += x[i] * x[i];
    return sum;
}

#endif
