/* Chooses the instruction set once, when the library is loaded, and exports every kernel through
 * the chosen table. An instruction set counts as available when the processor has it and the
 * operating system saves its registers. */
#include "gguf_lattice.h"
#include "ops.h"

#include <stddef.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#if defined(_WIN32)
#define QT_EXPORT __declspec(dllexport)
#else
#define QT_EXPORT __attribute__((visibility("default")))
#endif

typedef struct {
    const char *name;
#define QT_MEMBER(name, parameters, arguments) int(*name) parameters;
    QT_OPS(QT_MEMBER)
} qt_table;

/* Best last. The check of dispatch.c and ci: QT_ISA is defined there too, and unused here. */
static const qt_table tables[] = {
#define QT_SCALAR(name, parameters, arguments) name##_scalar,
    {"scalar", QT_OPS(QT_SCALAR)},
#if defined(__x86_64__)
#define QT_AVX2(name, parameters, arguments) name##_avx2,
    {"avx2", QT_OPS(QT_AVX2)},
#define QT_AVX512(name, parameters, arguments) name##_avx512,
    {"avx512", QT_OPS(QT_AVX512)},
#elif defined(__aarch64__)
#define QT_NEON(name, parameters, arguments) name##_neon,
    {"neon", QT_OPS(QT_NEON)},
#endif
};
enum { TABLES = sizeof tables / sizeof tables[0] };

static const qt_table *chosen = &tables[0];

#if defined(__x86_64__)
static unsigned has(unsigned leaf, int reg, unsigned bits)
{
    unsigned r[4];
    if (!__get_cpuid_count(leaf, 0, &r[0], &r[1], &r[2], &r[3]))
        return 0;
    return (r[reg] & bits) == bits;
}

/* Register states that the operating system saves (XCR0); 0 where it uses no XSAVE. */
static unsigned saved_states(void)
{
    unsigned low, high;
    if (!has(1, 2, bit_OSXSAVE))
        return 0;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}
#endif

static int available(const qt_table *table)
{
#if defined(__x86_64__)
    const unsigned ymm = 0x06, zmm = 0xe6;
    unsigned saved = saved_states();
    int avx2 = (saved & ymm) == ymm && has(1, 2, bit_AVX | bit_FMA | bit_F16C) &&
               has(7, 1, bit_AVX2);
    if (!strcmp(table->name, "avx2"))
        return avx2;
    if (!strcmp(table->name, "avx512"))
        return avx2 && (saved & zmm) == zmm &&
               has(7, 1, bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL);
#endif
    return table != NULL;
}

__attribute__((constructor)) static void choose(void)
{
    for (int i = 0; i < TABLES; i++)
        if (available(&tables[i]))
            chosen = &tables[i];
}

/* Forces an instruction set by name; QT_E_ISA, and no change, where it is not available. */
QT_EXPORT int qt_select(const char *name)
{
    for (int i = 0; i < TABLES; i++) {
        if (!strcmp(tables[i].name, name) && available(&tables[i])) {
            chosen = &tables[i];
            return QT_OK;
        }
    }
    return QT_E_ISA;
}

/* The name of the instruction set in use. */
QT_EXPORT const char *qt_selected(void)
{
    return chosen->name;
}

/* Name number `index` among those available here, NULL past the last. */
QT_EXPORT const char *qt_available(int index)
{
    for (int i = 0; i < TABLES; i++)
        if (available(&tables[i]) && index-- == 0)
            return tables[i].name;
    return NULL;
}

/* Runs of a kernel for each call of it: for measuring alone, where one run is too short. */
static int times = 1;

QT_EXPORT int qt_repeat(int count)
{
    if (count < 1)
        return QT_E_ARGUMENT;
    times = count;
    return QT_OK;
}

/* The lattice that a type of GGUF is encoded on; QT_E_ARGUMENT where it is on none. */
QT_EXPORT int qt_gguf_lattice(int32_t type, const int32_t **find, const uint16_t **near,
                              int64_t *count)
{
    static const struct {
        int type, which;
    } all[] = {
        {16, QT_IQ2_XXS}, {17, QT_IQ2_XS}, {18, QT_IQ3_XXS}, {19, QT_IQ1},
        {21, QT_IQ3_S},   {22, QT_IQ2_S},  {29, QT_IQ1},
    };
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        if (all[k].type == type) {
            const gguf_lattice *lattice = gguf_lattice_of(all[k].which);
            if (!lattice)
                return QT_E_MEMORY;
            *find = lattice->find;
            *near = lattice->near;
            *count = lattice->count;
            return QT_OK;
        }
    return QT_E_ARGUMENT;
}

#define QT_WRAP(name, parameters, arguments)                    \
    QT_EXPORT int qt_##name parameters                          \
    {                                                           \
        int code = chosen->name arguments;                      \
        for (int run = 1; run < times && code == QT_OK; run++)  \
            code = chosen->name arguments;                      \
        return code;                                            \
    }
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wmissing-prototypes"
QT_OPS(QT_WRAP)
#pragma GCC diagnostic pop
