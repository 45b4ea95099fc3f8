/* The loops that kernels are timed against: so many bytes are read and so many written, and
 * nothing is computed. They say what memory allows. */
#include "ops.h"
#include "simd.h"

typedef uint8_t bytes_of_a_vector __attribute__((vector_size(QT_VECTOR_BYTES)));

/* Past the caches where the instruction set can; `to` is then aligned. */
static inline void put(uint8_t *to, bytes_of_a_vector v, int streaming)
{
#if defined(QT_ISA_AVX512)
    if (streaming) {
        _mm512_stream_si512((void *)to, (__m512i)v);
        return;
    }
#elif defined(QT_ISA_AVX2)
    if (streaming) {
        _mm256_stream_si256((void *)to, (__m256i)v);
        return;
    }
#endif
    (void)streaming;
    memcpy(to, &v, sizeof v);
}

/* Whole vectors only. The shorter array is gone through more slowly, in steps of `part` / 2^20 of
 * a vector's bytes, so that both end together. */
static inline void go(const uint8_t *from, int64_t bytes, uint8_t *to, int64_t room, int streaming)
{
    int64_t size = QT_VECTOR_BYTES;
    if (bytes <= room) {
        int64_t count = room / size, part = count > 1 ? ((bytes - size) << 20) / (count - 1) : 0;
        for (int64_t i = 0; i < count; i++) {
            bytes_of_a_vector v;
            memcpy(&v, from + (i * part >> 20), sizeof v);
            put(to + i * size, v, streaming);
        }
        return;
    }
    int64_t count = bytes / size, stores = room / size, done = 0;
    bytes_of_a_vector sum = {0};
    for (int64_t i = 0; i < count; i++) {
        bytes_of_a_vector v;
        memcpy(&v, from + i * size, sizeof v);
        sum ^= v;
        if ((i + 1) * stores >= (done + 1) * count)
            put(to + done++ * size, sum, streaming);
    }
}

/* Reads `bytes` bytes and writes `room`, both at least a vector of any instruction set. `streaming`
 * asks for stores that pass the caches; `to` must then lie at a multiple of 64. */
int QT_NAME(plain)(const uint8_t *from, int64_t bytes, uint8_t *to, int64_t room,
                   int32_t streaming)
{
    if (bytes < 64 || room < 64 || (streaming && (uintptr_t)to % 64))
        return QT_E_ARGUMENT;
    if (streaming)
        go(from, bytes, to, room, 1);
    else
        go(from, bytes, to, room, 0);
#if defined(QT_ISA_AVX512) || defined(QT_ISA_AVX2)
    _mm_sfence();
#endif
    return QT_OK;
}
