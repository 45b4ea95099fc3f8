/* Encodes q4_0, q4_1, q5_0, q5_1 and q8_0. The layouts are told in gguf_dequant_simple.h; the
 * arithmetic agrees with ggml's reference encoders bit for bit. */
#include "gguf_encode.h"
#include "gguf_search.h"

#include <stdlib.h>

/* Codes of 32 weights: nibbles at an offset, fifth bits (if there are any) four bytes before. */
ALWAYS void put_codes(const panel *p, int offset, const I *code, int fifth)
{
    I word[4], high = isplat(0);
    for (int k = 0; k < 4; k++) {
        I byte[4];
        for (int i = 0; i < 4; i++)
            byte[i] = (code[4 * k + i] & 15) | (code[16 + 4 * k + i] & 15) << 4;
        word[k] = word_of(byte[0], byte[1], byte[2], byte[3]);
    }
    put_words(p, offset, word, 4);
    if (!fifth)
        return;
    for (int i = 0; i < 32; i++)
        high |= (code[i] >> 4 & 1) << i;
    put_words(p, offset - 4, &high, 1);
}

ALWAYS void weigh(V *w, const panel *p)
{
    for (int i = 0; i < 32; i++)
        w[i] = p->w[i] * lane_sqrt(p->row_sigma2 + p->x[i] * p->x[i]);
}

/* A reciprocal, and zero for zero. */
ALWAYS V inverse_of(V d)
{
    return pick(eq(d, (V){0}), (V){0}, 1.0f / d);
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
        weigh(w, p);
        symmetric grid = search_symmetric(p->x, w, 32, half, 0);
        d = grid.scale;
        for (int i = 0; i < 32; i++)
            code[i] = symmetric_code(&grid, p->x[i], half);
    } else {
        V magnitude;
        d = extreme(p->x, 32, &magnitude) / (float)-half;
        V inverse = inverse_of(d);
        for (int i = 0; i < 32; i++) {
            I q = as_int8(truncated(p->x[i] * inverse + ((float)half + 0.5f)));
            code[i] = ileast(q, isplat(2 * half - 1));
        }
    }
    put_half(p, 0, to_half(d));
    put_codes(p, half == 16 ? 6 : 2, code, half == 16);
}

static void encode_q4_0(panel *p)
{
    encode_symmetric(p, 8);
}

static void encode_q5_0(panel *p)
{
    encode_symmetric(p, 16);
}

/* q4_1 (top 15) and q5_1 (top 31). */
ALWAYS void encode_affine(panel *p, int top)
{
    I code[32];
    V d, low;
    if (p->weighted) {
        V w[32];
        affine grid;
        weigh(w, p);
        search_affine(&grid, p->x, w, 32, (affine_search){top, -0.9f, 0.05f, 36, 0}, 1);
        d = grid.scale;
        low = -grid.minimum;
        for (int i = 0; i < 32; i++)
            code[i] = affine_code(&grid, p->x[i], top);
    } else {
        V high = splat(-0x1.fffffep127f);
        low = -high;
        for (int i = 0; i < 32; i++) {
            low = least(p->x[i], low);
            high = most(p->x[i], high);
        }
        d = (high - low) / (float)top;
        V inverse = inverse_of(d);
        for (int i = 0; i < 32; i++) {
            I q = truncated((p->x[i] - low) * inverse + 0.5f);
            code[i] = top == 15 ? ileast(as_int8(q), isplat(15)) : q & 255;
        }
    }
    put_half(p, 0, to_half(d));
    put_half(p, 2, to_half(low));
    put_codes(p, top == 31 ? 8 : 4, code, top == 31);
}

static void encode_q4_1(panel *p)
{
    encode_affine(p, 15);
}

static void encode_q5_1(panel *p)
{
    encode_affine(p, 31);
}

static void encode_q8_0(panel *p)
{
    V magnitude = {0};
    for (int i = 0; i < 32; i++)
        magnitude = most(magnitude, absolute(p->x[i]));
    V d = magnitude / 127.0f, inverse = inverse_of(d);
    I word[8];
    for (int k = 0; k < 8; k++) {
        I byte[4];
        for (int i = 0; i < 4; i++)
            byte[i] = rounded_away(p->x[4 * k + i] * inverse) & 255;
        word[k] = word_of(byte[0], byte[1], byte[2], byte[3]);
    }
    put_half(p, 0, to_half(d));
    put_words(p, 2, word, 8);
}

/* The mean square of each row, summed from the left: a row in every lane. */
static void mean_squares(int64_t rows, int64_t cols, const float *x, float *mean)
{
    for (int64_t first = 0; first < rows; first += LANES) {
        const float *from[LANES];
        V sum = {0}, square[32];
        for (int lane = 0; lane < LANES; lane++)
            from[lane] = x + (first + lane < rows ? first + lane : rows - 1) * cols;
        for (int64_t col = 0; col < cols; col += 32) {
            load_columns(from, 32, square);
            for (int i = 0; i < 32; i++)
                sum += square[i] * square[i];
            for (int lane = 0; lane < LANES; lane++)
                from[lane] += 32;
        }
        for (int lane = 0; lane < LANES && first + lane < rows; lane++)
            mean[first + lane] = sum[lane] / (float)cols;
    }
}

int QT_NAME(gguf_encode_legacy)(int32_t type, int64_t rows, int64_t cols, const float *x,
                                const float *importance, uint8_t *to)
{
    float *mean = NULL;
    if (type == 8)
        importance = NULL;
    if (importance) {
        mean = malloc((size_t)rows * sizeof *mean);
        if (!mean)
            return QT_E_MEMORY;
        mean_squares(rows, cols, x, mean);
    }
    switch (type) {
    case 2:
        encode_panels(encode_q4_0, 32, 18, rows, cols, x, importance, mean, to);
        break;
    case 3:
        encode_panels(encode_q4_1, 32, 20, rows, cols, x, importance, mean, to);
        break;
    case 6:
        encode_panels(encode_q5_0, 32, 22, rows, cols, x, importance, mean, to);
        break;
    case 7:
        encode_panels(encode_q5_1, 32, 24, rows, cols, x, importance, mean, to);
        break;
    case 8:
        encode_panels(encode_q8_0, 32, 34, rows, cols, x, NULL, NULL, to);
        break;
    }
    free(mean);
    return QT_OK;
}
