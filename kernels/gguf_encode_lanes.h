/* Blocks side by side: lane k of every vector belongs to block k of a panel of LANES blocks, so
 * that what ggml computes for one block, sums in its order included, is computed for all of them
 * at once. */
#ifndef QTOOL_GGUF_ENCODE_LANES_H
#define QTOOL_GGUF_ENCODE_LANES_H

#include "gguf_lanes.h"
#include "ops.h"

/* A panel: weight i of each block is x[i]; its importance is w[i], if there is any. */
typedef struct {
    V x[256], w[256];
    int weighted;
    V row_sigma2;           /* the mean square of the row that a block lies in */
    const float *from[LANES]; /* the weights of each block; past the last, of the last */
    uint8_t *to[LANES];       /* where each block goes; a scratch block past the last */
} panel;

#if LANES == 16
#define LOW_LANES 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define HIGH_LANES 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define LOW_LANES 0, 8, 1, 9, 2, 10, 3, 11
#define HIGH_LANES 4, 12, 5, 13, 6, 14, 7, 15
#else
#define LOW_LANES 0, 4, 1, 5
#define HIGH_LANES 2, 6, 3, 7
#endif

/* Transposes a square: log2(LANES) rounds of interleaving the rows of its two halves. */
ALWAYS void transpose(V square[LANES])
{
    QT_UNROLL
    for (int round = 1; round < LANES; round *= 2) {
        V next[LANES];
        QT_UNROLL
        for (int i = 0; i < LANES / 2; i++) {
            V a = square[i], b = square[i + LANES / 2];
            next[2 * i] = __builtin_shufflevector(a, b, LOW_LANES);
            next[2 * i + 1] = __builtin_shufflevector(a, b, HIGH_LANES);
        }
        memcpy(square, next, sizeof next);
    }
}

/* out[i][lane] = from[lane][i] for n floats, a multiple of 16. */
ALWAYS void load_columns(const float *const from[LANES], int n, V *out)
{
    for (int i = 0; i < n; i += LANES) {
        V square[LANES];
        QT_UNROLL
        for (int lane = 0; lane < LANES; lane++)
            square[lane] = load(from[lane] + i);
        transpose(square);
        QT_UNROLL
        for (int lane = 0; lane < LANES; lane++)
            out[i + lane] = square[lane];
    }
}

/* Writes n words of each block at a byte offset. */
ALWAYS void put_words(const panel *p, int offset, const I *words, int n)
{
    QT_UNROLL
    for (int i = 0; i < n; i += LANES) {
        V square[LANES];
        QT_UNROLL
        for (int k = 0; k < LANES; k++)
            square[k] = i + k < n ? (V)words[i + k] : (V){0};
        transpose(square);
        int count = n - i < LANES ? n - i : LANES;
        QT_UNROLL
        for (int lane = 0; lane < LANES; lane++)
            memcpy(p->to[lane] + offset + 4 * i, &square[lane], (size_t)count * 4);
    }
}

/* Writes the low half of each lane at a byte offset. */
ALWAYS void put_half(const panel *p, int offset, I half)
{
    for (int lane = 0; lane < LANES; lane++) {
        uint16_t bits = (uint16_t)half[lane];
        memcpy(p->to[lane] + offset, &bits, 2);
    }
}

ALWAYS void put_byte(const panel *p, int offset, I byte)
{
    for (int lane = 0; lane < LANES; lane++)
        p->to[lane][offset] = (uint8_t)byte[lane];
}

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

/* Toward zero; what does not fit is the least integer, as x86 has it. */
ALWAYS I truncated(V a)
{
#if defined(__x86_64__)
#if defined(QT_ISA_AVX512)
    return (I)_mm512_cvttps_epi32((__m512)a);
#elif defined(QT_ISA_AVX2)
    return (I)_mm256_cvttps_epi32((__m256)a);
#else
    return (I)_mm_cvttps_epi32((__m128)a);
#endif
#else
    M fits = lt(absolute(a), splat(0x1p31f));
    return ipick(fits, __builtin_convertvector(pick(fits, a, (V){0}), I), isplat(INT32_MIN));
#endif
}

/* Nearest integer, halves away from zero; 0 for what does not fit, and for a NaN. */
ALWAYS I rounded_away(V a)
{
    a = pick(lt(absolute(a), splat(0x1p30f)), a, (V){0});
    I whole = truncated(a), sign = (I)a >> 31 | 1;
    return whole + ipick(lt(absolute(a - to_float(whole)), splat(0.5f)), isplat(0), sign);
}

/* The same for |a| < 2^22: the float before one half carries no number below a half up. */
ALWAYS I rounded_small(V a)
{
    I half = ((I)a & INT32_MIN) | (I)splat(0x1.fffffep-2f);
    return truncated(a + (V)half);
}

ALWAYS I clamp(I a, int low, int high)
{
    return ileast(imost(a, isplat(low)), isplat(high));
}

/* a / b, and zero where b is zero (and only there). */
ALWAYS V over(V a, V b)
{
    return pick(eq(b, (V){0}), (V){0}, a / b);
}

/* The number of largest magnitude, the first of equals, and that magnitude; NaN is passed over. */
ALWAYS V extreme_in_order(const V *x, int n, V *magnitude)
{
    V most_seen = {0}, at = {0};
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

typedef void block_encoder(panel *p);

/* Fills panels with consecutive blocks of `weights` weights and encodes them. sigma2: one number a
 * row, or NULL. */
ALWAYS void encode_panels(block_encoder *encode, int weights, int bytes, int64_t rows, int64_t cols,
                          const float *x, const float *importance, const float *sigma2, uint8_t *to)
{
    int64_t row_blocks = cols / weights, blocks = rows * row_blocks;
    uint8_t scratch[256];
    panel p;
    p.weighted = importance != NULL;
    p.row_sigma2 = (V){0};
    for (int64_t first = 0; first < blocks; first += LANES) {
        const float *weigh[LANES];
        for (int lane = 0; lane < LANES; lane++) {
            int64_t block = first + lane < blocks ? first + lane : blocks - 1;
            p.from[lane] = x + block * weights;
            weigh[lane] = importance ? importance + block % row_blocks * weights : NULL;
            p.to[lane] = first + lane < blocks ? to + block * bytes : scratch;
            if (sigma2)
                p.row_sigma2[lane] = sigma2[block / row_blocks];
        }
        load_columns(p.from, weights, p.x);
        if (importance)
            load_columns(weigh, weights, p.w);
        encode(&p);
    }
}

#endif
