/* GEMV by other kernels than qtool's (kernels/cuda/gemv.h): gemv.py times these
 * beside them, and tests/cuda/test_cuda_tried.py runs them without a GPU. What is faster is to take the place
 * of what is there.
 *
 * What they try. An SM that has as much under way as it may have stalls whoever asks for more, so that
 * a block which lets the next kernel begin after its first reads does so late: here it is the first
 * thing that it does. And what is asked for before the wait, while the kernel before still works, is not
 * the first of a matrix only, but all of a small one: into the second-level cache (WordsAhead), or by
 * copies that take no registers into shared memory, where a warp's lanes read what others of them
 * copied (WordsRing, RowsRing): copies of one instruction lie together as far as the layout lets them,
 * 256 bytes of GPTQ's rows of words, 128 of Q4_K's rows, 32 of AWQ's. BULK: by bulk copies of whole rows,
 * of which a lane asks for one at once.
 *
 * A warp's 64 rows are 32 bytes of each of AWQ's columns, and 256 of each of GPTQ's rows of words. Warps of
 * 128 or 256 rows read 64 or 128 bytes of a column by one instruction (WordsWide, WordsRing); blocks read up
 * to 256 where their warps lie abreast.
 *
 * Rows are a multiple of a warp's, groups of words a multiple of 128 that is a power of two. */
#ifndef QTOOL_GPU_TRIED_H
#define QTOOL_GPU_TRIED_H

#include "tried_rows.h"
#include "tried_wide.h"
#include "tried_words.h"

/* A kernel whose shared memory its launch asks for: of its own it may have 48 KB. */
#define QT_ROOMY_KERNEL(name, ...)                                                 \
    extern "C" __global__ void __launch_bounds__(__VA_ARGS__::BLOCK,                    \
                                                 qt::Parts<__VA_ARGS__>::resident)      \
        name(QT_PARAMETERS)                                                              \
    {                                                                                    \
        extern __shared__ uint4 of_launch[];                                              \
        (void)reserved;                                                                  \
        const qt::Task task = QT_GIVEN;                                                  \
        qt::run<__VA_ARGS__>(task, *(__VA_ARGS__::Room *)of_launch);                     \
    }

/* Of each kind one, or more, for the tests. */
#define QT_TRIED_KERNELS(X)                                                         \
    X(tried_across_ahead, qt::Gemv<qt::WordsAhead<true, 256, 2, 2, 0>>)              \
    X(tried_columns_ahead, qt::Gemv<qt::WordsAhead<false, 256, 1, 2, 3>>)            \
    X(tried_across_abreast, qt::Gemv<qt::GemvWords<true, 256, 4, 2>>)                \
    X(tried_across_wide, qt::Gemv<qt::WordsWide<256, 2, 1, 4, 128>>)                 \
    X(tried_across_ring, qt::Gemv<qt::WordsRing<true, 128, 1, 2, 4>>)                \
    X(tried_columns_ring, qt::Gemv<qt::WordsRing<false, 128, 1, 2, 4>>)              \
    X(tried_columns_half, qt::Gemv<qt::WordsRing<false, 128, 1, 3, 4, 32>>)          \
    X(tried_columns_deep, qt::Gemv<qt::WordsRing<false, 64, 1, 3, 6>>)               \
    X(tried_columns_bulk, qt::Gemv<qt::WordsRing<false, 128, 1, 2, 4, 64, true>>)    \
    X(tried_columns_bulk_half, qt::Gemv<qt::WordsRing<false, 128, 1, 3, 4, 32, true>>) \
    X(tried_q4_k_bulk, qt::Gemv<qt::RowsRing<128, 1, 2, 4, true>>)                   \
    X(tried_q4_k_early, qt::Gemv<qt::BlocksEarly<128, 1, 2, 4>>)                     \
    X(tried_q4_k_rows, qt::Gemv<qt::RowsRing<128, 1, 2, 4>>)                         \
    X(tried_q4_k_one, qt::Gemv<qt::RowsRing<64, 2, 1, 6>>)

/* And whose shared memory is more than that. */
#define QT_TRIED_ROOMY(X)                                                           \
    X(tried_across_wider, qt::Gemv<qt::WordsWide<256, 1, 1, 2, 256>>)                \
    X(tried_across_near, qt::Gemv<qt::WordsRing<true, 256, 4, 2, 2>>)                \
    X(tried_across_broad, qt::Gemv<qt::WordsRing<true, 128, 1, 2, 2, 128>>)

#endif
