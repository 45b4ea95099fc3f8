/* Encodes q4_0, q4_1, q5_0, q5_1 and q8_0. The layouts are told in gguf_dequant_simple.h; the
 * arithmetic agrees with ggml's reference encoders bit for bit. */
#include "gguf_encode.h"
#include "gguf_search.h"

#include <stdlib.h>

/* Codes of 32 weights: nibbles at an offset, fifth bits (if there are any) four bytes before. */
ALWAYS void put_codes(const panel *p, int offset, const I *code, int fifth)
{
    I byte[16], high = isplat(0);
    for (int i = 0; i < 16; i++)
        byte[i] = (code[i] & 15) | (code[16 + i] & 15) << 4;
    put_bytes(p, offset, byte, 16);
    if (!fifth)
        return;
    for (int i = 0; i < 32; i++)
        high |= (code[i] >> 4 & 1) << i;
    put_words(p, offset - 4, &high, 1);
}

ALWAYS void weigh(V *w, const panel *p, int n)
{
    for (int i = 0; i < n; i++)
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
        weigh(w, p, 32);
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
    for (int i = 0; i < 32; i++) {
        low = least(p->x[i], low);
        high = most(p->x[i], high);
    }
    V d = (high - low) / (float)top, inverse = inverse_of(d);
    for (int i = 0; i < 32; i++) {
        I q = truncated((p->x[i] - low) * inverse + 0.5f);
        code[i] = top == 15 ? ileast(as_int8(q), isplat(15)) : q & 255;
    }
    put_affine(p, 0, d, low, code, top);
}

/* With importance; `count` (1 or 2) blocks of each lane, whose searches go on side by side. */
ALWAYS void search_blocks(panel *p, int top, int count)
{
    V w[32 * 2];
    affine grid[2];
    weigh(w, p, 32 * count);
    search_affine(grid, p->x, w, 32, (affine_search){top, -0.9f, 0.05f, 36, 0}, count);
    for (int u = 0; u < count; u++) {
        I code[32];
        for (int i = 0; i < 32; i++)
            code[i] = affine_code(&grid[u], p->x[32 * u + i], top);
        put_affine(p, u * (top == 31 ? 24 : 20), grid[u].scale, -grid[u].minimum, code, top);
    }
}

static void encode_q4_1(panel *p)
{
    encode_affine(p, 15);
}

static void encode_q5_1(panel *p)
{
    encode_affine(p, 31);
}

static void search_q4_1(panel *p)
{
    search_blocks(p, 15, 1);
}

static void search_q5_1(panel *p)
{
    search_blocks(p, 31, 1);
}

static void search_two_q4_1(panel *p)
{
    search_blocks(p, 15, 2);
}

static void search_two_q5_1(panel *p)
{
    search_blocks(p, 31, 2);
}

/* The low byte of each lane, one after the other. */
ALWAYS void store_low_bytes(uint8_t *to, I v)
{
#if defined(QT_ISA_AVX2)
    const __m256i low = _mm256_set1_epi32(0x0c080400);
    __m256i fours = _mm256_shuffle_epi8((__m256i)v, low);
    __m128i upper = _mm256_extracti128_si256(fours, 1);
    _mm_storel_epi64((void *)to, _mm_unpacklo_epi32(_mm256_castsi256_si128(fours), upper));
#else
    qt_vu8x4 bytes = __builtin_convertvector(v, qt_vu8x4);
    memcpy(to, &bytes, sizeof bytes);
#endif
}

/* Blocks as they lie: only their largest magnitudes go across the lanes. */
static void encode_q8_0(int64_t blocks, const float *x, uint8_t *to)
{
    for (int64_t first = 0; first < blocks; first += LANES) {
        int64_t count = blocks - first < LANES ? blocks - first : LANES;
        V magnitude[LANES] = {{0}};
        for (int64_t block = 0; block < count; block++)
            for (int i = 0; i < 32; i += LANES)
                magnitude[block] =
                    most(magnitude[block], absolute(load(x + 32 * (first + block) + i)));
        transpose(magnitude);
        for (int i = 1; i < LANES; i++)
            magnitude[0] = most(magnitude[0], magnitude[i]);
        V d = magnitude[0] / 127.0f, inverse = inverse_of(d);
        inverse = pick(lt(inverse, splat(INFINITY)), inverse, (V){0}); /* d is subnormal */
        I halves = to_half(d);
        for (int64_t block = 0; block < count; block++) {
            uint8_t *at = to + 34 * (first + block);
            uint16_t half = (uint16_t)halves[block];
            memcpy(at, &half, 2);
            for (int i = 0; i < 32; i += LANES) {
                V scaled = load(x + 32 * (first + block) + i) * inverse[block];
                store_low_bytes(at + 2 + i, rounded_small(scaled));
            }
        }
    }
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
    int two = cols % 64 == 0;
    switch (type) {
    case 2:
        encode_panels(encode_q4_0, 32, 18, rows, cols, x, importance, mean, to);
        break;
    case 3:
        if (!importance)
            encode_panels(encode_q4_1, 32, 20, rows, cols, x, NULL, NULL, to);
        else if (two)
            encode_panels(search_two_q4_1, 64, 40, rows, cols, x, importance, mean, to);
        else
            encode_panels(search_q4_1, 32, 20, rows, cols, x, importance, mean, to);
        break;
    case 6:
        encode_panels(encode_q5_0, 32, 22, rows, cols, x, importance, mean, to);
        break;
    case 7:
        if (!importance)
            encode_panels(encode_q5_1, 32, 24, rows, cols, x, NULL, NULL, to);
        else if (two)
            encode_panels(search_two_q5_1, 64, 48, rows, cols, x, importance, mean, to);
        else
            encode_panels(search_q5_1, 32, 24, rows, cols, x, importance, mean, to);
        break;
    case 8:
        encode_q8_0(rows * (cols / 32), x, to);
        break;
    }
    free(mean);
    return QT_OK;
}
