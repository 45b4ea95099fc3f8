/* Rounding onto given levels, for the type of real.h: code c stands for scale * book[c] - offset,
 * in float32, each operation rounded, whatever the type of the weight. Of equal numbers in a book the
 * first is taken. */

typedef struct {
    int32_t count; /* of numbers that differ */
    int consecutive; /* integers, each one more than the one before, codes likewise */
    REAL value[MOST_LEVELS]; /* ascending */
    REAL code[MOST_LEVELS];
    REAL middle[MOST_LEVELS]; /* between each and the one before */
} T(book);

/* The book of `count` finite numbers, at most MOST_LEVELS. */
static void T(sort_book)(const float *from, int32_t count, T(book) *book)
{
    book->count = 0;
    for (int32_t c = 0; c < count; c++) {
        REAL value = (REAL)from[c];
        int32_t at = 0;
        while (at < book->count && book->value[at] < value)
            at++;
        if (at < book->count && book->value[at] == value)
            continue;
        for (int32_t k = book->count++; k > at; k--) {
            book->value[k] = book->value[k - 1];
            book->code[k] = book->code[k - 1];
        }
        book->value[at] = value;
        book->code[at] = (REAL)c;
    }
    REAL low = book->value[0], limit = (REAL)(1 << 20);
    book->consecutive = low > -limit && low < limit && low == (REAL)(int32_t)low;
    for (int32_t k = 0; k < book->count; k++) {
        book->consecutive &= book->value[k] == low + (REAL)k && book->code[k] == (REAL)k;
        book->middle[k] = k ? (book->value[k - 1] + book->value[k]) / 2 : low;
    }
}

#include "nearest_body.h"
