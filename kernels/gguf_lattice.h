/* Which point of a lattice a vector of codes is, and which points to try where it is none. */
#ifndef QTOOL_GGUF_LATTICE_H
#define QTOOL_GGUF_LATTICE_H

#if !defined(QT_ONE_LANE)
#include <stdint.h>
#endif

enum { QT_IQ2_XXS, QT_IQ2_XS, QT_IQ2_S, QT_IQ1, QT_IQ3_XXS, QT_IQ3_S, QT_LATTICES };

#if !defined(QT_ONE_LANE) /* where a GPU has them: cuda/lane_panel.h */
typedef struct {
    /* By packed codes: the number of the point; or, below zero, -1 less where its neighbours are
     * told: how many, then the packed points of the nearest shells in the order of distance and
     * number, the first one repeated up to a multiple of 16. */
    int32_t *find;
    uint16_t *near;
    int64_t count; /* of `near` */
} gguf_lattice;

/* The lattice, built when it is first asked for; NULL where there is no memory. */
const gguf_lattice *gguf_lattice_of(int which);
#endif

#endif
