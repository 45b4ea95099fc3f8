/* Scales, zeros, codes and dequantized values of groups, without a sweep: round to nearest, and the
 * searches for the best range.
 *
 *     importance: the range that minimizes  sum_k importance_k |w_k - dq_k|^norm
 *     gram:       the range that minimizes  e'He,  e = w - dq,  H the group's block of the Gram
 *                 matrix: the error of what the group adds to the output, without cross terms
 *
 * A lane is a row. e'He is the sum over c of e_c (H'e)_c, where H' holds twice the entries of H
 * above its diagonal and none below: half the work of the full product. */
#include "ops.h"
#include "simd.h"

#include <stdlib.h>

#define QT_REAL_BITS 32
#include "real.h"
#include "quantizer_body.h"
#include "tile_body.h"

typedef struct {
    float *panel;  /* [group_size][PANEL] weights */
    float *errors; /* [group_size][PANEL], zero in the padding of the last tile */
    float *tiles;  /* the block of the Gram matrix, [tile][steps of the tile][QT_TILE_COLUMNS] */
} buffers;

static void fold_gram(const float *gram, int64_t stride, int64_t size, float *tiles)
{
    for (int64_t first = 0; first < size; first += QT_TILE_COLUMNS) {
        int64_t last = first + QT_TILE_COLUMNS;
        for (int64_t k = 0; k < last && k < size; k++) {
            for (int64_t c = first; c < last; c++, tiles++) {
                if (c >= size || k > c)
                    *tiles = 0;
                else if (k == c)
                    *tiles = gram[k * stride + c];
                else
                    *tiles = gram[k * stride + c] + gram[c * stride + k];
            }
        }
    }
}

/* e'He of a panel, one vector for each half. */
static void gram_error(const buffers *b, int64_t size, qt_vf32 error[2])
{
    const float *tiles = b->tiles;
    error[0] = error[1] = (qt_vf32){0};
    for (int64_t first = 0; first < size; first += QT_TILE_COLUMNS) {
        int64_t steps = first + QT_TILE_COLUMNS < size ? first + QT_TILE_COLUMNS : size;
        float product[QT_TILE_COLUMNS * PANEL] = {0};
        T(spread)(product, b->errors, tiles, steps);
        tiles += steps * QT_TILE_COLUMNS;
        for (int64_t c = 0; c < QT_TILE_COLUMNS; c++) {
            for (int half = 0; half < 2; half++) {
                int64_t lane = half * LANES;
                qt_vf32 e = T(load)(b->errors + (first + c) * PANEL + lane);
                error[half] = FMA(e, T(load)(product + c * PANEL + lane), error[half]);
            }
        }
    }
}

static void search_gram(const qt_quantizer *quantizer, const buffers *b, int64_t size,
                        T(group) best[2])
{
    float most_code = (float)((1 << quantizer->bits) - 1);
    qt_vf32 low[2], high[2], least[2] = {{0}, {0}}, error[2];
    T(group) trial[2];
    for (int half = 0; half < 2; half++) {
        T(range_of_columns)(b->panel + half * LANES, NULL, 0, size, &low[half], &high[half]);
        best[half] = T(group_of_range)(quantizer, low[half], high[half]);
    }
    for (int step = 0; step < quantizer->ratio_count; step++) {
        float keep = (float)quantizer->ratios[step];
        for (int half = 0; half < 2; half++) {
            trial[half] = T(group_of_range)(quantizer, low[half] * keep, high[half] * keep);
            for (int64_t i = 0; i < size; i++) {
                int64_t at = i * PANEL + half * LANES;
                qt_vf32 w = T(load)(b->panel + at);
                qt_vf32 dq = T(quantize)(w, trial[half], most_code) * trial[half].scale;
                T(store)(b->errors + at, w - dq);
            }
        }
        gram_error(b, size, error);
        for (int half = 0; half < 2; half++)
            T(keep_better)(step == 0, error[half], trial[half], &least[half], &best[half]);
    }
}

static void load_panel(const qt_groups *task, int64_t row, int64_t first, int64_t size,
                       float *panel)
{
    int64_t rows = task->rows - row < PANEL ? task->rows - row : PANEL;
    if (rows < PANEL)
        memset(panel, 0, (size_t)(size * PANEL) * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        const float *from = task->weight + (row + r) * task->cols + first;
        for (int64_t i = 0; i < size; i++)
            panel[i * PANEL + r] = from[i];
    }
}

/* One row of a group: its scale and zero are in, its codes and values go out. */
static void round_row(const qt_groups *task, int64_t row, int64_t first, int64_t size, float scale,
                      float zero)
{
    float most_code = (float)((1 << task->quantizer.bits) - 1);
    const float *from = task->weight + row * task->cols + first;
    uint8_t *codes = task->codes ? task->codes + row * task->cols + first : NULL;
    float *values = task->dequantized ? task->dequantized + row * task->cols + first : NULL;
    T(group) g = {T(splat)(scale), T(splat)(zero)};
    for (int64_t i = 0; i < size; i += LANES) {
        size_t count = (size_t)(size - i < LANES ? size - i : LANES);
        qt_vf32 w = {0};
        memcpy(&w, from + i, count * sizeof(float));
        qt_vf32 steps = T(quantize)(w, g, most_code), value = steps * g.scale;
        VCODE code = __builtin_convertvector(__builtin_convertvector(steps + g.zero, VI), VCODE);
        if (codes)
            memcpy(codes + i, &code, count);
        if (values)
            memcpy(values + i, &value, count * sizeof(float));
    }
}

static void quantize_group(const qt_groups *task, const buffers *b, int64_t group, int64_t groups,
                           int64_t first, int64_t size)
{
    int by_gram = task->gram && task->quantizer.ratio_count > 0;
    if (by_gram) {
        int64_t stride = task->group_size;
        fold_gram(task->gram + group * stride * stride, stride, size, b->tiles);
        memset(b->errors, 0, sizeof(float) * (size_t)(size + QT_TILE_COLUMNS) * PANEL);
    }
    for (int64_t row = 0; row < task->rows; row += PANEL) {
        if (!task->given) {
            T(group) found[2];
            load_panel(task, row, first, size, b->panel);
            if (by_gram)
                search_gram(&task->quantizer, b, size, found);
            for (int half = 0; half < 2 && !by_gram; half++)
                found[half] = T(group_of_columns)(
                    &task->quantizer, b->panel + half * LANES, NULL, 0, size,
                    task->importance ? task->importance + first : NULL);
            for (int r = 0; r < PANEL && row + r < task->rows; r++) {
                int64_t at = (row + r) * groups + group;
                task->scale[at] = found[r / LANES].scale[r % LANES];
                task->zero[at] = (uint8_t)found[r / LANES].zero[r % LANES];
            }
        }
        for (int r = 0; r < PANEL && row + r < task->rows; r++) {
            int64_t at = (row + r) * groups + group;
            if (task->codes || task->dequantized)
                round_row(task, row + r, first, size, task->scale[at], task->zero[at]);
        }
    }
}

int QT_NAME(quantize_groups)(const qt_groups *task)
{
    int64_t width = task->group_size, groups = (task->cols + width - 1) / width;
    size_t padded = (size_t)(width + QT_TILE_COLUMNS);
    size_t tiles = task->gram ? (padded / QT_TILE_COLUMNS + 1) * padded * QT_TILE_COLUMNS : 1;
    buffers b = {
        .panel = malloc(padded * PANEL * sizeof(float)),
        .errors = malloc(padded * PANEL * sizeof(float)),
        .tiles = malloc(tiles * sizeof(float)),
    };
    int code = QT_E_MEMORY;
    if (b.panel && b.errors && b.tiles) {
        for (int64_t group = 0; group < groups; group++) {
            int64_t first = group * width, rest = task->cols - first;
            quantize_group(task, &b, group, groups, first, rest < width ? rest : width);
        }
        code = QT_OK;
    }
    free(b.panel), free(b.errors), free(b.tiles);
    return code;
}
