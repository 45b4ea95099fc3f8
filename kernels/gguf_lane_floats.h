/* Magnitudes and half precision in lanes, by operations on bits that every instruction set has. */
#ifndef QTOOL_GGUF_LANE_FLOATS_H
#define QTOOL_GGUF_LANE_FLOATS_H

ALWAYS V absolute(V a)
{
    return of_bits(bits_of(a) & 0x7fffffff);
}

/* Half precision bits in each lane's low half, rounded to nearest even. */
ALWAYS I to_half(V value)
{
    I sign = bits_of(value) >> 16 & 0x8000, bits = bits_of(value) & 0x7fffffff;
    I normal = (bits - (112 << 23) + 0xfff + (bits >> 13 & 1)) >> 13;
    I small = bits_of(of_bits(bits) + 0.5f) - 0x3f000000; /* ulps of 2^-24 */
    I half = ipick(ilt(bits, isplat(113 << 23)), small, normal);
    half = ipick(ilt(bits, isplat(0x477ff000)), half, isplat(0x7c00));
    half = ipick(ilt(isplat(0x7f800000), bits), isplat(0x7e00), half);
    return half | sign;
}

/* The float32 value of half precision bits. */
ALWAYS V from_half(I half)
{
    I sign = (half & 0x8000) << 16, rest = (half & 0x7fff) << 13;
    V value = of_bits(rest) * 0x1p112f;
    I infinite = rest | 0x7f800000;
    return of_bits(ipick(ilt(rest, isplat(31 << 23)), bits_of(value), infinite) | sign);
}

#endif
