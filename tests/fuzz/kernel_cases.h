/* One function for each kernel: a task drawn from an input, within what the kernel may be given
 * (sizes that belong together), or beside it where the kernel itself must refuse. */
#ifndef QTOOL_KERNEL_CASES_H
#define QTOOL_KERNEL_CASES_H

#include "../../kernels/gguf_types.h"
#include "../../kernels/ops.h"
#include "kernel_input.h"

#define DECLARE(name, parameters, arguments) int qt_##name parameters;
QT_OPS(DECLARE)
#undef DECLARE

static const struct {
    const char *name;
    int32_t number;
    int64_t weights, bytes;
} block_types[] = {
#define ROW(name, number, weights, bytes) {#name, number, weights, bytes},
    QT_GGUF_TYPES(ROW)
#undef ROW
};
enum { BLOCK_TYPES = sizeof block_types / sizeof block_types[0] };

static const content float_contents[] = {FLOATS, HALVES, BFLOATS};
static const size_t float_sizes[] = {4, 2, 2};

/* Bytes of `count` floats of a dtype; 4 each where the kernel must refuse the dtype. */
static output floats_out(int dtype, int64_t count, size_t offset)
{
    int known = dtype >= 0 && dtype < 3;
    return (output){(size_t)count * float_sizes[known ? dtype : 0],
                    float_contents[known ? dtype : 0], offset};
}

/* One in 64 tasks asks for a dtype that is not there. */
static int32_t any_dtype(input *in)
{
    int64_t drawn = below(in, 64);
    return drawn == 63 ? 3 : (int32_t)(drawn % 3);
}

typedef struct {
    int32_t type, dtype;
    int64_t blocks;
    const uint8_t *from;
} gguf_blocks;

static int run_gguf_dequantize(void *task, uint8_t *out[])
{
    gguf_blocks *t = task;
    return qt_gguf_dequantize(t->type, t->dtype, t->blocks, t->from, out[0]);
}

static void gguf_dequantize_case(input *in)
{
    int64_t at = below(in, BLOCK_TYPES);
    gguf_blocks task = {block_types[at].number, any_dtype(in), below(in, 12), NULL};
    task.from = random_bytes(in, (size_t)(task.blocks * block_types[at].bytes), byte(in) % 4);
    output o = floats_out(task.dtype, task.blocks * block_types[at].weights, byte(in) % 4);
    if (byte(in) == 255)
        task.type = (int32_t)(word(in) | 64); /* no type has such a number */
    agree(in, run_gguf_dequantize, &task, &o, 1);
}

typedef struct {
    gguf_blocks blocks;
    int64_t rows, cols;
    const float *weight, *importance;
} gguf_weights;

static int run_gguf_encode(void *task, uint8_t *out[])
{
    gguf_weights *t = task;
    return qt_gguf_encode(t->blocks.type, t->rows, t->cols, t->weight, t->importance, out[0]);
}

static void gguf_encode_case(input *in)
{
    static const int spreads[] = {0, 2, 6, 40};
    int64_t at = below(in, BLOCK_TYPES), per = block_types[at].weights;
    int32_t type = block_types[at].number;
    gguf_weights task = {.blocks = {.type = type}, .rows = between(in, 1, 5)};
    int64_t row_blocks = between(in, 1, per == 256 ? 4 : 20);
    task.cols = row_blocks * per;
    task.weight = numbers(in, task.rows * task.cols, spreads[byte(in) % 4], 0);
    int needed = type == 16 || type == 17 || type == 19;
    if (needed || byte(in) % 2)
        task.importance = numbers(in, task.cols, spreads[byte(in) % 3], 1);
    output o = {(size_t)(task.rows * row_blocks * block_types[at].bytes), BYTES, 0};
    agree(in, run_gguf_encode, &task, &o, 1);
}

/* A packing that a kernel takes; origin is the row that codes or values begin with. */
static qt_packing any_packing(input *in)
{
    qt_packing p = {.layout = (int32_t)below(in, 5), .bits = (int32_t)between(in, 2, 8)};
    int64_t step = 1;
    p.rows = between(in, 1, 300);
    p.cols = between(in, 1, byte(in) % 16 ? 200 : 3000);
    for (int i = 0; i < 8; i++)
        p.order[i] = (uint8_t)i;
    for (int i = 7; i > 0; i--) {
        int64_t other = below(in, i + 1);
        uint8_t kept = p.order[i];
        p.order[i] = p.order[other];
        p.order[other] = kept;
    }
    if (p.layout == QT_ACROSS || p.layout == QT_STRIPS) {
        step = p.layout == QT_ACROSS ? 8 : 4;
        p.bits = 4;
        p.rows = (p.rows + step - 1) / step * step;
        p.cols = p.layout == QT_STRIPS ? (p.cols + 63) / 64 * 64 : p.cols;
    }
    p.first = below(in, p.rows / step + 1) * step;
    p.last = between(in, p.first / step, p.rows / step) * step;
    p.origin = between(in, 0, p.first);
    return p;
}

static size_t words_size(const qt_packing *p)
{
    int64_t run = (p->cols * p->bits + 31) / 32, each = 32 / p->bits;
    switch (p->layout) {
    case QT_PADDED:
        return (size_t)(p->rows * ((p->cols + each - 1) / each)) * 4;
    case QT_ACROSS:
    case QT_STRIPS:
        return (size_t)(p->rows * p->cols / 8) * 4;
    }
    return (size_t)(p->rows * run) * 4;
}

static int run_unpack(void *task, uint8_t *out[])
{
    ((qt_packing *)task)->codes = out[0];
    return qt_unpack(task);
}

static void unpack_case(input *in)
{
    qt_packing p = any_packing(in);
    p.words = random_bytes(in, words_size(&p), byte(in) % 4);
    output o = {(size_t)((p.last - p.origin) * p.cols), BYTES, byte(in) % 4};
    if (byte(in) == 255)
        p.layout = 5;
    if (byte(in) == 255)
        p.bits = byte(in) % 2 ? 1 : 9;
    agree(in, run_unpack, &p, &o, 1);
}

static int run_pack(void *task, uint8_t *out[])
{
    ((qt_packing *)task)->words = out[0];
    return qt_pack(task);
}

/* Codes come back from their words. */
static void pack_case(input *in)
{
    qt_packing p = any_packing(in);
    size_t size = (size_t)((p.last - p.origin) * p.cols);
    p.codes = random_bytes(in, size, byte(in) % 4);
    for (size_t i = 0; i < size; i++)
        p.codes[i] &= (uint8_t)((1 << p.bits) - 1);
    int too_large = byte(in) == 255 && p.bits < 8 && p.first < p.last;
    if (too_large) /* words before it are written by then: nothing to compare but the refusal */
        p.codes[(p.first - p.origin) * p.cols] = 255;
    output o = {words_size(&p), BYTES, byte(in) % 4};
    uint8_t *codes = p.codes, **words = agree(in, run_pack, &p, &o, 1);
    if (too_large)
        return;
    p.words = words[0];
    uint8_t *back = room(in, size, 0);
    p.codes = back;
    qt_unpack(&p);
    size_t before = (size_t)((p.first - p.origin) * p.cols);
    if (memcmp(back + before, codes + before, size - before)) {
        fprintf(stderr, "pack: other codes come back\n");
        abort();
    }
}

static int run_dequantize(void *task, uint8_t *out[])
{
    ((qt_dequantizing *)task)->values = out[0];
    return qt_dequantize(task);
}

static void dequantize_case(input *in)
{
    qt_dequantizing d = {.packing = any_packing(in), .dtype = any_dtype(in)};
    qt_packing *p = &d.packing;
    p->words = random_bytes(in, words_size(p), byte(in) % 4);
    d.group_size = byte(in) % 2 ? between(in, 1, p->cols) : INT64_C(16) << byte(in) % 5;
    d.groups = (p->cols + d.group_size - 1) / d.group_size;
    if (byte(in) % 4 == 0) {
        int32_t *g_idx = (int32_t *)(void *)room(in, (size_t)p->cols * 4, 0);
        d.groups = between(in, 1, 140);
        for (int64_t i = 0; i < p->cols; i++)
            g_idx[i] = (int32_t)below(in, d.groups);
        d.g_idx = g_idx;
    }
    size_t scales = (size_t)(p->rows * d.groups);
    d.zero = random_bytes(in, scales, 0);
    d.scale = (float *)(void *)random_bytes(in, scales * 4, 0);
    output o = floats_out(d.dtype, (p->last - p->origin) * p->cols, 0);
    agree(in, run_dequantize, &d, &o, 1);
}

static int run_bytes(void *task, uint8_t *out[])
{
    ((qt_bytes *)task)->values = out[0];
    return qt_dequantize_bytes(task);
}

static void dequantize_bytes_case(input *in)
{
    qt_bytes b = {.rows = between(in, 1, 60), .cols = between(in, 1, 300)};
    b.code = (int32_t)below(in, 4);
    b.dtype = any_dtype(in);
    b.block_rows = between(in, 1, b.rows);
    b.block_cols = byte(in) % 2 ? between(in, 1, b.cols) : b.cols;
    b.first = between(in, 0, b.rows);
    b.last = between(in, b.first, b.rows);
    b.origin = between(in, 0, b.first);
    int64_t scales = (b.rows + b.block_rows - 1) / b.block_rows *
                     ((b.cols + b.block_cols - 1) / b.block_cols);
    b.codes = random_bytes(in, (size_t)(b.rows * b.cols), byte(in) % 4);
    b.scale = (float *)(void *)random_bytes(in, (size_t)scales * 4, 0);
    if (b.code <= QT_U8 && byte(in) % 2)
        b.zero = random_bytes(in, (size_t)scales, 0);
    output o = floats_out(b.dtype, (b.last - b.origin) * b.cols, 0);
    agree(in, run_bytes, &b, &o, 1);
}

static int run_fp4(void *task, uint8_t *out[])
{
    ((qt_fp4 *)task)->values = out[0];
    return qt_dequantize_fp4(task);
}

static void dequantize_fp4_case(input *in)
{
    qt_fp4 f = {.rows = between(in, 0, 12), .scale_kind = (int32_t)below(in, 2)};
    uint32_t outer = word(in);
    memcpy(&f.outer, &outer, 4);
    f.group_size = 16 * between(in, 1, 4);
    f.cols = f.group_size * between(in, 1, 12);
    f.divide = byte(in) % 2;
    f.dtype = any_dtype(in);
    f.codes = random_bytes(in, (size_t)(f.rows * f.cols / 2), byte(in) % 4);
    f.scale = random_bytes(in, (size_t)(f.rows * (f.cols / f.group_size)), byte(in) % 4);
    if (byte(in) == 255)
        f.group_size += 1;
    output o = floats_out(f.dtype, f.rows * f.cols, 0);
    agree(in, run_fp4, &f, &o, 1);
}

#endif
