/* Products with vectors by other kernels than qtool's (kernels/cuda/gemv.h): products.py times these
 * beside them, and tests/test_gpu_products.py runs them without a GPU. What is faster is to take the
 * place of what is there.
 *
 * What they try. An SM that has asked for all it may have under way stalls whoever asks for more, so
 * that a block which lets the next kernel begin after its first reads does so late: here it is the first
 * thing that it does. And what is asked for before the wait, while the kernel before still works, is not
 * the first of a matrix only, but all of a small one: into the second-level cache (WordsAhead), or by
 * copies that take no registers into shared memory, where a warp's lanes read what others of them
 * copied (WordsRing, RowsRing), so that each eight of them ask for 128 bytes that lie together.
 *
 * Rows are a multiple of a warp's, groups of words a multiple of 128 that is a power of two. */
#ifndef QTOOL_GPU_TRIED_H
#define QTOOL_GPU_TRIED_H

#include "gemv.h"

namespace qt {

/* Lets the next kernel of a stream begin, once all blocks of this one have. */
QT_HD void let_next_begin()
{
#if defined(QT_ON_DEVICE) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

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

/* Words by copies. Of 128 columns a warp's 64 rows are 256 bytes of each of GPTQ's 16 rows of words, or 32
 * of each of AWQ's 128, and 128 of scales and 32 of zeros. They lie where neither the lanes that copy
 * nor those that read meet in a bank. */
template <bool AWQ, int OF_BLOCK, int NEXT, int TURNS, int OF_SM>
struct WordsRing : GemvWords<AWQ, OF_BLOCK, NEXT, OF_SM> {
    typedef GemvWords<AWQ, OF_BLOCK, NEXT, OF_SM> Base;
    enum { DEPTH = TURNS, COLUMNS = 128, INPUTS = 4, TILES = Base::TILES };
    enum { SCALES = 1024, ZEROS = SCALES + 32, BYTES = 4 * (ZEROS + 8) };
    typedef WarpRing<BYTES, OF_BLOCK / 32, DEPTH> Ring;
    typedef typename Base::template Read<1> Run;

    struct Lane {
        In<uint8_t> words, more; /* of scales, or of zeros */
        Late<uint16_t> inputs;
        uint32_t more_of_group, place, lane, thread;
    };
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        const uint32_t lane = (uint32_t)thread & 31, pitch = 4 * (uint32_t)t.pitch;
        In<uint8_t> words(t.codes, t.codes_bytes);
        Lane found = {{}, {}, inputs_of(t, (int32_t)lane), 0, 0, lane, (uint32_t)thread};
        if (AWQ)
            found.words = words.from(lane >> 1, pitch).from(top / 2 + 16 * (lane & 1));
        else
            found.words = words.from(lane >> 4, pitch).from(4 * top + 16 * (lane & 15));
        if (lane < 8) {
            found.more = In<uint8_t>(t.scale, t.scale_bytes).from(2 * top + 16 * lane);
            found.more_of_group = 2 * (uint32_t)t.scale_group;
        } else {
            found.more = In<uint8_t>(t.zero, t.zero_bytes).from(top / 2 + 16 * (lane & 1));
            found.more_of_group = 4 * (uint32_t)t.zero_group;
        }
        return found;
    }
    static QT_MEMBER void ask(const Task &t, const Lane &lane, uint32_t i, uint32_t turn, Ring &ring)
    {
        const uint32_t pitch = 4 * (uint32_t)t.pitch, own = lane.lane;
        In<uint8_t> words = lane.words.from(i, (AWQ ? 128 : 16) * pitch);
        QT_UNROLL
        for (uint32_t k = 0; k < 8; k++) {
            uint32_t to, row;
            if (AWQ) { /* column 8 row + c of a run of 32 */
                row = (own >> 4) + 2 * (k & 1);
                uint32_t c = own >> 1 & 7;
                to = k / 2 * 256 + 32 * c + 8 * (row ^ (c & 3)) + 4 * (own & 1);
            } else {
                row = (own >> 4) + 2 * (k & 1);
                to = (k / 2 * 2 + (own >> 3 & 1)) * 128 + 32 * row + 4 * ((own & 7) ^ (2 * row));
            }
            ring.fill(turn, to, lane.thread, words);
            words = words.next((AWQ ? 16 : 2) * pitch);
        }
        if (own < 10)
            ring.fill(turn, SCALES + 4 * own, lane.thread,
                      lane.more.from(i * COLUMNS >> (int32_t)t.group_shift, lane.more_of_group));
    }
    /* Words of a lane in run k, as Base reads them. */
    static QT_MEMBER Run words(const Ring &ring, uint32_t turn, const Lane &lane, uint32_t k)
    {
        const uint32_t g = lane.lane >> 2, own = lane.lane & 3;
        Run found;
        if (AWQ) {
            QT_UNROLL
            for (uint32_t c = 0; c < 8; c++)
                found.word[0][c] = ring.template get<uint32_t>(
                    turn, 256 * k + 32 * c + 8 * (own ^ (c & 3)) + g, lane.thread);
        } else {
            QT_UNROLL
            for (uint32_t h = 0; h < 2; h++) {
                Four four = ring.template get<Four>(
                    turn, (2 * k + h) * 128 + 32 * own + 4 * (g ^ (2 * own)), lane.thread);
                QT_UNROLL
                for (int i = 0; i < 4; i++)
                    found.word[0][4 * h + i] = four.word[i];
            }
        }
        return found;
    }
    static QT_MEMBER uint32_t zeros(const Ring &ring, uint32_t turn, const Lane &lane)
    {
        const uint32_t g = lane.lane >> 2;
        if (AWQ)
            return ring.template get<uint32_t>(turn, ZEROS + g, lane.thread);
        uint32_t low = ring.template get<uint32_t>(turn, ZEROS + g / 2, lane.thread);
        uint32_t high = ring.template get<uint32_t>(turn, ZEROS + 4 + g / 2, lane.thread);
        return byte_perm(low >> (16 * (g & 1)), high >> (16 * (g & 1)), 0x5410);
    }
    static QT_MEMBER void scales(const Ring &ring, uint32_t turn, const Lane &lane, uint32_t *found)
    {
        const uint32_t from = AWQ ? SCALES + 4 * (lane.lane >> 2) : SCALES + 2 * (lane.lane >> 2);
        QT_UNROLL
        for (uint32_t h = 0; h < 2; h++) {
            Two two = ring.template get<Two>(turn, from + (AWQ ? 2 : 16) * h, lane.thread);
            found[2 * h] = two.word[0];
            found[2 * h + 1] = two.word[1];
        }
    }
    static QT_MEMBER void unit(const Task &t, const Lane *lanes, int32_t next, bool more, uint32_t turn,
                               const Ring &ring, Four (*x)[INPUTS], Sums (*acc)[HELD])
    {
        uint32_t less[HELD][4];
        Sums sums[TILES][HELD] = {};
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            Base::less_zeros(t, zeros(ring, turn, lanes[l]), less[l]);
        QT_UNROLL
        for (int k = 0; k < INPUTS; k++) {
            Run run[HELD];
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                run[l] = words(ring, turn, lanes[l], (uint32_t)k);
            QT_UNROLL
            for (int s = 0; s < 2; s++) {
                Inputs given[HELD];
                QT_UNROLL
                for (int l = 0; l < HELD; l++)
                    given[l] = Base::inputs(x[l][k], s);
                QT_UNROLL
                for (int p = 0; p < TILES; p++) {
                    Weights w[HELD];
                    QT_UNROLL
                    for (int l = 0; l < HELD; l++)
                        w[l] = Base::weights(run[l], less[l], s, p);
                    multiply(w, given, sums[p]);
                }
            }
            QT_UNROLL
            for (int l = 0; more && l < HELD; l++)
                x[l][k] = lanes[l].inputs.from((uint32_t)next, COLUMNS).template wide<Four>(32 * k);
        }
        QT_UNROLL
        for (int l = 0; l < HELD; l++) {
            uint32_t own[4];
            scales(ring, turn, lanes[l], own);
            QT_UNROLL
            for (int i = 0; i < 2 * TILES; i++) {
                const float scale = Base::scale(own, i), *from = sums[i / 2][l].at + 2 * (i & 1);
                float *to = acc[i / 2][l].at + 2 * (i & 1);
                to[0] = fma(scale, from[0], to[0]);
                to[1] = fma(scale, from[1], to[1]);
            }
        }
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &ring,
                              Sums (*acc)[HELD])
    {
        Turns<WordsRing>::run(t, lanes, first, step, ring, acc);
    }
};

/* Blocks of Q4_K by copies: 128 bytes of codes of four rows at a time, then the heads of all rows. Rows
 * are 160 bytes from one to the next, so that lanes that read meet in no bank. */
template <int OF_BLOCK, int NEXT, int TURNS, int OF_SM>
struct RowsRing : GemvQ4K<OF_BLOCK, NEXT, TURNS, OF_SM> {
    typedef GemvQ4K<OF_BLOCK, NEXT, TURNS, OF_SM> Base;
    enum { DEPTH = TURNS, COLUMNS = q4_k::weights, INPUTS = 8, ROWS = 32, TILES = 2, PLACE = 40 };
    typedef WarpRing<4 * PLACE * ROWS, OF_BLOCK / 32, DEPTH> Ring;
    typedef typename Base::Lane Lane;

    /* Where it copies from: the first of its rows, and that whose head it copies. */
    static QT_MEMBER Lane lane_of(const Task &t, int32_t top, int32_t thread)
    {
        const int32_t lane = thread & 31, pitch = (int32_t)t.pitch / Base::UNIT;
        Lane found = {{t.codes, t.codes_bytes}, inputs_of(t, lane), {}, 0, lane, (uint32_t)thread};
        found.row[0] = (uint32_t)((top + (lane >> 3)) * pitch);
        found.head = (uint32_t)((top + lane) * pitch);
        return found;
    }
    static QT_MEMBER void ask(const Task &t, const Lane &lane, uint32_t i, uint32_t turn, Ring &ring)
    {
        const uint32_t from = i * (q4_k::bytes / Base::UNIT), own = (uint32_t)lane.lane;
        In<uint8_t> codes = lane.bytes.from(lane.row[0] + from, Base::UNIT).from(16 + 16 * (own & 7));
        QT_UNROLL
        for (uint32_t k = 0; k < 8; k++) {
            ring.fill(turn, (4 * k + own / 8) * PLACE + 4 + 4 * (own & 7), lane.thread, codes);
            codes = codes.next(4 * (uint32_t)t.pitch);
        }
        ring.fill(turn, own * PLACE, lane.thread, lane.bytes.from(lane.head + from, Base::UNIT));
    }
    static QT_MEMBER uint32_t place_of(const Lane &lane, int j)
    {
        return (uint32_t)((lane.lane >> 2) + 8 * j) * PLACE;
    }
    static QT_MEMBER void unit(const Task &, const Lane *lanes, int32_t next, bool more, uint32_t turn,
                               const Ring &ring, Four (*x)[INPUTS], Sums (*acc)[HELD])
    {
        Sums sums[TILES][HELD] = {}, of_inputs[HELD] = {};
        uint32_t pairs[HELD][2 * TILES][2];
        Two codes[HELD][2 * TILES];
        Four head[HELD][2 * TILES];
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            QT_UNROLL
            for (int j = 0; j < 2 * TILES; j++)
                head[l][j] = ring.template get<Four>(turn, place_of(lanes[l], j), lanes[l].thread);
        QT_UNROLL
        for (int n = 0; n < 8; n++) {
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                QT_UNROLL
                for (int j = 0; j < 2 * TILES; j++) {
                    const uint32_t own = 2 * (uint32_t)(lanes[l].lane & 3) + 8 * (uint32_t)(n / 2);
                    if (n % 4 == 0)
                        Base::scales(head[l][j], n / 4, pairs[l][j]);
                    if (n % 2 == 0)
                        codes[l][j] = ring.template get<Two>(turn, place_of(lanes[l], j) + 4 + own,
                                                             lanes[l].thread);
                }
            Base::part(lanes, codes, pairs, n, x, sums, of_inputs);
            QT_UNROLL
            for (int l = 0; more && l < HELD; l++)
                x[l][n] = lanes[l].inputs.from((uint32_t)next, COLUMNS).template wide<Four>(32 * n);
        }
        Inputs halves[HELD];
        QT_UNROLL
        for (int l = 0; l < HELD; l++)
            halves[l] = Base::halves_of(of_inputs[l]);
        QT_UNROLL
        for (int p = 0; p < TILES; p++) {
            Weights w[HELD];
            Sums less[HELD] = {};
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                QT_UNROLL
                for (int j = 0; j < 2; j++) {
                    w[l].at[j] = Base::minima(head[l][2 * p + j], lanes[l].lane);
                    w[l].at[2 + j] = mul_halves(w[l].at[j], 0x10001000);
                }
            multiply(w, halves, less);
            QT_UNROLL
            for (int l = 0; l < HELD; l++)
                Base::add_scaled(head[l] + 2 * p, sums[p][l], less[l], &acc[p][l]);
        }
    }
    static QT_MEMBER void run(const Task &t, const Lane *lanes, int32_t first, int32_t step, Ring &ring,
                              Sums (*acc)[HELD])
    {
        Turns<RowsRing>::run(t, lanes, first, step, ring, acc);
    }
};

} // namespace qt

/* More of shared memory than a kernel may have by itself, 48 KB: its launch asks for it. */
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
    X(tried_across_ring, qt::Gemv<qt::WordsRing<true, 128, 1, 2, 4>>)                \
    X(tried_columns_ring, qt::Gemv<qt::WordsRing<false, 128, 1, 2, 4>>)              \
    X(tried_columns_deep, qt::Gemv<qt::WordsRing<false, 64, 1, 3, 6>>)               \
    X(tried_q4_k_rows, qt::Gemv<qt::RowsRing<128, 1, 2, 4>>)                         \
    X(tried_q4_k_one, qt::Gemv<qt::RowsRing<64, 2, 1, 6>>)

#endif
