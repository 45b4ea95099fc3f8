/* qtool's kernels, which let the next one begin first, and ask ahead; see tried.h. */
#ifndef QTOOL_GPU_TRIED_AHEAD_H
#define QTOOL_GPU_TRIED_AHEAD_H

#include "gemv.h"

namespace qt {

/* Lets the next kernel of a stream begin, once all blocks of this one have. */
QT_HD void let_next_begin()
{
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Adds a lane's sums of words times their scales, as qtool's kernel does. */
template <class WORDS, int TILES>
QT_HD void add_scaled(const uint32_t *scales, int l, const Sums (*sums)[HELD], Sums (*acc)[HELD])
{
    QT_UNROLL
    for (int i = 0; i < 2 * TILES; i++) {
        const float scale = WORDS::scale(scales, i), *from = sums[i / 2][l].at + 2 * (i & 1);
        float *to = acc[i / 2][l].at + 2 * (i & 1);
        to[0] = fma(scale, from[0], to[0]);
        to[1] = fma(scale, from[1], to[1]);
    }
}

/* qtool's kernel for Q4_K, which lets the next one begin first. */
template <int OF_BLOCK, int NEXT, int TURNS, int OF_SM>
struct BlocksEarly : GemvQ4K<OF_BLOCK, NEXT, TURNS, OF_SM> {
    typedef GemvQ4K<OF_BLOCK, NEXT, TURNS, OF_SM> Base;
    static QT_MEMBER void run(const Task &t, const typename Base::Lane *lanes, int32_t first, int32_t step,
                              typename Base::Ring &ring, Sums (*acc)[HELD])
    {
        let_next_begin();
        Base::run(t, lanes, first, step, ring, acc);
    }
};

/* Asks for an element, to lie in the second-level cache. */
template <class T> QT_HD void soon(const In<T> &in)
{
#if defined(QT_ON_DEVICE)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(in.at));
#else
    (void)in.template here<T>(0);
#endif
}

/* qtool's kernel for words, which lets the next one begin first, and of its runs of 128 columns asks
 * for so many before their turn; none of them: only the first. */
template <bool AWQ, int OF_BLOCK, int NEXT, int OF_SM, int AHEAD>
struct WordsAhead : GemvWords<AWQ, OF_BLOCK, NEXT, OF_SM> {
    typedef GemvWords<AWQ, OF_BLOCK, NEXT, OF_SM> Base;
    typedef typename Base::Lane Lane;

    static QT_MEMBER void soon_of(const Task &t, const Lane &lane, int32_t col)
    {
        /* A sector of 32 bytes has AWQ's words of eight lanes, and GPTQ's of two. */
        const uint32_t g = (uint32_t)lane.lane >> 2, own = (uint32_t)lane.lane & 3;
        const uint32_t group = (uint32_t)col >> (int32_t)t.group_shift;
        const uint32_t from = AWQ ? (uint32_t)col + g : (uint32_t)col >> 3;
        const int64_t high = AWQ || !(g & 1) ? 0 : 32;
        In<uint32_t> words = lane.words[0].from(high).from(from, (uint32_t)t.pitch);
        QT_UNROLL
        for (int k = 0; k < 4; k++) {
            soon(words);
            words = words.next((AWQ ? 32 : 4) * (uint32_t)t.pitch);
        }
        if (own == 0)
            soon(lane.scales[0].from(high).from(group, (uint32_t)t.scale_group));
        else if (own == 1)
            soon(lane.zeros[0].from(group, (uint32_t)t.zero_group));
    }
    static QT_MEMBER void soon_of_all(const Task &t, const Lane *lanes, int32_t col)
    {
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            if (col < (int32_t)t.cols)
                soon_of(t, lanes[l], col);
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, NoRoom &,
                              Sums (*acc)[HELD])
    {
        const int32_t from = first * 128, next = step * 128;
        let_next_begin();
        if (from >= (int32_t)t.cols)
            return wait_for_kernels_before();
        QT_ROLLED
        for (int32_t k = 1; k <= AHEAD; k++)
            soon_of_all(t, lanes, from + k * next);
        QT_ROLLED
        for (int32_t col = from; col < (int32_t)t.cols; col += next) {
            if (AHEAD && col != from)
                soon_of_all(t, lanes, col + AHEAD * next);
            Base::template unit<4>(t, lanes, col, col == from, acc);
        }
    }
};

} // namespace qt

#endif
