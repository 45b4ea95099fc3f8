/* What a test case of the kernels is made of: numbers drawn from bytes, heap blocks that end where
 * their data ends (so that the address sanitizer sees a read or write past it), and the comparison
 * of all instruction sets of the machine.
 *
 * Bytes come from the input while it lasts, then from a generator that the input has seeded. */
#ifndef QTOOL_KERNEL_INPUT_H
#define QTOOL_KERNEL_INPUT_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int qt_select(const char *name);
const char *qt_selected(void);
const char *qt_available(int index);

enum { MOST_BLOCKS = 32, MOST_OUTPUTS = 4 };

typedef struct {
    const uint8_t *at;
    size_t left;
    uint64_t state;
    void *blocks[MOST_BLOCKS]; /* to be freed when the case is over */
    int count;
    uint64_t digest; /* of all outputs */
    const char *name; /* of the kernel at work */
} input;

static uint64_t next_state(input *in)
{
    in->state ^= in->state << 13;
    in->state ^= in->state >> 7;
    in->state ^= in->state << 17;
    return in->state;
}

static uint8_t byte(input *in)
{
    uint64_t drawn = next_state(in);
    if (!in->left)
        return (uint8_t)(drawn >> 32);
    in->left--;
    in->state += (uint64_t)*in->at << 24 | 1;
    return *in->at++;
}

static uint32_t word(input *in)
{
    uint32_t a = byte(in), b = byte(in), c = byte(in), d = byte(in);
    return a | b << 8 | c << 16 | d << 24;
}

/* 0 .. count - 1 */
static int64_t below(input *in, int64_t count)
{
    uint32_t a = byte(in), b = byte(in);
    return (int64_t)(a | b << 8) % count;
}

static int64_t between(input *in, int64_t low, int64_t high)
{
    return low + below(in, high - low + 1);
}

/* A block of exactly so many bytes, `offset` bytes beside an aligned address. */
static uint8_t *room(input *in, size_t size, size_t offset)
{
    uint8_t *block = malloc(size + offset);
    if (!block || in->count == MOST_BLOCKS)
        abort();
    in->blocks[in->count++] = block;
    return block + offset;
}

static uint8_t *random_bytes(input *in, size_t size, size_t offset)
{
    uint8_t *block = room(in, size, offset);
    for (size_t i = 0; i < size; i++)
        block[i] = byte(in);
    return block;
}

/* A finite float of either sign, one in sixteen zero, exponents -spread .. spread. */
static float number(input *in, int spread)
{
    uint32_t bits = word(in), raised = (uint32_t)(127 + between(in, -spread, spread));
    float value;
    bits = (bits >> 23 & 15) == 0 ? 0 : (bits & 0x807fffffu) | raised << 23;
    memcpy(&value, &bits, 4);
    return value;
}

static float *numbers(input *in, int64_t count, int spread, int positive)
{
    float *all = (float *)(void *)room(in, (size_t)count * sizeof(float), 0);
    for (int64_t i = 0; i < count; i++) {
        all[i] = number(in, spread);
        if (positive && all[i] < 0)
            all[i] = -all[i];
    }
    return all;
}

/* What lies in an output: bytes compared as they are, or floats of which every NaN is the same. */
typedef enum { BYTES, HALVES, BFLOATS, FLOATS, DOUBLES } content;

typedef struct {
    size_t size;
    content of;
    size_t offset; /* of its address */
} output;

static void same_nans(uint8_t *at, const output *o)
{
    static const size_t sizes[] = {1, 2, 2, 4, 8};
    for (size_t i = 0; o->of != BYTES && i + sizes[o->of] <= o->size; i += sizes[o->of]) {
        uint64_t v = 0, top = o->of == HALVES ? 0x7c00 : o->of == BFLOATS ? 0x7f80 : 0x7f800000;
        memcpy(&v, at + i, sizes[o->of]);
        if (o->of == DOUBLES)
            top = UINT64_C(0x7ff) << 52;
        uint64_t sign = UINT64_C(1) << (8 * sizes[o->of] - 1);
        if ((v & ~sign) > top) {
            v = top | 1;
            memcpy(at + i, &v, sizes[o->of]);
        }
    }
}

/* Runs a kernel once per instruction set; the code it returns and all that it writes, or leaves as
 * it was, must be the same. Returns the outputs of the first. */
typedef int kernel(void *task, uint8_t *out[]);

static uint8_t **agree(input *in, kernel *run, void *task, const output *outputs, int count)
{
    static uint8_t *first[MOST_OUTPUTS];
    int expected = 0;
    for (int isa = 0; qt_available(isa); isa++) {
        uint8_t *out[MOST_OUTPUTS];
        qt_select(qt_available(isa));
        for (int o = 0; o < count; o++) {
            out[o] = room(in, outputs[o].size, outputs[o].offset);
            memset(out[o], 0xa5, outputs[o].size);
        }
        int code = run(task, out);
        for (int o = 0; o < count; o++)
            same_nans(out[o], &outputs[o]);
        if (isa == 0)
            expected = code;
        int wrong = code != expected;
        for (int o = 0; o < count; o++) {
            if (isa == 0)
                first[o] = out[o];
            wrong |= memcmp(first[o], out[o], outputs[o].size) != 0;
        }
        if (wrong) {
            fprintf(stderr, "%s: %s differs from %s (codes %d and %d)\n", in->name,
                    qt_available(isa), qt_available(0), code, expected);
            abort();
        }
    }
    in->digest = (in->digest ^ (uint64_t)expected) * UINT64_C(0x100000001b3);
    for (int o = 0; o < count; o++)
        for (size_t i = 0; i < outputs[o].size; i++)
            in->digest = (in->digest ^ first[o][i]) * UINT64_C(0x100000001b3);
    return first;
}

#endif
