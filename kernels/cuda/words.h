/* Codes of 2 to 8 bits in 32-bit words: value = (code - zero) * scale.
 *
 * The layouts are those of kernels/qtool_kernels.h. The difference has at most 9 bits, so it is
 * exact in float32 and the product rounds once. What is read and what is made of it are functions by
 * themselves, so that a thread can ask for all that it needs before it waits. */
#ifndef QTOOL_CUDA_WORDS_H
#define QTOOL_CUDA_WORDS_H

#include "scales.h"

namespace qt {

enum { ROWS = 0, COLUMNS = 1, PADDED = 3 };

/* The words that hold eight codes. */
struct Raw {
    uint32_t word[4];
};

/* Eight codes of BITS bits, dense, of which the first begins at bit `shift` of the first word; each as
 * what `above` makes of it. */
template <int BITS> QT_HD void eight_of_stream(const Raw &raw, int32_t shift, float *code)
{
    if (BITS == 4 || BITS == 8) { /* these begin with a word: bytes by themselves */
        uint32_t low = BITS == 8 ? raw.word[0] : raw.word[0] & 0x0f0f0f0f;
        uint32_t high = BITS == 8 ? raw.word[1] : raw.word[0] >> 4 & 0x0f0f0f0f;
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            code[i] = BITS == 8 ? above_byte(i < 4 ? low : high, i % 4)
                                : above_byte(i % 2 ? high : low, i / 2);
        return;
    }
    uint64_t run = raw.word[0];
    if (BITS > 4 || BITS == 3)
        run |= (uint64_t)raw.word[1] << 32;
    run >>= shift;
    if (BITS == 7 && shift > 8)
        run |= (uint64_t)raw.word[2] << (64 - shift);
    QT_UNROLL
    for (int i = 0; i < 8; i++)
        code[i] = above_masked((uint32_t)(run >> (BITS * i)), (1u << BITS) - 1);
}

/* Rows that are streams of words. Of a run of eight: `at` is its first word, of which `left` are in
 * the row from it on. */
template <int BITS> struct RowWords {
    enum { lean = 32 % BITS == 0 };
    struct At {
        int64_t word;
        int32_t left, shift;
    };
    static QT_MEMBER At at(const Task &t, int64_t row, int32_t col)
    {
        int32_t bit = (col >> 3) * (8 * BITS), word = bit >> 5;
        return At{product(row, t.pitch) + word, (int32_t)t.pitch - word, bit & 31};
    }
    /* Of the run that is `step` steps of STEP columns further on. */
    static QT_MEMBER Raw load(const In<uint32_t> &words, const At &at, int step)
    {
        const int32_t on = step * (STEP * BITS / 32);
        Raw raw = {{words[at.word + on], 0, 0, 0}};
        if ((BITS > 4 || (BITS == 3 && at.shift > 8)) && at.left > on + 1)
            raw.word[1] = words[at.word + on + 1];
        if (BITS == 7 && at.shift > 8 && at.left > on + 2)
            raw.word[2] = words[at.word + on + 2];
        return raw;
    }
    static QT_MEMBER void codes(const Raw &raw, const At &at, int, float *code)
    {
        eight_of_stream<BITS>(raw, at.shift, code);
    }
};

/* 32 / BITS codes in each word. */
template <int BITS> struct PaddedWords {
    enum { EACH = 32 / BITS, lean = 0 };
    struct At {
        int64_t row;
        int32_t count, col;
    };
    static QT_MEMBER At at(const Task &t, int64_t row, int32_t col)
    {
        return At{product(row, t.pitch), (int32_t)t.pitch, col};
    }
    static QT_MEMBER Raw load(const In<uint32_t> &words, const At &at, int step)
    {
        int32_t col = at.col + step * STEP, word = col / EACH, before = col - word * EACH;
        Raw raw = {{0, 0, 0, 0}};
        QT_UNROLL
        for (int k = 0; k < 3; k++)
            if (word + k < at.count && k * EACH < before + 8)
                raw.word[k] = words[at.row + word + k];
        return raw;
    }
    static QT_MEMBER void codes(const Raw &raw, const At &at, int step, float *code)
    {
        int32_t before = (at.col + step * STEP) % EACH;
        QT_UNROLL
        for (int i = 0; i < 8; i++) {
            int32_t place = before + i, word = (place >= EACH) + (place >= 2 * EACH);
            uint32_t own = word == 0 ? raw.word[0] : word == 1 ? raw.word[1] : raw.word[2];
            code[i] = above_masked(own >> ((place - word * EACH) * BITS), (1u << BITS) - 1);
        }
    }
};

/* GEMV-fast: for each 64 columns 16 half words of each of four rows, 8 for each 32 columns; nibble
 * j of half word m is column 8j + m. */
struct Strips {
    enum { lean = 0 };
    struct At {
        int64_t word;
        int32_t shift;
    };
    static QT_MEMBER At at(const Task &t, int64_t row, int32_t col)
    {
        int64_t strip = product(row >> 2, t.cols >> 6) + (col >> 6);
        return At{(strip * 4 + (row & 3)) * 8 + (col >> 5 & 1) * 4, (col >> 3 & 3) * 4};
    }
    static QT_MEMBER Raw load(const In<uint32_t> &words, const At &at, int step)
    {
        Four run = words.wide<Four>(at.word + step * (STEP / 64 * 32));
        return Raw{{run.word[0], run.word[1], run.word[2], run.word[3]}};
    }
    static QT_MEMBER void codes(const Raw &raw, const At &at, int, float *code)
    {
        QT_UNROLL
        for (int m = 0; m < 8; m++)
            code[m] = above_masked(raw.word[m / 2] >> (16 * (m % 2) + at.shift), 15);
    }
};

/* `code` as eight_of_stream has it. */
QT_HD float value_of(float code, int32_t zero, float scale)
{
    return mul(sub(code, above((uint32_t)zero)), scale);
}

/* Values of eight codes from a column on, whatever their groups are; of columns that the matrix has
 * not, some value. */
QT_HD void eight_values(const Task &t, int64_t row, int32_t col, const float *code, float *w)
{
    if (group_follows(t)) {
        int32_t group = group_of(t, col);
        float scale;
        int32_t zero = zero_and_scale(t, row, group, &scale);
        QT_UNROLL
        for (int i = 0; i < 8; i++)
            w[i] = value_of(code[i], zero, scale);
        return;
    }
    QT_UNROLL
    for (int i = 0; i < 8; i++) {
        int32_t group = col + i < t.cols ? group_of(t, col + i) : 0;
        float scale;
        int32_t zero = zero_and_scale(t, row, group, &scale);
        w[i] = value_of(code[i], zero, scale);
    }
}

/* Rows that lie one after the other: a format of grid.h's Along. */
template <class Codes> struct Grouped {
    enum { lean = Codes::lean };
    static QT_MEMBER bool at_once(const Task &t) { return !t.index && (int32_t)t.group_shift >= 3; }
    template <int STEPS>
    static QT_MEMBER void steps(const Task &t, int64_t row, int32_t col, float (*w)[8])
    {
        In<uint32_t> words(t.codes, t.codes_bytes);
        typename Codes::At at = Codes::at(t, row, col);
        Raw raw[STEPS];
        int32_t group[STEPS], zero[STEPS];
        uint32_t scale[STEPS];
        QT_UNROLL
        for (int k = 0; k < STEPS; k++) {
            raw[k] = Codes::load(words, at, k);
            group[k] = (col + k * STEP) >> (int32_t)t.group_shift;
        }
        scale_bits<STEPS>(t, row, group, scale);
        zeros_of<STEPS>(t, row, group, scale, zero);
        QT_UNROLL
        for (int k = 0; k < STEPS; k++) {
            float code[8];
            float own = number_of_bits((int32_t)t.scale_dtype, scale[k]);
            Codes::codes(raw[k], at, k, code);
            QT_UNROLL
            for (int i = 0; i < 8; i++)
                w[k][i] = value_of(code[i], zero[k], own);
        }
    }
    static QT_MEMBER void eight(const Task &t, int64_t row, int32_t col, float *w)
    {
        float code[8];
        typename Codes::At at = Codes::at(t, row, col);
        Codes::codes(Codes::load(In<uint32_t>(t.codes, t.codes_bytes), at, 0), at, 0, code);
        eight_values(t, row, col, code, w);
    }
};

} // namespace qt

#endif
