/* Blocks with one scale: the legacy types, the code books of four bits, the ternary types.
 * Included by gguf_dequant_all.h for each output type. */

/* Weights i .. and 16 + i .. of a block. */
ALWAYS void D(put_apart)(OUT *to, V a, V b)
{
    if (LANES == 16) {
        PUT2(to, a, b);
    } else {
        PUT(to, a);
        PUT(to + 16, b);
    }
}

/* q4_0: d half, 16 bytes: weight i in the low nibble of byte i, weight i + 16 in the high one.
 * w = (q - 8) d. */
ALWAYS void D(q4_0)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
#if defined(PAIR)
    V table = to_float(iota() - 8) * d;
    put_nibbles(to, block + 2, PAIR(table, table), PAST_CACHES);
    return;
#endif
    for (int i = 0; i < 16; i += LANES) {
        I q = load_u8(block + 2 + i);
        D(put_apart)(to + i, to_float((q & 15) - 8) * d, to_float((q >> 4) - 8) * d);
    }
}

/* q4_1: d, m half; nibbles as q4_0. w = q d + m. */
ALWAYS void D(q4_1)(const uint8_t *block, OUT *to)
{
    float d = half_at(block), m = half_at(block + 2);
#if defined(PAIR)
    V table = to_float(iota()) * d + m;
    put_nibbles(to, block + 4, PAIR(table, table), PAST_CACHES);
    return;
#endif
    for (int i = 0; i < 16; i += LANES) {
        I q = load_u8(block + 4 + i);
        D(put_apart)(to + i, to_float(q & 15) * d + m, to_float(q >> 4) * d + m);
    }
}

/* The fifth bits of weights i ..: bit i of the word, as 16 or 0. */
ALWAYS I D(fifth)(uint32_t word, int i)
{
    return (isplat((int32_t)(word >> i)) >> iota() & 1) << 4;
}

/* q5_0: d half, 32 bits: bit 4 of weight i in bit i, nibbles as q4_0. w = (q - 16) d. */
ALWAYS void D(q5_0)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    uint32_t high = word_at(block + 2);
    for (int i = 0; i < 16; i += LANES) {
        I q = load_u8(block + 6 + i);
        D(put_apart)(to + i, to_float(((q & 15) | D(fifth)(high, i)) - 16) * d,
                     to_float(((q >> 4) | D(fifth)(high, 16 + i)) - 16) * d);
    }
}

/* q5_1: d, m half, fifth bits and nibbles as q5_0. w = q d + m. */
ALWAYS void D(q5_1)(const uint8_t *block, OUT *to)
{
    float d = half_at(block), m = half_at(block + 2);
    uint32_t high = word_at(block + 4);
    for (int i = 0; i < 16; i += LANES) {
        I q = load_u8(block + 8 + i);
        D(put_apart)(to + i, to_float((q & 15) | D(fifth)(high, i)) * d + m,
                     to_float((q >> 4) | D(fifth)(high, 16 + i)) * d + m);
    }
}

/* q8_0: d half, 32 signed bytes. w = q d. */
ALWAYS void D(q8_0)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int i = 0; i < 32; i += 2 * LANES)
        PUT2(to + i, to_float(load_i8(block + 2 + i)) * d,
             to_float(load_i8(block + 2 + LANES + i)) * d);
}

/* q1_0: d half, 128 bits. w = d where the bit is set, else -d. */
ALWAYS void D(q1_0)(const uint8_t *block, OUT *to)
{
    V d = splat(half_at(block));
    for (int i = 0; i < 128; i += LANES) {
        uint16_t word = 0;
        memcpy(&word, block + 2 + i / 8, LANES == 16 ? 2 : 1);
        I bits = isplat(word >> i % 8);
        I clear = (bits >> iota() & 1) - 1;
        PUT(to + i, (V)((I)d ^ (clear & (int32_t)0x80000000)));
    }
}

/* q2_0: d half, 16 bytes, weight i in bits 2 (i mod 4) of byte i / 4. w = (q - 1) d. */
ALWAYS void D(q2_0)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    for (int i = 0; i < 64; i += LANES) {
        uint32_t word = 0;
        memcpy(&word, block + 2 + i / 4, LANES / 4);
        PUT(to + i, to_float((isplat((int32_t)word) >> 2 * iota() & 3) - 1) * d);
    }
}

/* Sixteen bytes of nibbles through a table: weights i and i + half. */
ALWAYS void D(nibbles)(const uint8_t *from, const table16 *table, int half, OUT *to)
{
#if defined(PAIR)
    if (half == 16) {
        put_nibbles(to, from, PAIR(table->part[0], table->part[0]), PAST_CACHES);
        return;
    }
#endif
    for (int i = 0; i < half; i += LANES) {
        I q = load_u8(from + i);
        V low = look_up(table, q), high = look_up(table, q >> 4);
        if (LANES == half) {
            PUT2(to, low, high);
        } else {
            PUT(to + i, low);
            PUT(to + half + i, high);
        }
    }
}

/* iq4_nl: d half, nibbles as q4_0. w = d book[q]. */
ALWAYS void D(iq4_nl)(const uint8_t *block, OUT *to)
{
    table16 table = table_times(iq4_book, half_at(block));
    D(nibbles)(block + 2, &table, 16, to);
}

/* iq4_xs: d half, 16 bits of high scale bits (two a sub-block), 4 bytes of low ones (a nibble
 * each), 8 sub-blocks of 16 bytes as q4_0. w = (d (s - 32)) book[q]. */
ALWAYS void D(iq4_xs)(const uint8_t *block, OUT *to)
{
    float d = half_at(block);
    unsigned high = block[2] | block[3] << 8;
    for (int j = 0; j < 8; j++) {
        int low = block[4 + j / 2] >> 4 * (j % 2) & 15;
        int scale = (low | (high >> 2 * j & 3) << 4) - 32;
        table16 table = table_times(iq4_book, d * (float)scale);
        D(nibbles)(block + 8 + 16 * j, &table, 16, to + 32 * j);
    }
}

/* mxfp4: e byte, nibbles as q4_0. w = book[q] 2^(e - 128), the book in halves. */
ALWAYS void D(mxfp4)(const uint8_t *block, OUT *to)
{
    uint32_t bits = block[0] < 2 ? 0x200000u << block[0] : (block[0] - 1u) << 23;
    float d;
    memcpy(&d, &bits, 4);
    table16 table = table_times(fp4_book, d);
    D(nibbles)(block + 1, &table, 16, to);
}

/* nvfp4: four scales of 16 weights each, unsigned E4M3 halved; 8 bytes a sub-block, weight i in
 * the low nibble of byte i, i + 8 in the high one. Codes 0 and 0x7f stand for the scale zero. */
ALWAYS void D(nvfp4)(const uint8_t *block, OUT *to)
{
    const uint64_t nibbles = 0x0f0f0f0f0f0f0f0f;
    for (int j = 0; j < 4; j++) {
        table16 table = table_times(fp4_book, half_ue4m3(block[j]));
        const uint8_t *from = block + 4 + 8 * j;
        uint64_t bytes = words_at(from), codes[2] = {bytes & nibbles, bytes >> 4 & nibbles};
        QT_UNROLL
        for (int i = 0; i < 16; i += LANES)
            PUT(to + 16 * j + i, look_up(&table, signed_bytes(codes, i)));
    }
}

/* n runs of the weights that the trits of LANES bytes stand for, `stride` apart: times three, the
 * top trit of a byte comes out above it. */
ALWAYS void D(trits)(I q, int n, int stride, float d, OUT *to)
{
    for (; n > 0; n--, to += stride) {
        q = (q & 255) + ((q & 255) << 1);
        PUT(to, to_float((q >> 8) - 1) * d);
    }
}

/* tq1_0: 48 bytes of five trits and 4 of four, then d half. The first 32 bytes hold five runs of
 * 32 weights, the next 16 five runs of 16, the last 4 four runs of 4. w = (t - 1) d. */
ALWAYS void D(tq1_0)(const uint8_t *block, OUT *to)
{
    float d = half_at(block + 52);
    for (int i = 0; i < 32; i += LANES)
        D(trits)(load_u8(block + i), 5, 32, d, to + i);
    for (int i = 0; i < 16; i += LANES)
        D(trits)(load_u8(block + 32 + i), 5, 16, d, to + 160 + i);
    /* Four bytes times 1, 3, 9, 27, each in 16 bits of a word: no product carries into the next. */
    uint64_t four = word_at(block + 48), spread = 0, bytes = 0x00ff00ff00ff00ff, last[2];
    for (int i = 0; i < 4; i++)
        spread |= (four >> 8 * i & 255) << 16 * i;
    for (int n = 0; n < 4; n++, spread = (spread * 3) & bytes) {
        uint64_t top = (spread * 3) >> 8 & bytes, packed = 0;
        for (int i = 0; i < 4; i++)
            packed |= (top >> 16 * i & 255) << 8 * i;
        last[n / 2] = n % 2 ? last[n / 2] | packed << 32 : packed;
    }
    QT_UNROLL
    for (int i = 0; i < 16; i += LANES)
        PUT(to + 240 + i, to_float(signed_bytes(last, i) - 1) * d);
}

/* tq2_0: 64 bytes, then d half. Each half of the block: bits 2n of byte i hold weight 32 n + i.
 * w = (q - 1) d. */
ALWAYS void D(tq2_0)(const uint8_t *block, OUT *to)
{
    float d = half_at(block + 64);
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < 32; i += LANES) {
            I q = load_u8(block + 32 * half + i);
            for (int n = 0; n < 4; n++)
                PUT(to + 128 * half + 32 * n + i, to_float((q >> 2 * n & 3) - 1) * d);
        }
}
