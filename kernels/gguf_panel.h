/* A panel of as many blocks as there are lanes: filled from rows, transposed so that a lane is a block,
 * and written as bytes. On a GPU, cuda/lane_panel.h is in its place. */
#ifndef QTOOL_GGUF_PANEL_H
#define QTOOL_GGUF_PANEL_H

#include "gguf_lanes.h"
#include "ops.h"

/* Functions that encode a panel; and loops that are unrolled, or not, on a GPU alone, where what
 * they index must be in registers, or where these would not do. */
#define ENCODER static
#define UNROLL_ALONE
#define ROLLED
/* `name`: n numbers from `from` on, copied into registers on a GPU. */
#define NEARBY(name, from, n) const V *name = (from)

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

/* One lane of a vector. */
ALWAYS float lane_of(V v, int lane) { return v[lane]; }
ALWAYS void set_lane(V *v, int lane, float x) { (*v)[lane] = x; }
ALWAYS void set_ilane(I *v, int lane, int32_t x) { (*v)[lane] = x; }
ALWAYS int32_t ilane_of(I v, int lane) { return v[lane]; }
/* The number of the lowest bit that is set. */
ALWAYS int first_lane(unsigned lanes) { return __builtin_ctz(lanes); }

/* All of them, to and from memory. */
ALWAYS void spread_lanes(float to[LANES], V v) { memcpy(to, &v, sizeof v); }
ALWAYS void spread_ilanes(int32_t to[LANES], I v) { memcpy(to, &v, sizeof v); }
ALWAYS I ilanes_of(const int32_t from[LANES])
{
    I v;
    memcpy(&v, from, sizeof v);
    return v;
}

ALWAYS void store_16(uint8_t *to, uint16_t bits) { memcpy(to, &bits, 2); }
ALWAYS void store_32(uint8_t *to, uint32_t bits) { memcpy(to, &bits, 4); }

/* 16 weights of each lane, from number at[lane] on of block from[lane] of the panel. */
ALWAYS void gather_columns(const panel *p, const int *block, const int *at, V *out)
{
    const float *from[LANES];
    for (int lane = 0; lane < LANES; lane++)
        from[lane] = p->from[block[lane]] + at[lane];
    load_columns(from, 16, out);
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
    p.row_sigma2 = splat(0);
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
