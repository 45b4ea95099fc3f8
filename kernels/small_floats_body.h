/* The numbers of small floats (OCP's E4M3, E5M2, E2M1) nearest to others, and their codes, for the
 * type V that V, VI, VWORD and T() name: vectors on the CPU (round_floats.c), one number on a GPU
 * (cuda/round.h). VWORD are integers of 32 bits, as many as V has numbers. No product may be
 * contracted with a sum, and division rounds to nearest.
 *
 * The nearest number, ties to even, is found by adding and taking away so many of a number's power of
 * two that float32 has no room for more bits than the code has. */

enum { E4M3_LAST = 126 };

typedef struct {
    float most, much; /* the largest number; how many powers of two are added */
    float below, small; /* where steps are equal, and what makes them 1 */
    int32_t mantissa, shift_of_code, sign;
} small_book;

/* 2^exponent, of normal numbers. */
QT_INLINE float power(int32_t exponent)
{
    return float_of_bits((uint32_t)(exponent + 127) << 23);
}

/* A book by its number, QT_BOOK_E4M3 to QT_BOOK_E2M1. */
QT_INLINE small_book book_of(int32_t number)
{
    small_book b;
    int32_t bias = number == QT_BOOK_E4M3 ? 7 : number == QT_BOOK_E5M2 ? 15 : 1;
    b.most = number == QT_BOOK_E4M3 ? 448.0f : number == QT_BOOK_E5M2 ? 57344.0f : 6.0f;
    b.mantissa = number == QT_BOOK_E4M3 ? 3 : number == QT_BOOK_E5M2 ? 2 : 1;
    b.sign = number == QT_BOOK_E2M1 ? 3 : 7;
    b.much = 1.5f * power(23 - b.mantissa);
    b.below = power(1 - bias);
    b.small = power(b.mantissa + bias - 1);
    b.shift_of_code = (127 - bias) << b.mantissa;
    return b;
}

/* The nearest numbers, of the signs of values. */
QT_INLINE V T(nearest_float)(V value, const small_book *b)
{
    VWORD sign = T(words)(value) & INT32_MIN;
    V size = T(of_words)(T(words)(value) & INT32_MAX), most = T(splat)(b->most);
    size = T(select)(size > most, most, size);
    V much = T(max)(T(power_of_two)(size), T(splat)(b->below)) * b->much;
    size = (size + much) - much;
    return T(of_words)(T(words)(size) | sign);
}

/* The codes of numbers that a book has. */
QT_INLINE VWORD T(float_code)(V number, const small_book *b)
{
    VWORD bits = T(words)(number), size = bits & INT32_MAX;
    V magnitude = T(of_words)(size);
    VI equal = magnitude < T(splat)(b->below);
    VWORD large = (size >> (23 - b->mantissa)) - b->shift_of_code;
    VWORD small = T(whole)(T(select)(equal, magnitude, T(splat)(0)) * b->small);
    return T(choose)(equal, small, large) | (((bits >> 31) & 1) << b->sign);
}

/* A positive number that E4M3 has, to its code and back. */
QT_INLINE int32_t e4m3_code(float number)
{
    return number < power(-6) ? (int32_t)(number * 512.0f)
                              : (int32_t)(bits_of_float(number) >> 20) - (120 << 3);
}

QT_INLINE float e4m3_number(int32_t code)
{
    return code < 8 ? (float)code * power(-9)
                    : (1.0f + (float)(code & 7) * 0.125f) * power((code >> 3) - 7);
}

/* Beside a group's first scale: the E4M3 number so many steps from it, or a multiple. */
QT_INLINE float step_away(float scale, int32_t steps)
{
    int32_t code = e4m3_code(scale) + steps;
    return e4m3_number(code < 1 ? 1 : code > E4M3_LAST ? E4M3_LAST : code);
}

QT_INLINE float multiple_of(float scale, float factor)
{
    float found = scale * factor, least = power(-126) * 0.5f;
    return found > least ? found : least;
}
