/* The K types: 256 weights in sub-blocks whose scales are codes themselves.
 * Included by gguf_dequant_all.h for each output type. */

/* Scale and minimum j of the twelve bytes that q4_k and q5_k keep: six bits each, the first four
 * of either in bytes of their own, the others in nibbles with their top bits above those. */
ALWAYS void D(scale_min)(const uint8_t *from, int j, float *scale, float *minimum)
{
    if (j < 4) {
        *scale = (float)(from[j] & 63);
        *minimum = (float)(from[j + 4] & 63);
    } else {
        *scale = (float)((from[j + 4] & 15) | from[j - 4] >> 6 << 4);
        *minimum = (float)(from[j + 4] >> 4 | from[j] >> 6 << 4);
    }
}

/* q2_k: 16 bytes (scale in the low nibble, minimum in the high one), 64 bytes as tq2_0, d and dmin
 * half. Sixteen weights a sub-block. w = (d s) q - (dmin m). */
ALWAYS void D(q2_k)(const uint8_t *block, OUT *to)
{
    float d = half_at(block + 80), dmin = half_at(block + 82), scale[16], minimum[16];
    for (int i = 0; i < 16; i += LANES) {
        I codes = load_u8(block + i);
        store(scale + i, to_float(codes & 15) * d);
        store(minimum + i, to_float(codes >> 4) * dmin);
    }
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += LANES) {
            I q = load_u8(block + 16 + 32 * half + i);
            for (int n = 0; n < 4; n++) {
                int j = 8 * half + 2 * n + i / 16;
                PUT(to + 128 * half + 32 * n + i, to_float(q >> 2 * n & 3) * scale[j] - minimum[j]);
            }
        }
}

/* q3_k: 32 bytes of third bits (bit j of byte i for weight 32 j + i; clear takes 4 away), 64 bytes
 * as tq2_0, 12 bytes of scales, d half. Six bits a scale: the low four of scale j in byte j mod 8,
 * nibble j / 8; the high two in byte 8 + j mod 4, bits 2 (j / 4). w = (d (s - 32)) q. */
ALWAYS void D(q3_k)(const uint8_t *block, OUT *to)
{
    float d = half_at(block + 108), scale[16];
    uint64_t low = words_at(block + 96), top = word_at(block + 104);
    uint64_t bits = 0x0303030303030303, nibbles = 0x0f0f0f0f0f0f0f0f;
    uint64_t codes[2] = {
        (low & nibbles) | ((top | top >> 2 << 32) & bits) << 4,
        (low >> 4 & nibbles) | ((top >> 4 | top >> 6 << 32) & bits) << 4,
    };
    for (int i = 0; i < 16; i += LANES)
        store(scale + i, to_float(load_u8((const uint8_t *)codes + i) - 32) * d);
    for (int i = 0; i < 32; i += LANES) {
        I high = load_u8(block + i);
        for (int half = 0; half < 2; half++) {
            I q = load_u8(block + 32 + 32 * half + i);
            for (int n = 0; n < 4; n++) {
                int j = 4 * half + n;
                I third = high << 2 >> j & 4;
                V code = to_float((q >> 2 * n & 3) + third - 4);
                PUT(to + 32 * j + i, code * scale[2 * j + i / 16]);
            }
        }
    }
}

/* q4_k: d, dmin half, 12 bytes of scales and minima, then for each 64 weights 32 bytes: the first
 * 32 in the low nibbles, the others in the high ones. w = (d s) q - (dmin m). */
ALWAYS void D(q4_k)(const uint8_t *block, OUT *to)
{
    float d = half_at(block), dmin = half_at(block + 2);
    for (int j = 0; j < 8; j += 2) {
        float s0, m0, s1, m1;
        D(scale_min)(block + 4, j, &s0, &m0);
        D(scale_min)(block + 4, j + 1, &s1, &m1);
        s0 *= d, s1 *= d, m0 *= dmin, m1 *= dmin;
        for (int i = 0; i < 32; i += LANES) {
            I q = load_u8(block + 16 + 16 * j + i);
            PUT(to + 32 * j + i, to_float(q & 15) * s0 - m0);
            PUT(to + 32 * j + 32 + i, to_float(q >> 4) * s1 - m1);
        }
    }
}

/* q5_k: as q4_k, with 32 bytes of fifth bits before the nibbles: bit j of byte i for weight i of
 * sub-block j. */
ALWAYS void D(q5_k)(const uint8_t *block, OUT *to)
{
    float d = half_at(block), dmin = half_at(block + 2);
    for (int j = 0; j < 8; j += 2) {
        float s0, m0, s1, m1;
        D(scale_min)(block + 4, j, &s0, &m0);
        D(scale_min)(block + 4, j + 1, &s1, &m1);
        s0 *= d, s1 *= d, m0 *= dmin, m1 *= dmin;
        for (int i = 0; i < 32; i += LANES) {
            I q = load_u8(block + 48 + 16 * j + i), high = load_u8(block + 16 + i) << 4 >> j;
            PUT(to + 32 * j + i, to_float((q & 15) | (high & 16)) * s0 - m0);
            PUT(to + 32 * j + 32 + i, to_float((q >> 4) | (high >> 1 & 16)) * s1 - m1);
        }
    }
}

/* q6_k: 128 bytes of low nibbles, 64 of high bit pairs, 16 signed scales, d half. Each half of the
 * block: weights 32 n + i, n = 0..3, take the nibble n / 2 of byte i + 32 (n mod 2) and the bits 2n
 * of byte i. w = (d s) (q - 32). */
ALWAYS void D(q6_k)(const uint8_t *block, OUT *to)
{
    float d = half_at(block + 208), scale[16];
    for (int i = 0; i < 16; i += LANES)
        store(scale + i, to_float(load_i8(block + 192 + i)) * d);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += LANES) {
            const uint8_t *low = block + 64 * half + i;
            I a = load_u8(low), b = load_u8(low + 32), h = load_u8(block + 128 + 32 * half + i);
            const float *s = scale + 8 * half + i / 16;
            OUT *at = to + 128 * half + i;
            PUT(at, to_float(((a & 15) | (h << 4 & 48)) - 32) * s[0]);
            PUT(at + 32, to_float(((b & 15) | (h << 2 & 48)) - 32) * s[2]);
            PUT(at + 64, to_float(((a >> 4) | (h & 48)) - 32) * s[4]);
            PUT(at + 96, to_float(((b >> 4) | (h >> 2 & 48)) - 32) * s[6]);
        }
}
