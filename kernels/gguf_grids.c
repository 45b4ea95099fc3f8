/* Unfolds the packed lattices; see gguf_grids.h. */
#include "gguf_grids.h"

#define QT_POINTS const
#include "gguf_grids_iq1_iq3.h"
#include "gguf_grids_iq2.h"

uint64_t gguf_grid_iq2_xxs[256], gguf_grid_iq2_xs[512], gguf_grid_iq2_s[1024];
uint64_t gguf_grid_iq1[2048];
uint32_t gguf_grid_iq3_xxs[256], gguf_grid_iq3_s[512];
uint64_t gguf_sign_mask[256];
uint8_t gguf_even_signs[128];

/* Replaces each coordinate of a packed point by its value, a byte each. */
static uint64_t unfold(unsigned point, int coordinates, int bits, const uint8_t *value)
{
    uint64_t bytes = 0;
    for (int i = 0; i < coordinates; i++)
        bytes |= (uint64_t)value[point >> (bits * i) & ((1u << bits) - 1)] << (8 * i);
    return bytes;
}

__attribute__((constructor)) static void unfold_all(void)
{
    static const uint8_t iq2[4] = {8, 25, 43, 0}, iq1[4] = {0x79, 0x81, 0x89, 0};
    static const uint8_t iq3_xxs[8] = {4, 12, 20, 28, 36, 44, 52, 62};
    static const uint8_t iq3_s[8] = {1, 3, 5, 7, 9, 11, 13, 15};
    static const uint8_t bit_mask[2] = {0, 0xff};
    for (int i = 0; i < 256; i++) {
        gguf_grid_iq2_xxs[i] = unfold(gguf_points_iq2_xxs[i], 8, 2, iq2);
        gguf_grid_iq3_xxs[i] = (uint32_t)unfold(gguf_points_iq3_xxs[i], 4, 3, iq3_xxs);
        gguf_sign_mask[i] = unfold((unsigned)i, 8, 1, bit_mask);
    }
    for (int i = 0; i < 512; i++) {
        gguf_grid_iq2_xs[i] = unfold(gguf_points_iq2_xs[i], 8, 2, iq2);
        gguf_grid_iq3_s[i] = (uint32_t)unfold(gguf_points_iq3_s[i], 4, 3, iq3_s);
    }
    for (int i = 0; i < 1024; i++)
        gguf_grid_iq2_s[i] = unfold(gguf_points_iq2_s[i], 8, 2, iq2);
    for (int i = 0; i < 2048; i++)
        gguf_grid_iq1[i] = unfold(gguf_points_iq1[i], 8, 2, iq1);
    for (int i = 0; i < 128; i++)
        gguf_even_signs[i] = (uint8_t)(i | (__builtin_popcount((unsigned)i) & 1) << 7);
}
