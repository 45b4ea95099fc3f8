/* Four-bit floats for one output type; included by each_dtype.h. */

/* A type of its own where tables can hold values as they are stored: sixteen-bit lanes. */
#if defined(PAIR)
typedef uint16_t D(fp4_entry);
#else
typedef float D(fp4_entry);
#endif

/* Sixteen weights by the bytes of their codes. */
ALWAYS void D(fp4_put)(OUT *to, const uint8_t *codes, const D(fp4_entry) * table)
{
#if defined(PAIR)
    __m256i index = _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)codes));
    __m256i values = _mm256_loadu_si256((const void *)table);
    _mm256_storeu_si256((void *)to, _mm256_permutexvar_epi16(index, values));
#else
    table16 wide;
    memcpy(&wide, table, sizeof wide);
    for (int i = 0; i < 16; i += LANES)
        PUT(to + i, look_up(&wide, load_u8(codes + i)));
#endif
}

static int D(fp4)(const qt_fp4 *f)
{
    enum { CHUNK = 1024 };
    float exact[256][16];
    uint8_t codes[CHUNK + STREAM_CODES];
    fill_table(f, exact);
#if defined(PAIR)
    uint16_t table[256][16];
    for (int code = 0; code < 256; code++)
        PUT(table[code], load(exact[code]));
#else
    float(*table)[16] = exact;
#endif
    const uint8_t *end = f->codes + f->rows * f->cols / 2;
    int64_t groups = f->cols / f->group_size;
    for (int64_t row = 0; row < f->rows; row++) {
        const uint8_t *scale = f->scale + row * groups;
        OUT *to = (OUT *)f->values + row * f->cols;
        for (int64_t col = 0; col < f->cols; col += CHUNK) {
            int64_t count = f->cols - col < CHUNK ? f->cols - col : CHUNK;
            qt_decode(codes, f->codes + (row * f->cols + col) / 2, end, count, 4);
            for (int64_t k = 0; k < count; k += 16)
                D(fp4_put)(to + col + k, codes + k, table[scale[(col + k) / f->group_size]]);
        }
    }
    return QT_OK;
}
