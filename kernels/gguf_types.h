/* The block types of GGUF as ggml 0.25 defines them: X(name, number, weights a block, bytes a
 * block). What lies where in a block is told beside the code that reads it; numbers wider than a
 * byte are little-endian, half floats are IEEE binary16. */
#ifndef QTOOL_GGUF_TYPES_H
#define QTOOL_GGUF_TYPES_H

#define QT_GGUF_TYPES(X)      \
    X(q4_0, 2, 32, 18)        \
    X(q4_1, 3, 32, 20)        \
    X(q5_0, 6, 32, 22)        \
    X(q5_1, 7, 32, 24)        \
    X(q8_0, 8, 32, 34)        \
    X(q2_k, 10, 256, 84)      \
    X(q3_k, 11, 256, 110)     \
    X(q4_k, 12, 256, 144)     \
    X(q5_k, 13, 256, 176)     \
    X(q6_k, 14, 256, 210)     \
    X(iq2_xxs, 16, 256, 66)   \
    X(iq2_xs, 17, 256, 74)    \
    X(iq3_xxs, 18, 256, 98)   \
    X(iq1_s, 19, 256, 50)     \
    X(iq4_nl, 20, 32, 18)     \
    X(iq3_s, 21, 256, 110)    \
    X(iq2_s, 22, 256, 82)     \
    X(iq4_xs, 23, 256, 136)   \
    X(iq1_m, 29, 256, 56)     \
    X(tq1_0, 34, 256, 54)     \
    X(tq2_0, 35, 256, 66)     \
    X(mxfp4, 39, 32, 17)      \
    X(nvfp4, 40, 64, 36)      \
    X(q1_0, 41, 128, 18)      \
    X(q2_0, 42, 64, 18)

#endif
