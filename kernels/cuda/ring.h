/* Memory that is asked for before it is used, by asynchronous copies to shared memory (from sm_80 on):
 * meanwhile it takes no registers, and where a grid leaves room on an SM, a block of the next kernel
 * finds room for its own.
 *
 * Every thread has places of its own for so many bytes, DEPTH times. It fills the places of a turn,
 * closes the turn (`close`, also where there was nothing to fill), and reads them when all but so many
 * of the turns that it closed after it have come (`wait`): itself, or, after `meet_warp`, other lanes of
 * its warp. Before a turn's places are filled again, all who read them have to be done, and have met.
 *
 * The host checks bounds, and that a place was filled and waited for by its thread. Who meets whom, and
 * that warps have places of their own, shows where PTX runs (tests/support/ptx). */
#ifndef QTOOL_CUDA_RING_H
#define QTOOL_CUDA_RING_H

#include "base.h"

namespace qt {

/* Lanes of a warp meet; what each wrote to shared memory, or waited for, is there for the others. */
QT_HD void meet_warp()
{
#if defined(QT_ON_DEVICE)
    __syncwarp();
#endif
}

#if defined(QT_ON_DEVICE)
template <int BYTES> QT_HD void copy_async(void *to, const void *from)
{
#if __CUDA_ARCH__ >= 800
    uint32_t shared = (uint32_t)__cvta_generic_to_shared(to);
    if constexpr (BYTES == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(from), "n"(BYTES)
                     : "memory");
#else
    if constexpr (BYTES == 16)
        write((Four *)to, read_here((const Four *)from));
    else if constexpr (BYTES == 8)
        *(Two *)to = read_here((const Two *)from);
    else
        *(uint32_t *)to = read_here((const uint32_t *)from);
#endif
}
#endif

/* Whether an SM has room for several blocks with two turns of a ring: 164 KB of shared memory and more. */
#if defined(QT_ON_DEVICE) && !(__CUDA_ARCH__ == 800 || (__CUDA_ARCH__ >= 900 && __CUDA_ARCH__ < 1200))
enum { ROOMY = 0 };
#else
enum { ROOMY = 1 };
#endif

/* Places of BYTES for each of THREADS threads, DEPTH times; those of 4, 8 or 16 bytes at a multiple of
 * their size. Lanes that read the same place of each lie next to each other. */
template <int BYTES, int THREADS, int DEPTH> struct alignas(16) Ring {
    enum { WORDS = BYTES / 4 };
    uint32_t at[WORDS * THREADS * DEPTH];
    /* Of place `from` (a multiple of its size, of so many words) of a thread in a turn. */
    static QT_MEMBER uint32_t place(uint32_t turn, uint32_t from, uint32_t words, uint32_t thread)
    {
        return turn * (WORDS * THREADS) + from * THREADS + thread * words;
    }
#if defined(QT_CHECKED)
    /* Which turn of its thread filled a word, plus one, and how many it has closed, and may read. */
    uint32_t turns[WORDS * THREADS * DEPTH], closed[THREADS], open[THREADS];
    void clear()
    {
        memset(turns, 0, sizeof turns);
        memset(closed, 0, sizeof closed);
        memset(open, 0, sizeof open);
    }
    template <class W, class T> void fill(uint32_t turn, uint32_t from, uint32_t thread, const In<T> &in)
    {
        const uint32_t words = sizeof(W) / 4, to = place(turn, from, words, thread);
        W found = in.template here<W>(0);
        if (turn >= DEPTH || from % words || from + words > WORDS || thread >= THREADS)
            return refuse("copy outside of the ring, place", from, WORDS);
        for (uint32_t k = to; k < to + words; k++)
            turns[k] = closed[thread] + 1;
        memcpy(at + to, &found, sizeof found);
    }
    template <class W> W get(uint32_t turn, uint32_t from, uint32_t thread) const
    {
        const uint32_t words = sizeof(W) / 4, to = place(turn, from, words, thread);
        W found;
        memset(&found, 0, sizeof found);
        if (turn >= DEPTH || from % words || from + words > WORDS || thread >= THREADS)
            refuse("read outside of the ring, place", from, WORDS);
        else
            for (uint32_t k = to; k < to + words; k++)
                if (!turns[k] || turns[k] > open[thread])
                    refuse("read of what was not copied, or not waited for, place", from, WORDS);
        memcpy(&found, at + to, sizeof found);
        return found;
    }
    void close(uint32_t thread) { closed[thread]++; }
    template <int LEFT> void wait(uint32_t thread)
    {
        open[thread] = closed[thread] > LEFT ? closed[thread] - LEFT : 0;
    }
#else
    template <class W, class T>
    QT_MEMBER void fill(uint32_t turn, uint32_t from, uint32_t thread, const In<T> &in)
    {
        W *to = (W *)(at + place(turn, from, sizeof(W) / 4, thread));
#if defined(QT_ON_DEVICE)
        copy_async<sizeof(W)>(to, in.at);
#else
        *to = *(const W *)in.at;
#endif
    }
    template <class W> QT_MEMBER W get(uint32_t turn, uint32_t from, uint32_t thread) const
    {
        return read_shared((const W *)(at + place(turn, from, sizeof(W) / 4, thread)));
    }
    QT_MEMBER void close(uint32_t)
    {
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    template <int LEFT> QT_MEMBER void wait(uint32_t)
    {
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
    }
#endif
};

} // namespace qt

#endif
