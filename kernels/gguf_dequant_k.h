/* The K types: 256 weights in sub-blocks whose scales are codes themselves.
 * Included by gguf_dequant_all.h for each output type. */

/* The eight scales times d, then the eight minima times dmin, of the twelve bytes that q4_k and
 * q5_k keep: six bits each, the first four of either in bytes of their own, the others in nibbles
 * with their top bits above those. */
ALWAYS void D(scales_minima)(const uint8_t *from, float d, float dmin, float *to)
{
    const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
    uint32_t a = word_at(from), b = word_at(from + 4), c = word_at(from + 8);
    uint64_t codes[2] = {
        (a & six) | (uint64_t)((c & four) | (a >> 2 & two)) << 32,
        (b & six) | (uint64_t)((c >> 4 & four) | (b >> 2 & two)) << 32,
    };
    QT_UNROLL
    for (int i = 0; i < 16; i += LANES) {
        V unit = splat(i < 8 ? d : dmin);
        if (LANES == 16)
            unit = pick(ilt(iota(), isplat(8)), splat(d), splat(dmin));
        store(to + i, to_float(signed_bytes(codes, i)) * unit);
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
    float scale[16];
    D(scales_minima)(block + 4, half_at(block), half_at(block + 2), scale);
    QT_UNROLL
    for (int j = 0; j < 8; j += 2) {
        float s0 = scale[j], s1 = scale[j + 1], m0 = scale[j + 8], m1 = scale[j + 9];
#if defined(PAIR)
        __m512i table = PAIR(to_float(iota()) * s0 - m0, to_float(iota()) * s1 - m1);
        put_nibbles_of_two(to + 32 * j, block + 16 + 16 * j, table, PAST_CACHES);
        continue;
#endif
        for (int i = 0; i < 32; i += 2 * LANES) {
            const uint8_t *from = block + 16 + 16 * j + i;
            I a = load_u8(from), b = load_u8(from + LANES);
            OUT *at = to + 32 * j + i;
            PUT2(at, to_float(a & 15) * s0 - m0, to_float(b & 15) * s0 - m0);
            PUT2(at + 32, to_float(a >> 4) * s1 - m1, to_float(b >> 4) * s1 - m1);
        }
    }
}

/* q5_k: as q4_k, with 32 bytes of fifth bits before the nibbles: bit j of byte i for weight i of
 * sub-block j. */
ALWAYS void D(q5_k)(const uint8_t *block, OUT *to)
{
    float scale[16];
    D(scales_minima)(block + 4, half_at(block), half_at(block + 2), scale);
    QT_UNROLL
    for (int j = 0; j < 8; j += 2) {
        float s0 = scale[j], s1 = scale[j + 1], m0 = scale[j + 8], m1 = scale[j + 9];
        for (int i = 0; i < 32; i += 2 * LANES) {
            const uint8_t *from = block + 48 + 16 * j + i, *fifth = block + 16 + i;
            I a = load_u8(from), high_a = load_u8(fifth) << 4 >> j;
            I b = load_u8(from + LANES), high_b = load_u8(fifth + LANES) << 4 >> j;
            OUT *at = to + 32 * j + i;
            PUT2(at, to_float((a & 15) | (high_a & 16)) * s0 - m0,
                 to_float((b & 15) | (high_b & 16)) * s0 - m0);
            PUT2(at + 32, to_float((a >> 4) | (high_a >> 1 & 16)) * s1 - m1,
                 to_float((b >> 4) | (high_b >> 1 & 16)) * s1 - m1);
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
    IN_MEMORY(scale);
    for (int half = 0; half < 2; half++) {
        const uint8_t *low = block + 64 * half, *high = block + 128 + 32 * half;
        int8_t code[128];
        for (int i = 0; i < 32; i++) {
            code[i] = (int8_t)(((low[i] & 15) | (high[i] << 4 & 48)) - 32);
            code[i + 32] = (int8_t)(((low[i + 32] & 15) | (high[i] << 2 & 48)) - 32);
            code[i + 64] = (int8_t)((low[i] >> 4 | (high[i] & 48)) - 32);
            code[i + 96] = (int8_t)((low[i + 32] >> 4 | (high[i] >> 2 & 48)) - 32);
        }
        QT_UNROLL
        for (int i = 0; i < 128; i += 2 * LANES) {
            const float *s = scale + 8 * half + i / 16, *t = scale + 8 * half + (i + LANES) / 16;
            PUT2(to + 128 * half + i, to_float(load_i8(code + i)) * *s,
                 to_float(load_i8(code + i + LANES)) * *t);
        }
    }
}
