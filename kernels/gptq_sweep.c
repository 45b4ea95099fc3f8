/* The column sweep of GPTQ (Frantar et al. 2022, "GPTQ", section 3), for float and double. */
#include "ops.h"
#include "simd.h"

#include <stdlib.h>

enum { BLOCK = 128, MOST_PANELS = 32, CHUNK_BYTES = 16 << 20, MOST_LEVELS = 256 };
enum { UNIT = 8, MOST_POINTS = 2048, MOST_NUMBERS = 8, MOST_SUMS = 81 };

#define QT_REAL_BITS 32
#include "real.h"
#include "quantizer_body.h"
#include "levels_body.h"
#include "lattice_body.h"
#include "tile_body.h"
#include "gptq_sweep_body.h"
#undef QT_REAL_BITS

#define QT_REAL_BITS 64
#include "real.h"
#include "quantizer_body.h"
#include "levels_body.h"
#include "lattice_body.h"
#include "tile_body.h"
#include "gptq_sweep_body.h"
