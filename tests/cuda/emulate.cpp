/* The CUDA kernels on the host: blocks and threads run in loops, and every access is checked.
 *
 * emulate() runs one kernel of the table by its name, with the fields of a task in the order of
 * QT_TASK. `order` turns the order of the threads of a block round, which no result may depend on.
 * `waits`: the kernel may begin before those before it have ended, and every thread has to wait. */
#define QT_CHECKED 1
#include "dequantize.h"
#include "encode.h"
#include "gemv.h"
#include "pack.h"
#include "quantize.h"
#include "round.h"
#include "tried.h" /* tests/gpu: kernels that are timed beside qtool's */

namespace qt {
Fault fault;
uint8_t *written;
bool waited = true;
Early early;
Core core = hopper();
} // namespace qt

using qt::Place;
using qt::Task;

template <class KERNEL> void run_grid(const Task &task, int64_t x, int64_t y, int order, int waits)
{
    static typename KERNEL::Room room;
    Place block;
    for (block.x = 0; block.x < x; block.x++)
        for (block.y = 0; block.y < y; block.y++) {
            room.clear();
            for (int i = 0; i < KERNEL::BLOCK; i++) {
                int thread = order ? KERNEL::BLOCK - 1 - i : i;
                qt::waited = !waits;
                KERNEL::first(task, block, thread, room);
                if (!qt::waited && qt::speaks(thread))
                    qt::refuse("a thread does not wait for the kernels before, number", thread,
                               KERNEL::BLOCK);
            }
            qt::waited = true;
            for (int i = 0; i < KERNEL::BLOCK; i++)
                KERNEL::second(task, block, order ? KERNEL::BLOCK - 1 - i : i, room);
            if constexpr ((bool)qt::Parts<KERNEL>::four) {
                for (int i = 0; i < KERNEL::BLOCK; i++)
                    KERNEL::third(task, block, order ? KERNEL::BLOCK - 1 - i : i, room);
                for (int i = 0; i < KERNEL::BLOCK; i++)
                    KERNEL::fourth(task, block, order ? KERNEL::BLOCK - 1 - i : i, room);
            }
            if (qt::fault.what)
                return;
        }
}

struct Entry {
    const char *name;
    void (*run)(const Task &, int64_t, int64_t, int, int);
    int64_t threads;
};

template <class KERNEL> constexpr Entry entry(const char *name)
{
    return {name, run_grid<KERNEL>, KERNEL::BLOCK};
}

#define DEQUANTIZE(name, out) \
    entry<qt::Dequantize<qt::format::name, qt::out>::Kernel>("dequantize_" #name "_" #out),
#define ALL(name, ...) DEQUANTIZE(name, f32) DEQUANTIZE(name, f16) DEQUANTIZE(name, bf16)
#define ENCODED(name, ...) entry<qt::Encode<qt::encoded::name>>("encode_" #name),
#define OTHER(name, ...) entry<__VA_ARGS__>(#name),

static const Entry entries[] = {
    QT_WORD_FORMATS(ALL) QT_BYTE_FORMATS(ALL) QT_BLOCK_FORMATS(ALL)
    QT_GEMV_KERNELS(OTHER) QT_PACK_KERNELS(OTHER) QT_ENCODED(ENCODED) QT_ENCODED_WHOLE(ENCODED)
    QT_MEASURE_KERNELS(OTHER) QT_QUANTIZE_KERNELS(OTHER) QT_ROUND_KERNELS(OTHER)
    QT_TRIED_KERNELS(OTHER)
    QT_TRIED_ROOMY(OTHER)
};
#define ONE(name, ...) +1
enum { ENTRIES = sizeof entries / sizeof entries[0], OWN = ENTRIES - (0 QT_TRIED_KERNELS(ONE) QT_TRIED_ROOMY(ONE)) };

/* Of qtool's own kernels. */
extern "C" const char *kernel_name(int64_t i) { return i < OWN ? entries[i].name : nullptr; }

/* Names of the fields of a task, so that a test can see that Python has the same. */
extern "C" const char *field_name(int64_t i)
{
#define NAME(name) #name,
    static const char *const names[] = {QT_TASK(NAME) nullptr};
    return names[i];
}

/* The arrays that the last kernel read before it waited. */
extern "C" const void *read_early(int64_t i) { return i < qt::early.count ? qt::early.at[i] : nullptr; }

/* As which tensor core the host multiplies (tensor.h). */
extern "C" void set_core(int fraction, int columns) { qt::core = qt::Core{fraction, columns}; }

/* The sum of a product of sixteen columns by such a tensor core. */
extern "C" float tensor_core(const uint16_t *a, const uint16_t *b, float sum)
{
    qt::Weights weights[32] = {};
    qt::Inputs inputs[32] = {};
    qt::Sums sums[32] = {};
    for (int k = 0; k < 16; k++) { /* of row 0 and vector 0: the first four lanes */
        int lane = k % 8 / 2, half = 16 * (k & 1);
        weights[lane].at[2 * (k / 8)] |= (uint32_t)a[k] << half;
        inputs[lane].at[k / 8] |= (uint32_t)b[k] << half;
    }
    sums[0].at[0] = sum;
    qt::multiply(weights, inputs, sums);
    return sums[0].at[0];
}

/* 0, or 1 where there is no such kernel, or 2 after an access that is not allowed, or 3 where blocks
 * of so many threads are not the kernel's. `written`: a zero for each element of the result. */
extern "C" int emulate(const char *name, const int64_t *fields, int64_t x, int64_t y,
                       int64_t threads, int order, int waits, uint8_t *written, const char **what,
                       int64_t *at, int64_t *count)
{
    Task task;
    memcpy(&task, fields, sizeof task);
    for (const Entry &entry : entries)
        if (!strcmp(entry.name, name)) {
            if (threads != entry.threads)
                return 3;
            qt::fault = qt::Fault{nullptr, 0, 0};
            qt::written = written;
            qt::early.count = 0;
            entry.run(task, x, y, order, waits);
            *what = qt::fault.what;
            *at = qt::fault.at;
            *count = qt::fault.count;
            return qt::fault.what ? 2 : 0;
        }
    return 1;
}
