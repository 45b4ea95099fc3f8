/* The kernels that quantize, convert and sum: tasks like those of kernel_cases.h. */
#ifndef QTOOL_KERNEL_MORE_CASES_H
#define QTOOL_KERNEL_MORE_CASES_H

#include "kernel_float_cases.h"

typedef struct {
    int32_t from, to;
    int64_t count;
    const uint8_t *source;
} conversion;

static int run_convert(void *task, uint8_t *out[])
{
    conversion *t = task;
    return qt_convert(t->from, t->to, t->count, t->source, out[0]);
}

static void convert_case(input *in)
{
    conversion task = {.from = any_dtype(in), .to = any_dtype(in), .count = below(in, 200)};
    size_t each = task.from == QT_F32 || task.from == 3 ? 4 : 2;
    task.source = random_bytes(in, (size_t)task.count * each, 0);
    output o = floats_out(task.to, task.count, 0);
    agree(in, run_convert, &task, &o, 1);
}

static int run_checksum(void *task, uint8_t *out[])
{
    conversion *t = task;
    uint64_t sum = 0;
    int code = qt_checksum((uint64_t)t->from, t->count, t->source, &sum);
    memcpy(out[0], &sum, sizeof sum);
    return code;
}

static void checksum_case(input *in)
{
    conversion task = {.from = (int32_t)word(in), .count = below(in, 1000)};
    task.source = random_bytes(in, (size_t)task.count, byte(in) % 8);
    output o = {8, BYTES, 0};
    agree(in, run_checksum, &task, &o, 1);
}

typedef struct {
    int64_t count;
    const float *x, *y;
} two_arrays;

static int run_squares(void *task, uint8_t *out[])
{
    two_arrays *t = task;
    double sum[2] = {0, 0};
    int code = qt_squares(t->count, t->x, t->y, sum);
    memcpy(out[0], sum, sizeof sum);
    return code;
}

static void squares_case(input *in)
{
    two_arrays task = {.count = below(in, 1000)};
    task.x = numbers(in, task.count, 20, 0);
    task.y = numbers(in, task.count, 20, 0);
    output o = {16, DOUBLES, 0};
    agree(in, run_squares, &task, &o, 1);
}

static int run_plain(void *task, uint8_t *out[])
{
    conversion *t = task;
    int code = qt_plain(t->source, t->count, out[0], t->to, t->from);
    memset(out[0], 0, (size_t)t->to); /* says nothing; the reads and writes are what is checked */
    return code;
}

static void plain_case(input *in)
{
    conversion task = {.count = between(in, 60, 2000), .to = (int32_t)between(in, 60, 2000)};
    task.source = random_bytes(in, (size_t)task.count, byte(in) % 8);
    output o = {(size_t)task.to, BYTES, byte(in) % 8};
    agree(in, run_plain, &task, &o, 1);
}

static int run_gguf_convert(void *task, uint8_t *out[])
{
    qt_gguf_piece piece = *(qt_gguf_piece *)task;
    size_t room_size = (size_t)(piece.step * piece.cols) * sizeof(float);
    if (piece.to)
        piece.to = out[0];
    piece.values = (float *)(void *)out[2];
    piece.back = (float *)(void *)out[3];
    int code = qt_gguf_convert(&piece);
    double sums[2] = {piece.size, piece.lost};
    memcpy(out[1], sums, sizeof sums);
    memset(out[2], 0, room_size); /* what is left there says nothing */
    memset(out[3], 0, room_size);
    return code;
}

/* Number, weights and bytes of a block type, or of plain numbers. */
static int64_t any_type(input *in, int32_t *number, int64_t *bytes)
{
    static const int32_t plain[] = {QT_GGUF_F32, QT_GGUF_F16, QT_GGUF_BF16};
    int64_t at = below(in, BLOCK_TYPES + 3);
    *number = at < BLOCK_TYPES ? block_types[at].number : plain[at - BLOCK_TYPES];
    *bytes = at < BLOCK_TYPES ? block_types[at].bytes : *number == QT_GGUF_F32 ? 4 : 2;
    return at < BLOCK_TYPES ? block_types[at].weights : 1;
}

static void convert_gguf_case(input *in)
{
    qt_gguf_piece piece = {.rows = between(in, 0, 5), .step = between(in, 1, 3)};
    int64_t from_bytes, to_bytes, from_weights = any_type(in, &piece.from_type, &from_bytes);
    int64_t to_weights = any_type(in, &piece.to_type, &to_bytes);
    piece.cols = 256 * between(in, 1, 2);
    int64_t from_size = piece.rows * (piece.cols / from_weights * from_bytes);
    if (piece.from_type == QT_GGUF_F32) {
        piece.from = (uint8_t *)(void *)numbers(in, piece.rows * piece.cols, 6, 0);
    } else {
        uint8_t *from = random_bytes(in, (size_t)from_size, byte(in) % 4);
        for (int64_t i = 1; from_weights == 1 && i < from_size; i += 2)
            from[i] &= 0xbf; /* finite halves */
        piece.from = from;
    }
    piece.importance = numbers(in, piece.cols, 3, 1);
    size_t to_size = (size_t)(piece.rows * (piece.cols / to_weights * to_bytes));
    size_t room_size = (size_t)(piece.step * piece.cols) * sizeof(float);
    output o[] = {{to_size, BYTES, 0}, {16, DOUBLES, 0}, {room_size, BYTES, 0},
                  {room_size, BYTES, 0}};
    piece.to = byte(in) % 8 ? room(in, 0, 1) : NULL;
    agree(in, run_gguf_convert, &piece, o, 4);
}

/* keeps the ratios of a search alive */
static qt_quantizer any_quantizer(input *in, double ratios[3])
{
    qt_quantizer q = {.bits = (int32_t)between(in, 2, 8), .symmetric = byte(in) % 2};
    q.scale_dtype = (int32_t)below(in, 3);
    q.ratio_count = (int32_t)below(in, 4);
    q.reach = (double)(1 << (q.bits - 1)) - 0.5 * (double)below(in, 3);
    q.norm = byte(in) % 4 ? 2.0 : 2.4;
    for (int i = 0; i < 3; i++)
        ratios[i] = 1.0 - (double)below(in, 100) / 128;
    q.ratios = ratios;
    return q;
}

static int run_groups(void *task, uint8_t *out[])
{
    qt_groups t = *(qt_groups *)task;
    size_t scales = (size_t)(t.rows * ((t.cols + t.group_size - 1) / t.group_size));
    if (t.given) {
        memcpy(out[0], t.scale, scales * 4);
        memcpy(out[1], t.zero, scales);
    }
    t.scale = (float *)(void *)out[0];
    t.zero = out[1];
    t.codes = out[2];
    t.dequantized = (float *)(void *)out[3];
    return qt_quantize_groups(&t);
}

static uint8_t *zeros(input *in, size_t count, int bits)
{
    uint8_t *all = random_bytes(in, count, 0);
    for (size_t i = 0; i < count; i++)
        all[i] &= (uint8_t)((1 << bits) - 1);
    return all;
}

static void quantize_groups_case(input *in)
{
    double ratios[3];
    qt_groups t = {.quantizer = any_quantizer(in, ratios)};
    t.rows = between(in, 1, 70);
    t.cols = between(in, 1, 100);
    t.group_size = between(in, 1, t.cols);
    int64_t groups = (t.cols + t.group_size - 1) / t.group_size;
    size_t scales = (size_t)(t.rows * groups), size = (size_t)(t.rows * t.cols);
    t.weight = numbers(in, t.rows * t.cols, 6, 0);
    t.given = byte(in) % 4 == 0;
    if (t.given) {
        t.scale = numbers(in, (int64_t)scales, 3, 1);
        for (size_t i = 0; i < scales; i++)
            t.scale[i] += 0x1p-10f;
        t.zero = zeros(in, scales, t.quantizer.bits);
    } else if (byte(in) % 2) {
        t.importance = numbers(in, t.cols, 3, 1);
    } else if (byte(in) % 2) {
        t.quantizer.norm = 2;
        t.gram = numbers(in, groups * t.group_size * t.group_size, 3, 0);
    }
    output o[] = {{scales * 4, FLOATS, 0}, {scales, BYTES, 0}, {size, BYTES, 0},
                  {size * 4, FLOATS, 0}};
    agree(in, run_groups, &t, o, 4);
}

typedef struct {
    qt_sweep sweep;
    int doubles;
} sweeping;

static int run_sweep(void *task, uint8_t *out[])
{
    sweeping *s = task;
    qt_sweep t = s->sweep;
    size_t scales = (size_t)(t.rows * ((t.cols + t.group_size - 1) / t.group_size));
    if (t.groups == QT_GROUPS_GIVEN) {
        memcpy(out[0], t.scale, scales * (s->doubles ? 8 : 4));
        memcpy(out[1], t.zero, scales);
    }
    if (t.groups != QT_GROUPS_LEVELS)
        t.scale = out[0];
    t.zero = out[1];
    t.codes = out[2];
    t.loss = (double *)(void *)out[3];
    return s->doubles ? qt_gptq_sweep_f64(&t) : qt_gptq_sweep_f32(&t);
}

/* Floats as they are, or as doubles. */
static void *reals(input *in, float *from, int64_t count, int doubles)
{
    if (!doubles)
        return from;
    double *all = (double *)(void *)room(in, (size_t)count * sizeof(double), 0);
    for (int64_t i = 0; i < count; i++)
        all[i] = (double)from[i] * (1.0 + 0x1p-30);
    return all;
}

/* Levels of all kinds for a sweep: numbers in any order or whole ones in a row. One task in 64 has
 * more than the kernel takes. */
static void any_levels(input *in, qt_sweep *t, int64_t scales)
{
    t->levels = (int32_t)(byte(in) % 64 ? between(in, 1, byte(in) % 2 ? 16 : 256) : 257);
    float *book = numbers(in, t->levels, 3, 0);
    int whole = byte(in) % 2, low = (int)below(in, 200) - 128;
    for (int32_t i = 0; whole && i < t->levels; i++)
        book[i] = (float)(low + i);
    t->book = book;
    t->scale = numbers(in, scales, 3, 0);
    if (byte(in) % 2)
        t->offset = numbers(in, scales, 3, 0);
}

/* Points that neighbours choose together: of four coordinates with up to eight numbers, or of eight
 * with up to three. One task in 64 has a code too large. */
static void any_points(input *in, qt_sweep *t, int64_t scales)
{
    int64_t most = t->coordinates == 8 ? 3 : 8, count = between(in, 1, most);
    t->second = (int32_t)below(in, 4);
    int signs = t->second <= QT_SECOND_EVEN;
    t->levels = (int32_t)(t->second == QT_SECOND_NONE ? count : 2 * count);
    float *book = numbers(in, t->levels, 3, signs);
    for (int64_t i = 0; signs && i < count; i++) {
        book[i] += 0x1p-10f;
        book[count + i] = -book[i];
    }
    t->points = (int32_t)between(in, 1, byte(in) % 4 ? 40 : 2048);
    size_t size = (size_t)(t->points * t->coordinates);
    uint8_t *point = random_bytes(in, size, 0);
    for (size_t i = 0; i < size; i++)
        point[i] = (uint8_t)(point[i] % count);
    if (byte(in) % 64 == 0)
        point[0] = (uint8_t)count;
    t->book = book;
    t->point = point;
    t->scale = numbers(in, scales, 3, 0);
    if (!signs && byte(in) % 2)
        t->offset = numbers(in, scales, 3, 0);
}

static void gptq_sweep_case(input *in)
{
    double ratios[3];
    sweeping s = {.sweep = {.quantizer = any_quantizer(in, ratios)}, .doubles = byte(in) % 2};
    qt_sweep *t = &s.sweep;
    t->rows = between(in, 1, 70);
    t->cols = between(in, 1, byte(in) % 4 ? 60 : 300);
    t->group_size = between(in, 1, t->cols);
    t->groups = (int32_t)below(in, 4);
    int32_t unit = t->groups == QT_GROUPS_LEVELS && byte(in) % 2 ? 8 : 1;
    if (unit > 1) {
        t->coordinates = byte(in) % 2 ? 4 : 8;
        t->cols = unit * between(in, 1, 20);
        t->group_size = unit * between(in, 1, t->cols / unit);
    }
    int64_t groups = (t->cols + t->group_size - 1) / t->group_size;
    size_t scales = (size_t)(t->rows * groups), size = (size_t)(t->rows * t->cols);
    t->weight = reals(in, numbers(in, t->rows * t->cols, 3, 0), t->rows * t->cols, s.doubles);
    float *factor = numbers(in, t->cols * t->cols, 3, 0);
    for (int64_t i = 0; i < t->cols; i++) {
        for (int64_t j = 0; j < t->cols; j++)
            factor[i * t->cols + j] *= j > i ? 0x1p-6f : 0.0f;
        factor[i * t->cols + i] = 0.5f + (float)byte(in) / 256;
    }
    t->hinv = reals(in, factor, t->cols * t->cols, s.doubles);
    if (byte(in) % 2) {
        int32_t *order = (int32_t *)(void *)room(in, (size_t)t->cols * 4, 0);
        for (int32_t i = 0; i < t->cols; i += unit) {
            int64_t other = below(in, i / unit + 1) * unit;
            order[i] = i;
            order[i] = order[other];
            order[other] = i;
        }
        for (int32_t i = 0; i < t->cols; i++)
            order[i] = order[i - i % unit] + i % unit;
        t->order = order;
    }
    if (byte(in) % 2)
        t->importance = numbers(in, t->cols, 3, 1);
    if (t->groups == QT_GROUPS_GIVEN) {
        float *scale = numbers(in, (int64_t)scales, 3, 1);
        for (size_t i = 0; i < scales; i++)
            scale[i] += 0x1p-10f;
        t->scale = reals(in, scale, (int64_t)scales, s.doubles);
        t->zero = zeros(in, scales, t->quantizer.bits);
    }
    if (unit > 1)
        any_points(in, t, (int64_t)scales);
    else if (t->groups == QT_GROUPS_LEVELS)
        any_levels(in, t, (int64_t)scales);
    output o[] = {{scales * (s.doubles ? 8 : 4), s.doubles ? DOUBLES : FLOATS, 0},
                  {scales, BYTES, 0}, {size, BYTES, 0}, {(size_t)t->rows * 8, DOUBLES, 0}};
    agree(in, run_sweep, &s, o, 4);
}

/* Those that read what others wrote come first. */
static const struct {
    const char *name;
    void (*run)(input *in);
} cases[] = {
    {"gguf_dequantize", gguf_dequantize_case},
    {"unpack", unpack_case},
    {"dequantize", dequantize_case},
    {"dequantize_bytes", dequantize_bytes_case},
    {"dequantize_fp4", dequantize_fp4_case},
    {"convert", convert_case},
    {"checksum", checksum_case},
    {"pack", pack_case},
    {"plain", plain_case},
    {"squares", squares_case},
    {"gguf_encode", gguf_encode_case},
    {"convert_gguf", convert_gguf_case},
    {"quantize_groups", quantize_groups_case},
    {"gptq_sweep", gptq_sweep_case},
    {"round_floats", round_floats_case},
};
enum { READERS = 6, CASES = sizeof cases / sizeof cases[0] };

/* Runs case `which` on the input and returns a digest of all outputs. */
static uint64_t run_case(int which, const uint8_t *data, size_t size)
{
    input in = {.at = data, .left = size, .state = UINT64_C(0x9e3779b97f4a7c15)};
    in.name = cases[which].name;
    cases[which].run(&in);
    for (int i = 0; i < in.count; i++)
        free(in.blocks[i]);
    return in.digest;
}

#endif
