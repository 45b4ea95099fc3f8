/* The code books in lanes, for encoders. On a GPU, cuda/lane_books.h is in its place. */
#ifndef QTOOL_GGUF_BOOK_LANES_H
#define QTOOL_GGUF_BOOK_LANES_H

#include "gguf_books.h"

/* The book of iq4, and for a binary search the middles between its neighbours (all exact): in
 * step s, entry i holds the middle below entry i + s. */
typedef struct {
    table16 value, middle4, middle2, middle1;
    V middle8;
} iq4_tables;

ALWAYS void fill_iq4_tables(iq4_tables *t)
{
    float middle[24];
    for (int i = 1; i < 24; i++)
        middle[i] = i < 16 ? 0.5f * (float)(iq4_book[i - 1] + iq4_book[i]) : 0.0f;
    t->value = table_times(iq4_book, 1.0f);
    for (int i = 0; i < 16 / LANES; i++) {
        t->middle4.part[i] = load(middle + LANES * i + 4);
        t->middle2.part[i] = load(middle + LANES * i + 2);
        t->middle1.part[i] = load(middle + LANES * i + 1);
    }
    t->middle8 = splat(middle[8]);
}

/* Adds step where x is not below the middle (a NaN never is). */
ALWAYS I climb(I index, V x, V middle, int step)
{
    return ipick(lt(x, middle), index, index + step);
}

/* The entry of the book nearest to x, the upper of two equally near. */
ALWAYS I iq4_index(const iq4_tables *t, V x)
{
    I index = climb(isplat(0), x, t->middle8, 8);
    index = climb(index, x, look_up(&t->middle4, index), 4);
    index = climb(index, x, look_up(&t->middle2, index), 2);
    return climb(index, x, look_up(&t->middle1, index), 1);
}

ALWAYS V iq4_value(const iq4_tables *t, I index)
{
    return look_up(&t->value, index);
}

ALWAYS float fp4_value(int code)
{
    return (float)fp4_book[code];
}

ALWAYS uint32_t bits_of_one(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

ALWAYS float one_of_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* Of a number that is not zero. */
ALWAYS int leading_zeros(uint32_t x)
{
    return __builtin_clz(x);
}

#endif
