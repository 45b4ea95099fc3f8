/* How the threads of a grid share a matrix: each computes eight columns of a row at a time.
 *
 * A kernel is a struct of two parts, `first` and `second`, with a barrier between them, so that the
 * tests can run the threads of a block in loops; a block has BLOCK threads. */
#ifndef QTOOL_CUDA_GRID_H
#define QTOOL_CUDA_GRID_H

#include "floats.h"

namespace qt {

enum { THREADS = 256 };

/* Stores eight columns of a row, or those of them that the matrix has. */
template <class OUT> QT_HD void store_eight(const Task &t, int64_t row, int32_t col, const float *w)
{
    typedef typename OUT::Bits Bits;
    Out<Bits> values(t.values, t.values_bytes);
    int64_t at = row * t.cols + col;
    if ((t.cols & 7) == 0) {
        Four fours[OUT::FOURS];
        OUT::eight(w, fours);
        QT_UNROLL
        for (int i = 0; i < OUT::FOURS; i++)
            values.put_wide(at + i * (16 / (int)sizeof(Bits)), fours[i]);
        return;
    }
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        if (col + i < t.cols)
            values.put(at + i, OUT::one(w[i]));
}

/* Formats whose rows lie one after the other: 32 threads go along a row, eight rows a block. */
template <class FORMAT, class OUT> struct Along {
    enum { BLOCK = THREADS, TILE_ROWS = 8, TILE_COLS = 256 };
    struct Room {
#if defined(QT_CHECKED)
        void clear() {}
#endif
    };
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &)
    {
        int64_t row = block.x * TILE_ROWS + (thread >> 5);
        int32_t col = block.y * TILE_COLS + (thread & 31) * 8;
        if (row >= t.rows || col >= t.cols)
            return;
        float w[8];
        FORMAT::eight(t, row, col, w);
        store_eight<OUT>(t, row, col, w);
    }
    static QT_MEMBER void second(const Task &, Place, int32_t, Room &) {}
};

/* Formats whose columns lie one after the other: 64 threads read neighbouring rows, and the tile is
 * turned in shared memory, so that what is written lies along rows. */
template <class FORMAT, class OUT> struct Turned {
    typedef typename OUT::Bits Bits;
    enum {
        BLOCK = THREADS,
        TILE_ROWS = 64,
        TILE_COLS = 64,
        IN_FOUR = 16 / (int)sizeof(Bits),
        PITCH = TILE_COLS + IN_FOUR /* no two of eight threads meet in a bank */
    };
    struct Room {
        Shared<Bits, TILE_ROWS * PITCH> tile;
#if defined(QT_CHECKED)
        void clear() { tile.clear(); }
#endif
    };
    static QT_MEMBER void first(const Task &t, Place block, int32_t thread, Room &room)
    {
        int32_t down = thread % TILE_ROWS;
        int64_t row = block.x * TILE_ROWS + down;
        if (row >= t.rows)
            return;
        for (int32_t to = thread / TILE_ROWS * 8; to < TILE_COLS; to += THREADS / TILE_ROWS * 8) {
            int32_t col = block.y * TILE_COLS + to;
            if (col >= t.cols)
                return;
            float w[8];
            Four fours[OUT::FOURS];
            FORMAT::eight(t, row, col, w);
            OUT::eight(w, fours);
            QT_UNROLL
            for (int i = 0; i < OUT::FOURS; i++)
                room.tile.put_wide(down * PITCH + to + i * IN_FOUR, fours[i]);
        }
    }
    static QT_MEMBER void second(const Task &t, Place block, int32_t thread, Room &room)
    {
        enum { RUNS = TILE_COLS / IN_FOUR };
        Out<Bits> values(t.values, t.values_bytes);
        for (int32_t down = thread / RUNS; down < TILE_ROWS; down += THREADS / RUNS) {
            int64_t row = block.x * TILE_ROWS + down;
            int32_t to = thread % RUNS * IN_FOUR, col = block.y * TILE_COLS + to;
            if (row >= t.rows || col >= t.cols)
                return;
            if ((t.cols & 7) == 0) {
                Four four = room.tile.template wide<Four>(down * PITCH + to);
                values.put_wide(row * t.cols + col, four);
                continue;
            }
            for (int32_t i = 0; i < IN_FOUR; i++)
                if (col + i < t.cols)
                    values.put(row * t.cols + col + i, room.tile.get(down * PITCH + to + i));
        }
    }
};

template <bool TURNED, class FORMAT, class OUT> struct Choose {
    typedef Along<FORMAT, OUT> Kernel;
};
template <class FORMAT, class OUT> struct Choose<true, FORMAT, OUT> {
    typedef Turned<FORMAT, OUT> Kernel;
};
template <class FORMAT, class OUT> struct Dequantize {
    typedef typename Choose<(bool)FORMAT::column_major, FORMAT, OUT>::Kernel Kernel;
};

#if defined(__CUDACC__)
/* Runs a kernel in its block. */
template <class KERNEL> __device__ __forceinline__ void run(const Task &t)
{
    __shared__ typename KERNEL::Room room;
    Place block = {(int64_t)blockIdx.x, (int32_t)blockIdx.y};
    KERNEL::first(t, block, (int32_t)threadIdx.x, room);
    __syncthreads();
    KERNEL::second(t, block, (int32_t)threadIdx.x, room);
}

/* The parameters of every kernel are the fields of a task in order. */
#define QT_COMMA_FIELD(name) , int64_t name
#define QT_GIVEN_FIELD(name) name,
#define QT_PARAMETERS int32_t reserved QT_TASK(QT_COMMA_FIELD)
#define QT_GIVEN {QT_TASK(QT_GIVEN_FIELD)}
#define QT_KERNEL(name, ...)                                                       \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::BLOCK, 1) name(QT_PARAMETERS) \
    {                                                                                    \
        (void)reserved;                                                                  \
        const qt::Task task = QT_GIVEN;                                                  \
        qt::run<__VA_ARGS__>(task);                                                      \
    }
#endif

} // namespace qt

#endif
