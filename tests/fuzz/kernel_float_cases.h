/* The kernel that rounds to small floats: tasks like those of kernel_cases.h. */
#ifndef QTOOL_KERNEL_FLOAT_CASES_H
#define QTOOL_KERNEL_FLOAT_CASES_H

#include "kernel_cases.h"

#include <math.h>

static int run_floats(void *task, uint8_t *out[])
{
    qt_small_floats t = *(qt_small_floats *)task;
    size_t scales = (size_t)(t.rows * ((t.cols + t.group_size - 1) / t.group_size));
    memcpy(out[0], t.scale, scales * 4);
    t.scale = (float *)(void *)out[0];
    if (t.codes)
        t.codes = out[1];
    if (t.values)
        t.values = (float *)(void *)out[2];
    return qt_round_floats(&t);
}

/* Scales are E4M3 numbers for a ladder, else powers of two. */
static void round_floats_case(input *in)
{
    static const float factors[] = {2.0f, 0.5f, 1.5f};
    static const int32_t steps[] = {1, -1, 200, -200};
    qt_small_floats t = {.rows = between(in, 1, 5), .cols = between(in, 1, 300)};
    t.group_size = between(in, 1, byte(in) % 4 ? 40 : 256);
    int64_t groups = (t.cols + t.group_size - 1) / t.group_size;
    size_t scales = (size_t)(t.rows * groups), size = (size_t)(t.rows * t.cols);
    t.weight = numbers(in, t.rows * t.cols, 6, 0);
    t.ladder = byte(in) % 2;
    t.tries = (int32_t)below(in, t.ladder ? 5 : 4);
    t.factors = factors;
    t.steps = steps;
    t.book = byte(in) % 64 ? (int32_t)below(in, 3) : 3;
    t.outer = (float)(1 + byte(in));
    t.scale = (float *)(void *)room(in, scales * 4, 0);
    for (size_t i = 0; i < scales; i++) {
        int code = 1 + (int)below(in, 126);
        float size = (float)(code < 8 ? code : 8 + code % 8);
        t.scale[i] = t.ladder ? ldexpf(size, (code < 8 ? 1 : code / 8) - 10) : ldexpf(1, code - 64);
    }
    if (byte(in) % 2)
        t.importance = numbers(in, t.cols, 3, 1);
    uint8_t *wanted = room(in, 4, 0);
    t.codes = byte(in) % 2 ? wanted : NULL;
    t.values = t.codes ? NULL : (float *)(void *)wanted;
    output o[] = {{scales * 4, FLOATS, 0}, {t.codes ? size : 0, BYTES, 0},
                  {t.values ? size * 4 : 0, FLOATS, 0}};
    agree(in, run_floats, &t, o, 3);
}

#endif
