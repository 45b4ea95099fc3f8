/* The formats by name, and a kernel for one of them: QT_DEQUANTIZE(q4_k, f16) makes the kernel
 * dequantize_q4_k_f16. */
#ifndef QTOOL_CUDA_DEQUANTIZE_H
#define QTOOL_CUDA_DEQUANTIZE_H

#include "bytes.h"
#include "gguf_iq.h"
#include "gguf_k.h"
#include "gguf_simple.h"
#include "grid.h"
#include "transposed.h"

#define QT_WORD_FORMATS(X)                                                       \
    X(columns_2, InColumns<2>) X(columns_3, InColumns<3>) X(columns_4, InColumns<4>) \
    X(columns_8, InColumns<8>) X(across_4, InAcross)                             \
    X(rows_2, Grouped<RowWords<2>>) X(rows_3, Grouped<RowWords<3>>)              \
    X(rows_4, Grouped<RowWords<4>>) X(rows_5, Grouped<RowWords<5>>)              \
    X(rows_6, Grouped<RowWords<6>>) X(rows_7, Grouped<RowWords<7>>)              \
    X(rows_8, Grouped<RowWords<8>>)                                              \
    X(padded_3, Grouped<PaddedWords<3>>) X(padded_5, Grouped<PaddedWords<5>>)    \
    X(padded_6, Grouped<PaddedWords<6>>) X(padded_7, Grouped<PaddedWords<7>>)    \
    X(strips_4, Grouped<Strips>)
#define QT_BYTE_FORMATS(X)                                                \
    X(int8, Bytes<I8>) X(uint8, Bytes<U8>) X(float8_e4m3fn, Bytes<E4M3>) \
    X(float8_e5m2, Bytes<E5M2>) X(fp4_e8m0, Fp4<SCALE_E8M0>) X(fp4_e4m3fn, Fp4<SCALE_E4M3>)
#define QT_BLOCK_FORMATS(X)                                                                    \
    X(q4_0) X(q4_1) X(q5_0) X(q5_1) X(q8_0) X(q2_k) X(q3_k) X(q4_k) X(q5_k) X(q6_k) X(iq2_xxs) \
    X(iq2_xs) X(iq3_xxs) X(iq1_s) X(iq4_nl) X(iq3_s) X(iq2_s) X(iq4_xs) X(iq1_m) X(tq1_0)      \
    X(tq2_0) X(mxfp4) X(nvfp4) X(q1_0) X(q2_0)

namespace qt {

/* Which kernel a format has: one along rows, unless its columns lie one after the other. */
template <int BITS> struct InColumns {};
struct InAcross {};
template <class FORMAT, class OUT> struct Dequantize {
    typedef Along<FORMAT, OUT> Kernel;
};
template <int BITS, class OUT> struct Dequantize<InColumns<BITS>, OUT> {
    typedef Columns<BITS, OUT> Kernel;
};
template <class OUT> struct Dequantize<InAcross, OUT> {
    typedef Across<OUT> Kernel;
};

namespace format {
#define QT_FORMAT(name, ...) typedef __VA_ARGS__ name;
#define QT_BLOCK_FORMAT(name) typedef Blocks<qt::name> name;
QT_WORD_FORMATS(QT_FORMAT)
QT_BYTE_FORMATS(QT_FORMAT)
QT_BLOCK_FORMATS(QT_BLOCK_FORMAT)
#undef QT_FORMAT
#undef QT_BLOCK_FORMAT
} // namespace format
} // namespace qt

#define QT_DEQUANTIZE(name, out) \
    QT_KERNEL(dequantize_##name##_##out, qt::Dequantize<qt::format::name, qt::out>::Kernel)

#endif
