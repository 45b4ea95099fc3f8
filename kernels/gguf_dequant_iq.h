/* The lattice types: 256 weights, eight (IQ3: four) at a time taken from a table of points.
 * Included by gguf_dequant_all.h for each output type. */

/* The bytes of a point (none zero, none above 127), negated where the mask is set. */
ALWAYS uint64_t D(signed_point)(uint64_t point, unsigned signs)
{
    uint64_t mask = gguf_sign_mask[signs];
    return (point ^ mask) + (mask & 0x0101010101010101);
}

/* n signed bytes times one scale. */
ALWAYS void D(scaled)(const uint64_t *points, int n, float scale, OUT *to)
{
    QT_UNROLL
    for (int i = 0; i < n; i += LANES)
        PUT(to + i, to_float(signed_bytes(points, i)) * scale);
}

/* iq2_xxs: d half, then for each 32 weights four bytes of points and a word: seven sign bits for
 * each eight weights, the scale in the top four. w = (d (s + 1/2) / 4) q. */
ALWAYS void D(iq2_xxs)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int j = 0; j < 8; j++) {
        const uint8_t *from = block + 2 + 8 * j;
        uint32_t word = word_at(from + 4);
        uint64_t points[4];
        QT_UNROLL
        for (int k = 0; k < 4; k++)
            points[k] = D(signed_point)(gguf_grid_iq2_xxs[from[k]],
                                        gguf_even_signs[word >> 7 * k & 127]);
        D(scaled)(points, 32, d * (0.5f + (float)(word >> 28)) * 0.25f, to + 32 * j);
    }
}

/* iq2_xs: d half, 32 words of 16 bits (nine of point, seven of signs), a nibble of scale for each
 * 16 weights. */
ALWAYS void D(iq2_xs)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int j = 0; j < 16; j++) {
        int scale = block[66 + j / 2] >> 4 * (j % 2) & 15;
        uint64_t points[2];
        QT_UNROLL
        for (int k = 0; k < 2; k++) {
            unsigned code = block[2 + 4 * j + 2 * k] | block[3 + 4 * j + 2 * k] << 8;
            points[k] = D(signed_point)(gguf_grid_iq2_xs[code & 511], gguf_even_signs[code >> 9]);
        }
        D(scaled)(points, 16, d * (0.5f + (float)scale) * 0.25f, to + 16 * j);
    }
}

/* iq2_s: d half, 32 bytes of points, 32 of signs, 8 with two top bits for each point, and nibbles
 * of scale as iq2_xs. */
ALWAYS void D(iq2_s)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int j = 0; j < 16; j++) {
        int scale = block[74 + j / 2] >> 4 * (j % 2) & 15;
        uint64_t points[2];
        QT_UNROLL
        for (int k = 0; k < 2; k++) {
            int i = 2 * j + k;
            unsigned point = block[2 + i] | (block[66 + i / 4] >> 2 * (i % 4) & 3) << 8;
            points[k] = D(signed_point)(gguf_grid_iq2_s[point], block[34 + i]);
        }
        D(scaled)(points, 16, d * (0.5f + (float)scale) * 0.25f, to + 16 * j);
    }
}

/* iq3_xxs: d half, 64 bytes of points, then words of signs and scale as iq2_xxs.
 * w = (d (s + 1/2) / 2) q. */
ALWAYS void D(iq3_xxs)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int j = 0; j < 8; j++) {
        const uint8_t *from = block + 2 + 8 * j;
        uint32_t word = word_at(block + 66 + 4 * j);
        uint64_t points[4];
        QT_UNROLL
        for (int k = 0; k < 4; k++) {
            uint64_t both = gguf_grid_iq3_xxs[from[2 * k]] |
                            (uint64_t)gguf_grid_iq3_xxs[from[2 * k + 1]] << 32;
            points[k] = D(signed_point)(both, gguf_even_signs[word >> 7 * k & 127]);
        }
        D(scaled)(points, 32, d * (0.5f + (float)(word >> 28)) * 0.5f, to + 32 * j);
    }
}

/* iq3_s: d half, 64 bytes of points, 8 with their ninth bits, 32 of signs, a nibble of scale for
 * each 32 weights. w = (d (2 s + 1)) q. */
ALWAYS void D(iq3_s)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int j = 0; j < 8; j++) {
        const uint8_t *from = block + 2 + 8 * j, *signs = block + 74 + 4 * j;
        unsigned ninth = block[66 + j];
        int scale = block[106 + j / 2] >> 4 * (j % 2) & 15;
        uint64_t points[4];
        QT_UNROLL
        for (int k = 0; k < 4; k++) {
            unsigned a = from[2 * k] | (ninth >> 2 * k & 1) << 8;
            unsigned b = from[2 * k + 1] | (ninth >> (2 * k + 1) & 1) << 8;
            uint64_t both = gguf_grid_iq3_s[a] | (uint64_t)gguf_grid_iq3_s[b] << 32;
            points[k] = D(signed_point)(both, signs[k]);
        }
        D(scaled)(points, 32, d * (float)(1 + 2 * scale), to + 32 * j);
    }
}

/* Signed bytes 8 t + 1 of a point of IQ1, or 8 t - 1: eight times t + 1/8 or t - 1/8. */
ALWAYS uint64_t D(shifted_point)(unsigned point, unsigned negative)
{
    return (gguf_grid_iq1[point] - negative * 0x0202020202020202) ^ 0x8080808080808080;
}

/* iq1_s: d half, 32 bytes of points, 8 words of 16 bits: three top bits for each of four points,
 * three bits of scale, one that negates the shift. w = (d (2 s + 1)) (t +- 1/8). */
ALWAYS void D(iq1_s)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int j = 0; j < 8; j++) {
        unsigned high = block[34 + 2 * j] | block[35 + 2 * j] << 8;
        uint64_t points[4];
        QT_UNROLL
        for (int k = 0; k < 4; k++) {
            unsigned point = block[2 + 4 * j + k] | (high >> 3 * k & 7) << 8;
            points[k] = D(shifted_point)(point, high >> 15);
        }
        float scale = d * (float)(2 * (high >> 12 & 7) + 1);
        D(scaled)(points, 32, scale * 0.125f, to + 32 * j);
    }
}

/* iq1_m: 32 bytes of points, 16 with a nibble for each: three top bits and one that negates the
 * shift; four words of 16 bits, each four scales of three bits (16 weights each) and a nibble of d,
 * the lowest first. */
ALWAYS void D(iq1_m)(const uint8_t *block, OUT *to)
{
    uint64_t scales = words_at(block + 48);
    uint16_t bits = (uint16_t)((scales >> 12 & 0x000f) | (scales >> 24 & 0x00f0) |
                               (scales >> 36 & 0x0f00) | (scales >> 48 & 0xf000));
    float d = half_at((const uint8_t *)&bits);
    for (int j = 0; j < 16; j++) {
        uint64_t points[2];
        QT_UNROLL
        for (int k = 0; k < 2; k++) {
            unsigned nibble = block[32 + j] >> 4 * k & 15;
            points[k] = D(shifted_point)(block[2 * j + k] | (nibble & 7) << 8, nibble >> 3);
        }
        float scale = d * (float)(2 * (scales >> (16 * (j / 4) + 3 * (j % 4)) & 7) + 1);
        D(scaled)(points, 16, scale * 0.125f, to + 16 * j);
    }
}
