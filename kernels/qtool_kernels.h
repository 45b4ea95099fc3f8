/* The C interface of the kernel library. All functions return QT_OK or an error code; none keeps
 * a pointer after it returns, none writes outside the arrays it is given, and results do not
 * depend on the instruction set. Sizes count elements; matrices are row major and contiguous. */
#ifndef QTOOL_KERNELS_H
#define QTOOL_KERNELS_H

#include <stdint.h>

enum { QT_OK = 0, QT_E_ARGUMENT = 1, QT_E_MEMORY = 2, QT_E_ISA = 3 };

/* The dtype that a scale is rounded to before codes are computed with it. */
enum { QT_SCALE_F32 = 0, QT_SCALE_F16 = 1, QT_SCALE_BF16 = 2 };

/* Where the scales of a sweep come from: the columns as they are when the sweep enters the group,
 * the original columns before the sweep, or the caller; who may also give levels of any kind, which
 * a code c of a group is rounded to: scale * book[c] - offset in float32. */
enum { QT_GROUPS_DYNAMIC = 0, QT_GROUPS_STATIC = 1, QT_GROUPS_GIVEN = 2, QT_GROUPS_LEVELS = 3 };

/* Which codes of a point may be of the second half of the book: any, an even number in each eight
 * columns, all together or none; or the book has no halves. Of the first two the second half is the
 * first negated. */
enum { QT_SECOND_ANY = 0, QT_SECOND_EVEN = 1, QT_SECOND_ALL = 2, QT_SECOND_NONE = 3 };

/* How the scale and zero of a group are found from its weights. */
typedef struct {
    int32_t bits;          /* 2 .. 8 */
    int32_t symmetric;     /* zero = 2^(bits-1), scale = max|w| / reach */
    int32_t scale_dtype;   /* QT_SCALE_* */
    int32_t ratio_count;   /* ratios to try; 0: the full range */
    double reach;          /* steps from zero to max|w| on a symmetric grid */
    double norm;           /* the search minimizes sum importance |w - dq|^norm */
    const double *ratios;  /* [ratio_count] of the range kept; the first of equals wins */
} qt_quantizer;

/* Groups of a matrix on their own, without a sweep. */
typedef struct {
    qt_quantizer quantizer;
    int64_t rows, cols, group_size; /* the last group may be smaller */
    const float *weight;     /* [rows, cols] */
    const float *importance; /* [cols] weights of the search's error, or NULL */
    const float *gram; /* [groups, group_size, group_size]: the search minimizes e'He instead; the
                        * rows and columns of a smaller last group come first; or NULL */
    int64_t given;     /* scale and zero are read, not searched */
    float *scale;      /* [rows, groups] */
    uint8_t *zero;     /* [rows, groups] */
    uint8_t *codes;    /* [rows, cols], or NULL */
    float *dequantized; /* [rows, cols], or NULL */
} qt_groups;

typedef struct {
    qt_quantizer quantizer;
    int64_t rows, cols, group_size; /* the last group may be smaller */
    const void *weight;     /* [rows, cols] */
    const void *hinv;       /* [cols, cols] upper factor U, inverse Hessian = U'U, in sweep order */
    const int32_t *order;   /* [cols] column taken at each step, a permutation; or NULL */
    const float *importance; /* [cols] weights of the search's error, original order; or NULL */
    int32_t groups;         /* QT_GROUPS_*; of QT_GROUPS_LEVELS the quantizer says nothing */
    int32_t levels;         /* in the book, 1 .. 256 */
    uint8_t *codes;         /* [rows, cols], original order */
    void *scale;            /* [rows, groups], in for QT_GROUPS_GIVEN, float32 and in for
                             * QT_GROUPS_LEVELS, else out */
    uint8_t *zero;          /* [rows, groups], likewise; not for QT_GROUPS_LEVELS */
    double *loss;           /* [rows] sum of squared scaled errors */
    const float *book;      /* [levels] for QT_GROUPS_LEVELS, in any order */
    const float *offset;    /* [rows, groups] for QT_GROUPS_LEVELS, or NULL: zero */
    const uint8_t *point;   /* [points, coordinates] for QT_GROUPS_LEVELS, codes of the first half
                             * of the book that may stand together; or NULL. Then a unit of columns,
                             * which keeps together in order, divides cols and group_size */
    int32_t points, coordinates; /* 1 .. 2048, 4 or 8 */
    int32_t second;         /* QT_SECOND_*; no offset with QT_SECOND_ANY and QT_SECOND_EVEN */
    int32_t reserved;
} qt_sweep;

/* How the codes of a matrix [rows, cols] lie in 32-bit words, code k of a run of them in the bits
 * from bits * k of a little-endian stream that may cross words:
 *
 *     QT_ROWS       words [rows, ceil(cols * bits / 32)], a run is a row
 *     QT_COLUMNS    words [ceil(cols * bits / 32), rows], a run is a row (GPTQ)
 *     QT_ACROSS     words [cols, rows / 8], 4 bits: nibble i of word c is row 8c + order[i] (AWQ)
 *     QT_PADDED     words [rows, ceil(cols / n)], n = floor(32 / bits) codes in each, no crossing
 *     QT_STRIPS     words [rows / 4, cols / 2], 4 bits: for each 64 columns, 16 half words of each
 *                   of the four rows, 8 for each 32 columns: nibble j of half word m is column
 *                   8j + m of the 32 (GEMV-fast)
 *
 * Words may lie at any address. */
enum { QT_ROWS = 0, QT_COLUMNS = 1, QT_ACROSS = 2, QT_PADDED = 3, QT_STRIPS = 4 };

typedef struct {
    int64_t rows, cols;  /* of the whole matrix */
    int64_t first, last; /* rows to work on; multiples of 8 for QT_ACROSS, of 4 for QT_STRIPS */
    int64_t origin;      /* the row that codes, or values, begin with */
    int32_t layout, bits;
    uint8_t order[8];
    void *words;
    uint8_t *codes; /* [rows - origin, cols] */
} qt_packing;

enum { QT_F32 = 0, QT_F16 = 1, QT_BF16 = 2 };

/* value = (code - zero) * scale in float32, then rounded to `dtype`. */
typedef struct {
    qt_packing packing;   /* `codes` is not used */
    const float *scale;   /* [rows, groups] */
    const uint8_t *zero;  /* [rows, groups] */
    const int32_t *g_idx; /* [cols], below `groups`; or NULL: column / group_size */
    int64_t group_size, groups;
    int32_t dtype, reserved;
    void *values; /* [rows - origin, cols] */
} qt_dequantizing;

/* Codes of a byte each: signed, unsigned, or floats of eight bits as OCP defines them (E4M3 has
 * the NaN 0x7f and no infinity, E5M2 is the upper half of a float16). */
enum { QT_I8 = 0, QT_U8 = 1, QT_E4M3 = 2, QT_E5M2 = 3 };

/* value = (code - zero) * scale of the code's block, in float32, then rounded to `dtype`. */
typedef struct {
    int64_t rows, cols;             /* of the matrix */
    int64_t block_rows, block_cols; /* that share a scale */
    int32_t code, dtype;
    const uint8_t *codes; /* [rows, cols] */
    const float *scale;   /* [ceil(rows / block_rows), ceil(cols / block_cols)] */
    const uint8_t *zero;  /* likewise, for QT_I8 (then signed) and QT_U8; or NULL */
    int64_t first, last;  /* rows to work on */
    int64_t origin;       /* the row that values begin with */
    void *values;         /* [rows - origin, cols] */
} qt_bytes;

/* The eight-bit floats that scale four-bit ones: powers of two with the bias 127 (E8M0, 255 is
 * NaN), or E4M3. */
enum { QT_SCALE_E8M0 = 0, QT_SCALE_E4M3 = 1 };

/* Floats of four bits (E2M1: 0 1/2 1 3/2 2 3 4 6, then the same negative), the first in the low
 * nibble. value = (code * scale) * outer, or (code * scale) / outer, in float32, rounded in that
 * order, then to `dtype`. */
typedef struct {
    int64_t rows, cols, group_size; /* groups of 16 or a multiple divide cols */
    int32_t scale_kind, divide;     /* QT_SCALE_E8M0 or QT_SCALE_E4M3 */
    int32_t dtype, reserved;
    const uint8_t *codes; /* [rows, cols / 2] */
    const uint8_t *scale; /* [rows, cols / group_size] */
    float outer;
    int32_t unused;
    void *values; /* [rows, cols] */
} qt_fp4;

/* Small floats: E4M3 (8 bits, largest 448), E5M2 (57344) and E2M1 (4 bits, 6). */
enum { QT_BOOK_E4M3 = 0, QT_BOOK_E5M2 = 1, QT_BOOK_E2M1 = 2 };

/* Groups of neighbours in a row, the last one of which may be smaller. A group's scale becomes the
 * first of those that leave the smallest squared error: itself, and as many others as `tries` says:
 * factors of it, 2^-127 at least, or, with `ladder`, the E4M3 numbers so many steps from it, that is
 * one of these, from the smallest to 448. Then codes, or what they stand for, where one is wanted. */
typedef struct {
    int64_t rows, cols, group_size; /* of 256 at most where scales are tried */
    const float *weight;            /* [rows, cols], finite */
    float *scale;                   /* [rows, groups], positive */
    const float *importance;        /* [cols], of squared errors; or NULL */
    const float *factors;           /* [tries] */
    const int32_t *steps;           /* [tries] */
    int32_t tries, ladder, book;
    float outer;     /* weights are divided by scale / outer */
    uint8_t *codes;  /* [rows, cols]; or NULL */
    float *values;   /* [rows, cols]; or NULL */
} qt_small_floats;

#endif
