/* Codes of a byte for one output type; included by each_dtype.h. */

/* A run of codes with one scale. Reads and writes nothing past it. */
ALWAYS void D(bytes_run)(OUT *to, const uint8_t *codes, int64_t count, float scale, float zero,
                         int kind)
{
    V s = splat(scale), z = splat(zero);
    int64_t k = 0;
#define VALUE(at) (value_of(kind, codes_at(kind, at)) - z) * s
    for (; k + 2 * LANES <= count; k += 2 * LANES)
        PUT2(to + k, VALUE(codes + k), VALUE(codes + k + LANES));
    if (k < count) {
        uint8_t rest[2 * LANES] = {0};
        OUT values[2 * LANES];
        memcpy(rest, codes + k, (size_t)(count - k));
        PUT2(values, VALUE(rest), VALUE(rest + LANES));
        memcpy(to + k, values, (size_t)(count - k) * sizeof(OUT));
    }
#undef VALUE
}

ALWAYS void D(bytes_rows)(const qt_bytes *b, int kind)
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
            D(bytes_run)(to + col, codes + col, count, scale, zero, kind);
            col += count;
        }
    }
}

static int D(bytes)(const qt_bytes *b)
{
    switch (b->code) {
    case QT_I8:
        D(bytes_rows)(b, QT_I8);
        return QT_OK;
    case QT_U8:
        D(bytes_rows)(b, QT_U8);
        return QT_OK;
    case QT_E4M3:
        D(bytes_rows)(b, QT_E4M3);
        return QT_OK;
    case QT_E5M2:
        D(bytes_rows)(b, QT_E5M2);
        return QT_OK;
    }
    return QT_E_ARGUMENT;
}
