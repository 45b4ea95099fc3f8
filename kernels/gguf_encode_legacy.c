/* Encodes q4_0, q4_1, q5_0, q5_1 and q8_0. */
#include "gguf_encode.h"
#include "gguf_encode_legacy_body.h"

#include <stdlib.h>

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
