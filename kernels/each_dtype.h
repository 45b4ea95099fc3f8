/* Includes QT_BODY once for each output type, with
 *
 *     OUT         the type of a stored number
 *     D(name)     name_f32, name_f16, name_bf16
 *     PUT, PUT2   store one vector of float32, or two, one after the other (put.h)
 *     STREAM2     the latter past the caches
 *     PAIR        where sixteen-bit lanes can be looked up: two vectors rounded into one
 *
 * Where QT_PAST_CACHES is defined, PUT2 and the PUT of float32 pass the caches too (a vector of
 * sixteen bits is half a line, which is worse off so), and D(name) is name_past_f32 and so on.
 *
 * No include guard. */
#if defined(QT_PAST_CACHES)
#define QT_D(name, dtype) name##_past_##dtype
#define QT_PUT_F32 stream_f32
#define QT_PUT2(dtype) stream2_##dtype
#else
#define QT_D(name, dtype) name##_##dtype
#define QT_PUT_F32 put_f32
#define QT_PUT2(dtype) put2_##dtype
#endif

#define OUT float
#define D(name) QT_D(name, f32)
#define PUT QT_PUT_F32
#define PUT2 QT_PUT2(f32)
#define STREAM2 stream2_f32
#include QT_BODY
#undef OUT
#undef D
#undef PUT
#undef PUT2
#undef STREAM2

#define OUT uint16_t
#define D(name) QT_D(name, f16)
#define PUT put_f16
#define PUT2 QT_PUT2(f16)
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

#define D(name) QT_D(name, bf16)
#define PUT put_bf16
#define PUT2 QT_PUT2(bf16)
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
#undef QT_D
#undef QT_PUT_F32
#undef QT_PUT2
