/* Memory that the lanes of a warp ask for together; see tried.h. */
#ifndef QTOOL_GPU_TRIED_RING_H
#define QTOOL_GPU_TRIED_RING_H

#include "tried_ahead.h"

namespace qt {

/* Places of BYTES for each of WARPS warps, DEPTH times, which its lanes fill for each other: as Ring
 * (kernels/cuda/ring.h), but that a lane reads what any of its warp filled, once that one has waited for
 * it and all of them have met. */
template <int BYTES, int WARPS, int DEPTH> struct alignas(16) WarpRing {
    enum { WORDS = BYTES / 4, LANES = 32 * WARPS };
    uint32_t at[WORDS * WARPS * DEPTH];
    static QT_MEMBER uint32_t place(uint32_t turn, uint32_t word, uint32_t thread)
    {
        return (thread / 32 * DEPTH + turn) * WORDS + word;
    }
    /* For bulk copies, of which there is no need here. */
    QT_MEMBER void begin(uint32_t) {}
    QT_MEMBER void expect(uint32_t, uint32_t, uint32_t) {}
#if defined(QT_CHECKED)
    /* Who filled a word, in which of its turns, plus one; turns that a lane has closed, and may read. */
    uint32_t by[WORDS * WARPS * DEPTH], turns[WORDS * WARPS * DEPTH], closed[LANES], open[LANES];
    void clear()
    {
        memset(turns, 0, sizeof turns);
        memset(closed, 0, sizeof closed);
        memset(open, 0, sizeof open);
    }
    bool outside(uint32_t turn, uint32_t word, uint32_t words, uint32_t thread) const
    {
        bool out = turn >= DEPTH || word % words || word + words > WORDS || thread >= LANES;
        if (out)
            refuse("outside of the ring, word", word, WORDS);
        return out;
    }
    template <class T> void fill(uint32_t turn, uint32_t word, uint32_t thread, const In<T> &in)
    {
        Four found = in.template here<Four>(0);
        if (outside(turn, word, 4, thread))
            return;
        const uint32_t to = place(turn, word, thread);
        for (uint32_t k = to; k < to + 4; k++) {
            if (turns[k] == closed[thread] + 1)
                refuse("a place of the ring is filled twice, word", word, WORDS);
            by[k] = thread;
            turns[k] = closed[thread] + 1;
        }
        memcpy(at + to, &found, sizeof found);
    }
    template <class W> W get(uint32_t turn, uint32_t word, uint32_t thread) const
    {
        W found;
        memset(&found, 0, sizeof found);
        if (outside(turn, word, sizeof(W) / 4, thread))
            return found;
        const uint32_t from = place(turn, word, thread);
        for (uint32_t k = from; k < from + sizeof(W) / 4; k++)
            if (!turns[k] || turns[k] > open[by[k]])
                refuse("read of what was not copied, or not waited for, word", word, WORDS);
        memcpy(&found, at + from, sizeof found);
        return found;
    }
    void close(uint32_t thread) { closed[thread]++; }
    template <int LEFT> void wait(uint32_t, uint32_t, uint32_t thread)
    {
        open[thread] = closed[thread] > LEFT ? closed[thread] - LEFT : 0;
    }
#else
    template <class T>
    QT_MEMBER void fill(uint32_t turn, uint32_t word, uint32_t thread, const In<T> &in)
    {
        Four *to = (Four *)(at + place(turn, word, thread));
#if defined(QT_ON_DEVICE)
        copy_async<16>(to, in.at);
#else
        *to = *(const Four *)in.at;
#endif
    }
    template <class W> QT_MEMBER W get(uint32_t turn, uint32_t word, uint32_t thread) const
    {
        return read_shared((const W *)(at + place(turn, word, thread)));
    }
    QT_MEMBER void close(uint32_t)
    {
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.commit_group;" ::: "memory");
#endif
    }
    template <int LEFT> QT_MEMBER void wait(uint32_t, uint32_t, uint32_t)
    {
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
    }
#endif
};

/* The same, filled by bulk copies from sm_90 on: a lane asks for many bytes at once, a multiple of 16, and
 * a barrier of each turn of a warp counts those that have come. Before, as WarpRing is. */
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 900
template <int BYTES, int WARPS, int DEPTH> struct alignas(16) BulkRing {
    enum { WORDS = BYTES / 4 };
    uint32_t at[WORDS * WARPS * DEPTH];
    uint64_t come[WARPS * DEPTH];
    static QT_MEMBER uint32_t shared(const void *at) { return (uint32_t)__cvta_generic_to_shared(at); }
    QT_MEMBER uint32_t place(uint32_t turn, uint32_t word, uint32_t thread)
    {
        return shared(at + (thread / 32 * DEPTH + turn) * WORDS + word);
    }
    QT_MEMBER uint32_t barrier(uint32_t turn, uint32_t thread)
    {
        return shared(come + thread / 32 * DEPTH + turn);
    }
    QT_MEMBER void begin(uint32_t thread)
    {
        if ((thread & 31) == 0) {
            QT_UNROLL
            for (int turn = 0; turn < DEPTH; turn++)
                asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(barrier(turn, thread)) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
        }
        __syncwarp();
    }
    QT_MEMBER void expect(uint32_t turn, uint32_t bytes, uint32_t thread)
    {
        if ((thread & 31) == 0)
            asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier(turn, thread)),
                         "r"(bytes)
                         : "memory");
    }
    template <class T>
    QT_MEMBER void fill(uint32_t turn, uint32_t word, uint32_t thread, const In<T> &in, uint32_t bytes)
    {
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
                     "[%3];" ::"r"(place(turn, word, thread)),
                     "l"(in.at), "r"(bytes), "r"(barrier(turn, thread))
                     : "memory");
    }
    template <class W> QT_MEMBER W get(uint32_t turn, uint32_t word, uint32_t thread) const
    {
        return read_shared((const W *)(at + (thread / 32 * DEPTH + turn) * WORDS + word));
    }
    QT_MEMBER void close(uint32_t) {}
    template <int> QT_MEMBER void wait(uint32_t turn, uint32_t parity, uint32_t thread)
    {
        uint32_t there = 0;
        while (!there)
            asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared.b64 p, [%1], %2; "
                         "selp.u32 %0, 1, 0, p;}"
                         : "=r"(there)
                         : "r"(barrier(turn, thread)), "r"(parity)
                         : "memory");
    }
};
#else
template <int BYTES, int WARPS, int DEPTH> struct BulkRing : WarpRing<BYTES, WARPS, DEPTH> {
    typedef WarpRing<BYTES, WARPS, DEPTH> Base;
    uint64_t come[WARPS * DEPTH]; /* that the sizes agree */
    template <class T>
    QT_MEMBER void fill(uint32_t turn, uint32_t word, uint32_t thread, const In<T> &in, uint32_t bytes)
    {
        QT_ROLLED
        for (uint32_t k = 0; k < bytes / 16; k++)
            Base::fill(turn, word + 4 * k, thread, in.from(16 / (int)sizeof(T) * (int64_t)k));
    }
};
#endif

template <bool BULK, int BYTES, int WARPS, int DEPTH> struct RingOf {
    typedef WarpRing<BYTES, WARPS, DEPTH> Ring;
};
template <int BYTES, int WARPS, int DEPTH> struct RingOf<true, BYTES, WARPS, DEPTH> {
    typedef BulkRing<BYTES, WARPS, DEPTH> Ring;
};

/* All turns of a warp, of a layout that has `ask` and `unit`, which asks for inputs of the next turn where
 * those of this one were, as soon as they have been used. */
template <class LAYOUT> struct Turns {
    enum { DEPTH = LAYOUT::DEPTH };
    typedef typename LAYOUT::Lane Lane;
    typedef typename LAYOUT::Ring Ring;

    static QT_MEMBER void ask(const Task &t, const Lane *lanes, int32_t i, int32_t count, uint32_t turn,
                              Ring &ring)
    {
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            if (i < count) {
                ring.expect(turn, LAYOUT::COPIED, lanes[l].thread);
                LAYOUT::ask(t, lanes[l], (uint32_t)i, turn, ring);
            }
            ring.close(lanes[l].thread);
        }
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &ring,
                              Sums (*acc)[HELD])
    {
        const int32_t count = (int32_t)t.cols / LAYOUT::COLUMNS;
        Four x[HELD][LAYOUT::INPUTS];
        let_next_begin();
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            ring.begin(lanes[l].thread);
        QT_UNROLL
        for (int turn = 0; turn < DEPTH; turn++)
            ask(t, lanes, first + turn * step, count, turn, ring);
        wait_for_kernels_before();
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int k = 0; k < LAYOUT::INPUTS; k++)
                if (first < count)
                    x[l][k] = lanes[l].inputs.from((uint32_t)first, LAYOUT::COLUMNS).template wide<Four>(32 * k);
        uint32_t turn = 0, parity = 0; /* of how often the turns came round */
        QT_ROLLED
        for (int32_t i = first; i < count; i += step) {
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                ring.template wait<DEPTH - 1>(turn, parity, lanes[l].thread);
            meet_warp(); /* what others of the warp copied is there */
            LAYOUT::unit(t, lanes, i + step, i + step < count, turn, ring, x, acc);
            meet_warp(); /* all have read what is copied over */
            ask(t, lanes, i + DEPTH * step, count, turn, ring);
            turn++;
            if (turn == DEPTH) {
                turn = 0;
                parity ^= 1;
            }
        }
    }
};

} // namespace qt

#endif
