/* A checksum of bytes as fast as memory: it finds what disks, memory and programs get wrong, and is
 * no defence against a forger.
 *
 * Eight lanes take a stripe of 64 bytes at a time, each its own little-endian word w:
 *
 *     lane = rotate(lane ^ w, 29) * A
 *
 * which for a given lane is a bijection of w, and for a given w one of the lane: two inputs that
 * differ in one word never meet. The last stripe is filled with zeros, and the length and the lanes
 * are mixed in the same way at the end. */
#include "ops.h"
#include "simd.h"

enum { LANES = 8, STRIPE = LANES * sizeof(uint64_t) };

#define A 0xd6e8feb86659fd93u /* odd, bits without a pattern */
#define B 0x9e3779b97f4a7c15u /* odd part of 2^64 over the golden ratio: starts the lanes apart */

static inline uint64_t rotate(uint64_t word, int by)
{
    return word << by | word >> (64 - by);
}

static inline void take(uint64_t lane[LANES], const uint8_t *from)
{
    for (int i = 0; i < LANES; i++) {
        uint64_t word;
        memcpy(&word, from + i * sizeof word, sizeof word);
#if __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
        word = __builtin_bswap64(word);
#endif
        lane[i] = rotate(lane[i] ^ word, 29) * A;
    }
}

int QT_NAME(checksum)(uint64_t seed, int64_t count, const void *from, uint64_t *to)
{
    const uint8_t *byte = from;
    uint64_t lane[LANES], result;
    if (count < 0)
        return QT_E_ARGUMENT;
    for (int i = 0; i < LANES; i++)
        lane[i] = seed + (uint64_t)(i + 1) * B;
    int64_t at = 0;
    for (; at + STRIPE <= count; at += STRIPE)
        take(lane, byte + at);
    if (at < count) {
        uint8_t last[STRIPE] = {0};
        memcpy(last, byte + at, (size_t)(count - at));
        take(lane, last);
    }
    result = (uint64_t)count;
    for (int i = 0; i < LANES; i++) {
        result = rotate(result ^ lane[i], 29) * A;
        result ^= result >> 32;
    }
    *to = result;
    return QT_OK;
}
