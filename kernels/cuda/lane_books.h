/* The code books for one lane, without memory. Included by encode.h inside its namespace, in the
 * place of gguf_book_lanes.h. */
#ifndef QTOOL_CUDA_LANE_BOOKS_H
#define QTOOL_CUDA_LANE_BOOKS_H

struct iq4_tables {};

ALWAYS void fill_iq4_tables(iq4_tables *) {}

ALWAYS V iq4_value(const iq4_tables *, I index) { return small(iq4_book((uint32_t)index)); }

/* Half way from the entry below to this one. */
ALWAYS V iq4_middle(uint32_t index)
{
    return 0.5f * (float)(iq4_book(index - 1) + iq4_book(index));
}

/* The entry of the book nearest to x, the upper of two equally near (a NaN is above all): a binary
 * search whose middles are chosen among constants. */
ALWAYS I iq4_index(const iq4_tables *, V x)
{
    M up8 = !(x < iq4_middle(8));
    M up4 = !(x < (up8 ? iq4_middle(12) : iq4_middle(4)));
    V below = up4 ? iq4_middle(6) : iq4_middle(2), above = up4 ? iq4_middle(14) : iq4_middle(10);
    M up2 = !(x < (up8 ? above : below));
    V below4 = up2 ? iq4_middle(3) : iq4_middle(1), below8 = up2 ? iq4_middle(7) : iq4_middle(5);
    V above4 = up2 ? iq4_middle(11) : iq4_middle(9), above8 = up2 ? iq4_middle(15) : iq4_middle(13);
    below = up4 ? below8 : below4;
    above = up4 ? above8 : above4;
    M up1 = !(x < (up8 ? above : below));
    return 8 * up8 + 4 * up4 + 2 * up2 + up1;
}

ALWAYS float fp4_value(int code) { return small(fp4_book((uint32_t)code)); }
ALWAYS uint32_t bits_of_one(float x) { return bits_of_float(x); }
ALWAYS float one_of_bits(uint32_t bits) { return float_of_bits(bits); }

/* Of a number that is not zero. */
ALWAYS int leading_zeros(uint32_t x)
{
#if defined(QT_ON_DEVICE)
    return __clz((int)x);
#else
    return __builtin_clz(x);
#endif
}

/* Half the value of an unsigned E4M3 code; zero for 0 and for 0x7f. The top bit is ignored. */
ALWAYS float half_ue4m3(unsigned code)
{
    unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    float normal = float_of_bits((exponent + 119) << 23 | mantissa << 20);
    return code == 0x7f ? 0.0f : exponent ? normal : (float)mantissa * 0.0009765625f;
}

#endif
