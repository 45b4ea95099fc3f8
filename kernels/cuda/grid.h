/* How the threads of a grid share a matrix, and how a kernel is made: rows of it here, columns in
 * transposed.h.
 *
 * A kernel is a struct of two parts, `first` and `second` (a few have four), with a barrier between
 * them, so that the tests can run the threads of a block in loops; a block has BLOCK threads. */
#ifndef QTOOL_CUDA_GRID_H
#define QTOOL_CUDA_GRID_H

#include "floats.h"
#include "scales.h"

namespace qt {

enum { THREADS = 256 };

/* So many blocks of THREADS an SM is to have registers for: 48 each. sm_75 has room for 1024 threads. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 750
enum { MANY_BLOCKS = 4 };
#else
enum { MANY_BLOCKS = 5 };
#endif

/* Stores eight columns of a row from `at` on, all of which the matrix has. */
template <class OUT>
QT_HD void store_whole(const Out<typename OUT::Bits> &values, int64_t at, const float *w)
{
    Four fours[OUT::FOURS];
    OUT::eight(w, fours);
    QT_UNROLL
    for (int i = 0; i < OUT::FOURS; i++)
        values.put_wide(at + i * (16 / (int)sizeof(typename OUT::Bits)), fours[i]);
}

/* The same of those columns that the matrix has. */
template <class OUT> QT_HD void store_eight(const Task &t, int64_t row, int32_t col, const float *w)
{
    Out<typename OUT::Bits> values(t.values, t.values_bytes);
    int64_t at = product(row, t.cols) + col;
    if ((t.cols & 7) == 0)
        return store_whole<OUT>(values, at, w);
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        if (col + i < t.cols)
            values.put(at + i, OUT::one(w[i]));
}

/* Whether a matrix has all of a tile that ends there, in runs of eight columns. A matrix that is
 * dequantized has fewer rows and columns than 2^28. */
QT_HD bool whole_tile(const Task &t, int32_t rows_end, int32_t cols_end)
{
    int32_t rows = (int32_t)t.rows, cols = (int32_t)t.cols;
    return rows_end <= rows && cols_end <= cols && (cols & 7) == 0;
}

/* Formats whose rows lie one after the other: a warp goes along a row, eight columns a thread and
 * four such steps; a block has eight rows, and the next block goes on along them.
 *
 * A format has `steps`, eight columns at each of several steps, where `at_once` allows it, and
 * `eight`, which can do anything. Which of them is used is the same for a whole block, and `steps` asks
 * for all that it reads before it waits for any of it. `lean`: few registers do for both. */
template <class FORMAT, class OUT> struct Along {
    enum { BLOCK = THREADS, STEPS = 4, TILE_ROWS = 8, TILE_COLS = STEPS * STEP };
    typedef NoRoom Room;
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        int32_t top = block.y * TILE_ROWS, row = top + (thread >> 5);
        int32_t from = (int32_t)block.x * TILE_COLS, col = from + (thread & 31) * 8;
        if (whole_tile(t, top + TILE_ROWS, from + TILE_COLS) && FORMAT::at_once(t)) {
            Out<typename OUT::Bits> values(t.values, t.values_bytes);
            int64_t at = product(row, t.cols) + col;
            float w[STEPS][8];
            FORMAT::template steps<STEPS>(t, row, col, w);
            QT_UNROLL
            for (int k = 0; k < STEPS; k++)
                store_whole<OUT>(values, at + k * STEP, w[k]);
            return;
        }
        if (row >= t.rows)
            return;
        QT_ROLLED
        for (int k = 0; k < STEPS; k++, col += STEP) {
            if (col >= t.cols)
                return;
            float w[8];
            FORMAT::eight(t, row, col, w);
            store_eight<OUT>(t, row, col, w);
        }
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};
template <class FORMAT, class OUT> struct Parts<Along<FORMAT, OUT>> {
    enum { four = 0, resident = FORMAT::lean ? MANY_BLOCKS : 1 };
};

#if defined(__CUDACC__)
/* Runs a kernel in its block, whose threads share a room. */
template <class KERNEL> __device__ __forceinline__ void run(const Task &t, typename KERNEL::Room &room)
{
    Place block = {(int64_t)blockIdx.x, (int32_t)blockIdx.y};
    KERNEL::first(t, block, (int32_t)threadIdx.x, room);
    __syncthreads();
    KERNEL::second(t, block, (int32_t)threadIdx.x, room);
    if constexpr ((bool)Parts<KERNEL>::four) {
        __syncthreads();
        KERNEL::third(t, block, (int32_t)threadIdx.x, room);
        __syncthreads();
        KERNEL::fourth(t, block, (int32_t)threadIdx.x, room);
    }
}

/* The parameters of every kernel are the fields of a task in order. */
#define QT_COMMA_FIELD(name) , int64_t name
#define QT_GIVEN_FIELD(name) name,
#define QT_PARAMETERS int32_t reserved QT_TASK(QT_COMMA_FIELD)
#define QT_GIVEN {QT_TASK(QT_GIVEN_FIELD)}
#define QT_KERNEL(name, ...)                                                       \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::BLOCK,                    \
                                                 qt::Parts<__VA_ARGS__>::resident)      \
        name(QT_PARAMETERS)                                                              \
    {                                                                                    \
        __shared__ __VA_ARGS__::Room room;                                               \
        (void)reserved;                                                                  \
        const qt::Task task = QT_GIVEN;                                                  \
        qt::run<__VA_ARGS__>(task, room);                                                \
    }
#endif

} // namespace qt

#endif
