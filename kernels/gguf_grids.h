/* The lattices of the IQ types, unfolded from their packed points when the library is loaded. */
#ifndef QTOOL_GGUF_GRIDS_H
#define QTOOL_GGUF_GRIDS_H

#include <stdint.h>

/* The points, packed: two bits a coordinate (IQ3: three). */
extern const uint16_t gguf_points_iq2_xxs[256], gguf_points_iq2_xs[512], gguf_points_iq2_s[1024];
extern const uint16_t gguf_points_iq1[2048], gguf_points_iq3_xxs[256], gguf_points_iq3_s[512];

/* One byte a weight, the first lowest: the magnitudes that dequantizing multiplies. IQ1: 8 t + 1
 * for t of -1, 0, 1, and 128 more. */
extern uint64_t gguf_grid_iq2_xxs[256], gguf_grid_iq2_xs[512], gguf_grid_iq2_s[1024];
extern uint64_t gguf_grid_iq1[2048];
extern uint32_t gguf_grid_iq3_xxs[256], gguf_grid_iq3_s[512];

/* [signs]: eight bytes, 0xff where the bit of that weight is set. */
extern uint64_t gguf_sign_mask[256];
/* [seven sign bits]: the eight signs, the last such that their number is even. */
extern uint8_t gguf_even_signs[128];

#endif
