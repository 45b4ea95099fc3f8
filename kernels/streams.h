/* Little-endian streams of codes of 2 to 8 bits: a vector of code bytes at a time. */
#ifndef QTOOL_STREAMS_H
#define QTOOL_STREAMS_H

#include "simd.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the packed formats are read as little-endian words"
#endif

/* Codes decoded at a time, one a byte; eight of them share a lane of 64 bits. */
enum { STREAM_CODES = QT_VECTOR_BYTES, STREAM_SLACK = 16 };

typedef uint64_t qt_vu64 __attribute__((vector_size(QT_VECTOR_BYTES)));

/* Fields of `count` low bits in every 64-bit lane, one `every` so many bits. */
static inline uint64_t qt_low_bits(int count, int every)
{
    uint64_t mask = 0;
    for (int at = 0; at < 64; at += every)
        mask |= ((UINT64_C(1) << count) - 1) << at;
    return mask;
}

/* Eight codes a lane, from its low 8 * bits bits to a byte each: halves move apart, then quarters,
 * then codes. What lies above those bits does not matter. */
static inline qt_vu64 qt_spread_codes(qt_vu64 x, int bits)
{
    if (bits == 8)
        return x;
    uint64_t low = qt_low_bits(4 * bits, 64);
    x = (x & low) | ((x >> (4 * bits) & low) << 32);
    low = qt_low_bits(2 * bits, 32);
    x = (x & low) | ((x >> (2 * bits) & low) << 16);
    low = qt_low_bits(bits, 16);
    return (x & low) | ((x >> bits & low) << 8);
}

/* The inverse; bits of the bytes beyond a code must be zero. */
static inline qt_vu64 qt_gather_codes(qt_vu64 x, int bits)
{
    if (bits == 8)
        return x;
    uint64_t low = qt_low_bits(bits, 16);
    x = (x & low) | (x >> (8 - bits) & low << bits);
    low = qt_low_bits(2 * bits, 32);
    x = (x & low) | (x >> (16 - 2 * bits) & low << (2 * bits));
    low = qt_low_bits(4 * bits, 64);
    return (x & low) | (x >> (32 - 4 * bits) & low << (4 * bits));
}

/* Lane i begins with the `bits` bytes that hold codes 8i to 8i + 7. Reads less than STREAM_SLACK
 * bytes beyond the last of them. */
static inline qt_vu64 qt_load_lanes(const uint8_t *from, int bits)
{
    qt_vu64 x = {0};
    if (bits == 8) {
        memcpy(&x, from, sizeof x);
        return x;
    }
#if defined(QT_ISA_AVX512)
    if (bits == 4)
        return (qt_vu64)_mm512_cvtepu32_epi64(_mm256_loadu_si256((const void *)from));
    if (bits == 2)
        return (qt_vu64)_mm512_cvtepu16_epi64(_mm_loadu_si128((const void *)from));
    const __m512i apart = _mm512_broadcast_i32x4(_mm_set_epi64x(
        0x0706050403020100 + 0x0101010101010101 * bits, 0x0706050403020100));
    __m512i pairs = _mm512_castsi128_si512(_mm_loadu_si128((const void *)from));
    pairs = _mm512_inserti32x4(pairs, _mm_loadu_si128((const void *)(from + 2 * bits)), 1);
    pairs = _mm512_inserti32x4(pairs, _mm_loadu_si128((const void *)(from + 4 * bits)), 2);
    pairs = _mm512_inserti32x4(pairs, _mm_loadu_si128((const void *)(from + 6 * bits)), 3);
    return (qt_vu64)_mm512_shuffle_epi8(pairs, apart);
#elif defined(QT_ISA_AVX2)
    if (bits == 4)
        return (qt_vu64)_mm256_cvtepu32_epi64(_mm_loadu_si128((const void *)from));
    const __m256i apart = _mm256_broadcastsi128_si256(_mm_set_epi64x(
        0x0706050403020100 + 0x0101010101010101 * bits, 0x0706050403020100));
    __m256i pairs = _mm256_castsi128_si256(_mm_loadu_si128((const void *)from));
    pairs = _mm256_inserti128_si256(pairs, _mm_loadu_si128((const void *)(from + 2 * bits)), 1);
    return (qt_vu64)_mm256_shuffle_epi8(pairs, apart);
#else
    for (int lane = 0; lane < QT_F64_LANES; lane++) {
        uint64_t run;
        memcpy(&run, from + lane * bits, sizeof run);
        x[lane] = run;
    }
    return x;
#endif
}

/* `count` codes of a stream, a byte each. Writes whole vectors: up to STREAM_CODES bytes more.
 * Reads whole vectors where they end before `end`, and never beyond. */
static inline __attribute__((always_inline)) void qt_decode(uint8_t *codes, const uint8_t *stream,
                                                            const uint8_t *end, int64_t count,
                                                            int bits)
{
    const int64_t step = STREAM_CODES / 8 * bits;
    for (int64_t k = 0; k < count; k += STREAM_CODES, stream += step) {
        uint8_t rest[STREAM_CODES + STREAM_SLACK];
        const uint8_t *from = stream;
        if (end - stream < step + STREAM_SLACK) {
            memset(rest, 0, sizeof rest);
            memcpy(rest, stream, (size_t)(end - stream < step ? end - stream : step));
            from = rest;
        }
        qt_vu64 x = qt_spread_codes(qt_load_lanes(from, bits), bits);
        memcpy(codes + k, &x, sizeof x);
    }
}

/* The inverse. Reads whole vectors of codes, writes whole vectors' worth of stream and up to eight
 * bytes more. */
static inline __attribute__((always_inline)) void qt_encode(uint8_t *stream, const uint8_t *codes,
                                                            int64_t count, int bits)
{
    for (int64_t k = 0; k < count; k += STREAM_CODES) {
        qt_vu64 x;
        memcpy(&x, codes + k, sizeof x);
        x = qt_gather_codes(x, bits);
        for (int lane = 0; lane < QT_F64_LANES; lane++, stream += bits) {
            uint64_t run = x[lane];
            memcpy(stream, &run, sizeof run);
        }
    }
}

/* Constant widths: every shift and mask above becomes a constant. */
#define QT_FOR_BITS(bits, call) \
    switch (bits) {             \
    case 2: call(2); break;     \
    case 3: call(3); break;     \
    case 4: call(4); break;     \
    case 5: call(5); break;     \
    case 6: call(6); break;     \
    case 7: call(7); break;     \
    default: call(8); break;    \
    }

#endif
