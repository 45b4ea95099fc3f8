/* A matrix product on one panel, for the type of real.h: QT_TILE_COLUMNS columns of PANEL rows stay
 * in registers while `steps` of the inner dimension go by, each sum in that order. */

/* w[c] += sum over k of e[k] * u[k][c], c < QT_TILE_COLUMNS, k in order. */
static void T(spread)(REAL *w, const REAL *e, const REAL *u, int64_t steps)
{
    V sum[QT_TILE_COLUMNS][2];
    QT_UNROLL
    for (int c = 0; c < QT_TILE_COLUMNS; c++) {
        sum[c][0] = T(load)(w + c * PANEL);
        sum[c][1] = T(load)(w + c * PANEL + LANES);
    }
    for (int64_t k = 0; k < steps; k++) {
        V e0 = T(load)(e + k * PANEL), e1 = T(load)(e + k * PANEL + LANES);
        QT_UNROLL
        for (int c = 0; c < QT_TILE_COLUMNS; c++) {
            V factor = T(splat)(u[k * QT_TILE_COLUMNS + c]);
            sum[c][0] = FMA(e0, factor, sum[c][0]);
            sum[c][1] = FMA(e1, factor, sum[c][1]);
        }
    }
    QT_UNROLL
    for (int c = 0; c < QT_TILE_COLUMNS; c++) {
        T(store)(w + c * PANEL, sum[c][0]);
        T(store)(w + c * PANEL + LANES, sum[c][1]);
    }
}
