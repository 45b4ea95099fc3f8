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
    template <int LEFT> void wait(uint32_t thread)
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
    template <int LEFT> QT_MEMBER void wait(uint32_t)
    {
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 800
        asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory");
#endif
    }
#endif
};

/* All turns of a warp, of a layout that has `ask`, `inputs_at` and `unit`. Inputs of the next turn are
 * asked for where those of this one were, as soon as they have been used. */
template <class LAYOUT> struct Turns {
    enum { DEPTH = LAYOUT::DEPTH };
    typedef typename LAYOUT::Lane Lane;
    typedef typename LAYOUT::Ring Ring;

    static QT_MEMBER void ask(const Task &t, const Lane *lanes, int32_t i, int32_t count, uint32_t turn,
                              Ring &ring)
    {
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            if (i < count)
                LAYOUT::ask(t, lanes[l], (uint32_t)i, turn, ring);
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
        for (int turn = 0; turn < DEPTH; turn++)
            ask(t, lanes, first + turn * step, count, turn, ring);
        wait_for_kernels_before();
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int k = 0; k < LAYOUT::INPUTS; k++)
                if (first < count)
                    x[l][k] = lanes[l].inputs.from((uint32_t)first, LAYOUT::COLUMNS).template wide<Four>(32 * k);
        uint32_t turn = 0;
        QT_ROLLED
        for (int32_t i = first; i < count; i += step) {
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                ring.template wait<DEPTH - 1>(lanes[l].thread);
            meet_warp(); /* what others of the warp copied is there */
            LAYOUT::unit(t, lanes, i + step, i + step < count, turn, ring, x, acc);
            meet_warp(); /* all have read what is copied over */
            ask(t, lanes, i + DEPTH * step, count, turn, ring);
            turn = turn + 1 == DEPTH ? 0 : turn + 1;
        }
    }
};

} // namespace qt

#endif
