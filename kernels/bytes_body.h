/* Codes of a byte for one output type; included by each_dtype.h. */

/* A run of codes with one scale. Reads and writes nothing past it. */
ALWAYS void D(bytes_run)(OUT *to, const uint8_t *codes, int64_t count, float scale, float zero,
                         int kind, int past_caches)
{
    V s = splat(scale), z = splat(zero);
    int64_t k = 0;
#define VALUE(at) (value_of(kind, codes_at(kind, at)) - z) * s
    for (; k + 2 * LANES <= count; k += 2 * LANES) {
        V first = VALUE(codes + k), second = VALUE(codes + k + LANES);
        if (past_caches)
            STREAM2(to + k, first, second);
        else
            PUT2(to + k, first, second);
    }
    if (k < count) {
        uint8_t rest[2 * LANES] = {0};
        OUT values[2 * LANES];
        memcpy(rest, codes + k, (size_t)(count - k));
        PUT2(values, VALUE(rest), VALUE(rest + LANES));
        memcpy(to + k, values, (size_t)(count - k) * sizeof(OUT));
    }
#undef VALUE
}

ALWAYS void D(bytes_rows)(const qt_bytes *b, int kind, int past_caches)
{
    int64_t per_row = (b->cols + b->block_cols - 1) / b->block_cols;
    for (int64_t row = b->first; row < b->last; row++) {
        const uint8_t *codes = b->codes + row * b->cols;
        OUT *to = (OUT *)b->values + (row - b->origin) * b->cols;
        int64_t group = row / b->block_rows * per_row;
        for (int64_t col = 0; col < b->cols; group++) {
            int64_t rest = b->cols - col, count = rest < b->block_cols ? rest : b->block_cols;
            float scale = qt_plain_nan(b->scale[group]), zero = 0;
            if (b->zero)
                zero = kind == QT_I8 ? (float)(int8_t)b->zero[group] : (float)b->zero[group];
            D(bytes_run)(to + col, codes + col, count, scale, zero, kind, past_caches);
            col += count;
        }
    }
}

/* Whether to write past the caches: a matrix that no cache holds, where every vector is aligned. */
static int D(bytes_past_caches)(const qt_bytes *b)
{
    enum { CACHE = 4 << 20 };
    int64_t row_bytes = b->cols * (int64_t)sizeof(OUT);
    if (!QT_STREAMS || (b->last - b->first) * row_bytes < CACHE)
        return 0;
    if (row_bytes % 64 || (uintptr_t)b->values % 64)
        return 0;
    return b->block_cols >= b->cols || b->block_cols % (2 * LANES) == 0;
}

static int D(bytes)(const qt_bytes *b)
{
    int past_caches = D(bytes_past_caches)(b);
    switch (b->code) {
#define KIND(kind)                        \
    case kind:                            \
        if (past_caches)                  \
            D(bytes_rows)(b, kind, 1);    \
        else                              \
            D(bytes_rows)(b, kind, 0);    \
        break;
        KIND(QT_I8)
        KIND(QT_U8)
        KIND(QT_E4M3)
        KIND(QT_E5M2)
#undef KIND
    default:
        return QT_E_ARGUMENT;
    }
    stream_end();
    return QT_OK;
}
