/* (code - zero) * scale for one output type; included by each_dtype.h. */

/* Up to 2 * LANES values where whole vectors do not fit. */
ALWAYS void D(put_some)(OUT *to, V a, V b, int64_t count)
{
    OUT room[2 * LANES];
    PUT2(room, a, b);
    memcpy(to, room, (size_t)count * sizeof(OUT));
}

/* A run of codes with one scale and zero. Reads whole vectors of codes. */
ALWAYS void D(put_run)(OUT *to, const uint8_t *codes, int64_t count, float scale, float zero,
                       int bits)
{
    V s = splat(scale), z = splat(zero);
    int64_t k = 0;
#if defined(PAIR)
    if (bits <= 5) {
        V low = (to_float(iota()) - z) * s, high = (to_float(iota() + 16) - z) * s;
        __m512i table = PAIR(low, bits == 5 ? high : low);
        for (; k + 32 <= count; k += 32) {
            __m512i index = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(codes + k)));
            _mm512_storeu_si512(to + k, _mm512_permutexvar_epi16(index, table));
        }
    }
#elif defined(QT_ISA_AVX512)
    if (bits <= 4) {
        __m512 table = (__m512)((to_float(iota()) - z) * s);
        for (; k + 16 <= count; k += 16)
            PUT(to + k, (V)_mm512_permutexvar_ps((__m512i)load_u8(codes + k), table));
    }
#else
    (void)bits;
#endif
    for (; k + 2 * LANES <= count; k += 2 * LANES)
        PUT2(to + k, (to_float(load_u8(codes + k)) - z) * s,
             (to_float(load_u8(codes + k + LANES)) - z) * s);
    if (k < count)
        D(put_some)(to + k, (to_float(load_u8(codes + k)) - z) * s,
                    (to_float(load_u8(codes + k + LANES)) - z) * s, count - k);
}

/* A run whose columns have scales and zeros of their own. */
ALWAYS void D(put_columns)(OUT *to, const uint8_t *codes, int64_t count, const qt_columns *of)
{
    for (int64_t k = 0; k < count; k += 2 * LANES) {
        const float *scale = of->scale + k, *zero = of->zero + k;
        V a = (to_float(load_u8(codes + k)) - load(zero)) * load(scale);
        V b = (to_float(load_u8(codes + k + LANES)) - load(zero + LANES)) * load(scale + LANES);
        if (k + 2 * LANES <= count)
            PUT2(to + k, a, b);
        else
            D(put_some)(to + k, a, b, count - k);
    }
}

ALWAYS void D(put_tile)(const qt_dequantizing *d, const qt_tile *tile, int bits, qt_columns *of)
{
    const qt_packing *p = &d->packing;
    int64_t col = tile->col, end = col + tile->cols;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t row = tile->row + r;
        const uint8_t *codes = tile->codes + r * tile->stride;
        const float *scale = d->scale + row * d->groups;
        const uint8_t *zero = d->zero + row * d->groups;
        OUT *to = (OUT *)d->values + (row - p->origin) * p->cols + col;
        if (d->g_idx || d->group_size < 2 * LANES) {
            for (int64_t k = 0; k < tile->cols; k++) {
                int64_t group = d->g_idx ? d->g_idx[col + k] : (col + k) / d->group_size;
                of->scale[k] = qt_plain_nan(scale[group]);
                of->zero[k] = (float)zero[group];
            }
            D(put_columns)(to, codes, tile->cols, of);
            continue;
        }
        for (int64_t from = col, to_; from < end; from = to_) {
            int64_t group = from / d->group_size;
            to_ = qt_least(end, (group + 1) * d->group_size);
            D(put_run)(to + (from - col), codes + (from - col), to_ - from,
                       qt_plain_nan(scale[group]), (float)zero[group], bits);
        }
    }
}

static int D(dequantize)(const qt_dequantizing *d)
{
    qt_tile tile;
    qt_columns columns = {{0}, {0}};
    const qt_packing *p = &d->packing;
#define QT_PUT_TILE(bits) D(put_tile)(d, &tile, bits, &columns)
    QT_FOR_TILES(p, tile, {
        qt_unpack_tile(p, &tile);
        QT_FOR_BITS(p->bits, QT_PUT_TILE)
    })
#undef QT_PUT_TILE
    return QT_OK;
}
