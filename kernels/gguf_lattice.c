/* Builds the neighbours of the lattices; see gguf_lattice.h. Distances are squared and unweighted,
 * between codes; IQ2 takes the two nearest shells (IQ2_S the nearest), IQ1 and IQ3_S three. */
#include "gguf_lattice.h"

#include "gguf_grids.h"

#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
    const uint16_t *point;
    int points, bits, coordinates, codes, shells;
} shape;

static const shape shapes[QT_LATTICES] = {
    {gguf_points_iq2_xxs, 256, 2, 8, 3, 2}, {gguf_points_iq2_xs, 512, 2, 8, 3, 2},
    {gguf_points_iq2_s, 1024, 2, 8, 3, 1},  {gguf_points_iq1, 2048, 2, 8, 3, 3},
    {gguf_points_iq3_xxs, 256, 3, 4, 8, 2}, {gguf_points_iq3_s, 512, 3, 4, 8, 3},
};

static gguf_lattice lattices[QT_LATTICES];
static atomic_int state[QT_LATTICES]; /* 0 not built, 1 being built, 2 built, 3 failed */

static int distance(const shape *s, unsigned a, unsigned b)
{
    int sum = 0;
    for (int i = 0; i < s->coordinates; i++, a >>= s->bits, b >>= s->bits) {
        unsigned mask = (1u << s->bits) - 1;
        int d = (int)(a & mask) - (int)(b & mask);
        sum += d * d;
    }
    return sum;
}

/* Packed codes number k of all, in any order that covers them. */
static unsigned pack(const shape *s, int k)
{
    unsigned packed = 0;
    for (int i = 0; i < s->coordinates; i++, k /= s->codes)
        packed |= (unsigned)(k % s->codes) << (s->bits * i);
    return packed;
}

/* Writes the list of one vector of codes and returns its length. */
static int list_near(const shape *s, unsigned codes, uint16_t *list)
{
    static const int farthest = 8 * 4 + 4 * 49; /* beyond any distance */
    uint8_t apart[2048];
    int count[8 * 4 + 4 * 49 + 1] = {0}, shells = 0, n = 1;
    for (int k = 0; k < s->points; k++) {
        int d = distance(s, codes, s->point[k]);
        apart[k] = (uint8_t)d;
        count[d]++;
    }
    for (int d = 0; d < farthest && shells < s->shells; d++) {
        if (!count[d])
            continue;
        shells++;
        for (int k = 0; k < s->points; k++)
            if (apart[k] == d)
                list[n++] = s->point[k];
    }
    list[0] = (uint16_t)(n - 1);
    while ((n - 1) % 16)
        list[n++] = list[1];
    return n;
}

static int build(const shape *s, gguf_lattice *lattice)
{
    int all = 1, used = 0, room = 1 << 16;
    for (int i = 0; i < s->coordinates; i++)
        all *= s->codes;
    int32_t *find = malloc(sizeof *find << 16);
    uint16_t *near = malloc(sizeof *near * (size_t)room);
    if (!find || !near)
        goto failed;
    for (int k = 0; k < 1 << 16; k++)
        find[k] = -1;
    for (int k = 0; k < s->points; k++)
        find[s->point[k]] = k;
    for (int k = 0; k < all; k++) {
        unsigned codes = pack(s, k);
        if (find[codes] >= 0)
            continue;
        if (room - used < 2048 + 17) {
            room *= 2;
            uint16_t *more = realloc(near, sizeof *near * (size_t)room);
            if (!more)
                goto failed;
            near = more;
        }
        find[codes] = -1 - used;
        used += list_near(s, codes, near + used);
    }
    lattice->find = find;
    lattice->near = near;
    lattice->count = used;
    return 1;
failed:
    free(find);
    free(near);
    return 0;
}

const gguf_lattice *gguf_lattice_of(int which)
{
    int expected = 0;
    if (atomic_compare_exchange_strong(&state[which], &expected, 1))
        atomic_store(&state[which], build(&shapes[which], &lattices[which]) ? 2 : 3);
    while (atomic_load(&state[which]) == 1)
        ;
    return atomic_load(&state[which]) == 2 ? &lattices[which] : NULL;
}
