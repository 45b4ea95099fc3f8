/* Includes QT_BODY once for each output type, with
 *
 *     OUT         the type of a stored number
 *     D(name)     name_f32, name_f16, name_bf16
 *     PUT, PUT2   store one vector of float32, or two, one after the other (put.h)
 *     STREAM2     the same past the caches
 *     PAIR        where sixteen-bit lanes can be looked up: two vectors rounded into one
 *
 * No include guard. */
#define OUT float
#define D(name) name##_f32
#define PUT put_f32
#define PUT2 put2_f32
#define STREAM2 stream2_f32
#include QT_BODY
#undef OUT
#undef D
#undef PUT
#undef PUT2
#undef STREAM2

#define OUT uint16_t
#define D(name) name##_f16
#define PUT put_f16
#define PUT2 put2_f16
#define STREAM2 stream2_f16
#if defined(QT_ISA_AVX512)
#define PAIR pair_f16
#endif
#include QT_BODY
#undef D
#undef PUT
#undef PUT2
#undef STREAM2
#undef PAIR

#define D(name) name##_bf16
#define PUT put_bf16
#define PUT2 put2_bf16
#define STREAM2 stream2_bf16
#if defined(QT_ISA_AVX512)
#define PAIR pair_bf16
#endif
#include QT_BODY
#undef OUT
#undef D
#undef PUT
#undef PUT2
#undef STREAM2
#undef PAIR
#undef QT_BODY
