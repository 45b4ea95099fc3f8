/* For the type of real.h. At step i the sweep takes column i, rounds it, and spreads the error:
 *
 *     err = (w_i - dq_i) / U[i,i];      w_j = fma(-err, U[i,j], w_j)   for every j > i
 *
 * Rows are independent, so a lane is a row. A panel is PANEL rows stored column by column; the
 * steps within a block of columns run on one panel in the first-level cache, and what the block
 * owes to the later columns is paid by a matrix product whose tiles stay in registers. Either way
 * a weight sees its updates one after another in the order of the steps, so that blocking changes
 * no bit of the result. */

/* `spread` for the last tile, `columns` wide. */
static void T(spread_edge)(REAL *w, const REAL *e, const REAL *u, int64_t steps, int64_t columns)
{
    REAL tile[QT_TILE_COLUMNS * PANEL] = {0};
    memcpy(tile, w, (size_t)columns * PANEL * sizeof(REAL));
    T(spread)(tile, e, u, steps);
    memcpy(w, tile, (size_t)columns * PANEL * sizeof(REAL));
}

/* Rows `from` .. `to` of U, columns from `to` on, cut into tiles: [tile][step][QT_TILE_COLUMNS]. */
static void T(gather_factor)(REAL *tiles, const REAL *hinv, int64_t cols, int64_t from, int64_t to)
{
    for (int64_t first = to; first < cols; first += QT_TILE_COLUMNS) {
        int64_t width = cols - first < QT_TILE_COLUMNS ? cols - first : QT_TILE_COLUMNS;
        for (int64_t k = from; k < to; k++, tiles += QT_TILE_COLUMNS) {
            const REAL *row = hinv + k * cols + first;
            if (width == QT_TILE_COLUMNS) {
                memcpy(tiles, row, sizeof(REAL) * QT_TILE_COLUMNS);
            } else {
                for (int64_t c = 0; c < QT_TILE_COLUMNS; c++)
                    tiles[c] = c < width ? row[c] : (REAL)0;
            }
        }
    }
}

typedef struct {
    const qt_sweep *sweep;
    const REAL *importance; /* in sweep order, or NULL */
    int32_t *position;      /* of each column in the sweep, or NULL where they are the same */
    int64_t groups, group_size;
    REAL *scale, *zero; /* of a panel: [groups][PANEL]; zero: offset, where levels are given */
    const T(book) *book;
    const T(lattice) *lattice; /* NULL where each weight has a level of its own */
} T(state);

static int64_t T(group_at)(const T(state) *state, int64_t step)
{
    const qt_sweep *sweep = state->sweep;
    int by_column = sweep->groups != QT_GROUPS_DYNAMIC && sweep->order;
    return (by_column ? sweep->order[step] : step) / state->group_size;
}

static void T(find_group)(const T(state) *state, const REAL *panel, int64_t group)
{
    const qt_sweep *sweep = state->sweep;
    int64_t first = group * state->group_size, last = first + state->group_size;
    if (last > sweep->cols)
        last = sweep->cols;
    int scattered = sweep->groups == QT_GROUPS_STATIC && state->position;
    const int32_t *columns = scattered ? state->position + first : NULL;
    for (int half = 0; half < 2; half++) {
        T(group) g = T(group_of_columns)(&sweep->quantizer, panel + half * LANES, columns, first,
                                         last - first, state->importance);
        T(store)(state->scale + group * PANEL + half * LANES, g.scale);
        T(store)(state->zero + group * PANEL + half * LANES, g.zero);
    }
}

/* Levels and codes of the columns from step i on that are chosen together, and these steps. */
static void T(find_unit)(const T(state) *state, const REAL *panel, int64_t i, REAL *level,
                         uint8_t *codes)
{
    const qt_sweep *sweep = state->sweep;
    int64_t group = T(group_at)(state, i) * PANEL;
    const REAL *scale = state->scale + group, *offset = state->zero + group;
    REAL cost[UNIT];
    for (int32_t k = 0; k < state->lattice->unit; k++) {
        REAL pivot = ((const REAL *)sweep->hinv)[(i + k) * (sweep->cols + 1)];
        cost[k] = 1 / (pivot * pivot);
    }
    for (int64_t lane = 0; lane < PANEL; lane += LANES)
        T(choose_unit)(state->lattice, panel + i * PANEL + lane, T(load)(scale + lane),
                       T(load)(offset + lane), cost, level + lane, codes + i * PANEL + lane);
}

/* Steps `from` .. `to` on one panel; leaves -err in `errors` [step][PANEL] and adds to `loss`. */
static void T(sweep_block)(const T(state) *state, REAL *panel, int64_t from, int64_t to,
                           REAL *errors, uint8_t *codes, REAL *loss)
{
    const qt_sweep *sweep = state->sweep;
    const REAL *hinv = sweep->hinv;
    REAL most_code = (REAL)((1 << sweep->quantizer.bits) - 1), together[UNIT * PANEL];
    int64_t unit = state->lattice ? state->lattice->unit : 1;
    for (int64_t i = from; i < to; i++) {
        int64_t group = T(group_at)(state, i);
        if (state->lattice && i % unit == 0)
            T(find_unit)(state, panel, i, together, codes);
        if (sweep->groups == QT_GROUPS_DYNAMIC && i % state->group_size == 0)
            T(find_group)(state, panel, group);
        const REAL *row = hinv + i * sweep->cols;
        V minus[2];
        for (int half = 0; half < 2; half++) {
            int64_t lane = half * LANES;
            T(group) g = {T(load)(state->scale + group * PANEL + lane),
                          T(load)(state->zero + group * PANEL + lane)};
            V w = T(load)(panel + i * PANEL + lane), code = {0}, level;
            if (state->lattice) {
                level = T(load)(together + i % unit * PANEL + lane);
            } else if (sweep->groups == QT_GROUPS_LEVELS) {
                level = T(nearest_level)(state->book, w, g.scale, g.zero, &code);
            } else {
                V steps = T(quantize)(w, g, most_code);
                level = steps * g.scale;
                code = steps + g.zero;
            }
            V err = (w - level) / row[i], sum = T(load)(loss + lane);
            T(store)(loss + lane, FMA(err, err, sum));
            minus[half] = -err;
            T(store)(errors + (i - from) * PANEL + lane, minus[half]);
            if (state->lattice)
                continue;
            VCODE byte = __builtin_convertvector(__builtin_convertvector(code, VI), VCODE);
            memcpy(codes + i * PANEL + lane, &byte, sizeof byte);
        }
        for (int64_t j = i + 1; j < to; j++) {
            REAL *w = panel + j * PANEL;
            V factor = T(splat)(row[j]);
            T(store)(w, FMA(minus[0], factor, T(load)(w)));
            T(store)(w + LANES, FMA(minus[1], factor, T(load)(w + LANES)));
        }
    }
}

/* Blocks are whole groups where groups are short, and begin with a group where they are long, so
 * that a group's columns are up to date when its scale is found. */
static int64_t T(block_end)(const T(state) *state, int64_t from)
{
    int64_t size = state->group_size, end;
    if (size <= BLOCK) {
        end = from + BLOCK / size * size;
    } else {
        int64_t next_group = (from / size + 1) * size;
        end = from + BLOCK < next_group ? from + BLOCK : next_group;
    }
    return end < state->sweep->cols ? end : state->sweep->cols;
}

/* Between the caller's rows and a panel. Rows beyond the last are zero. */
static void T(fill_panel)(const qt_sweep *sweep, int64_t row, REAL *panel)
{
    int64_t rows = sweep->rows - row < PANEL ? sweep->rows - row : PANEL, cols = sweep->cols;
    if (rows < PANEL)
        memset(panel, 0, (size_t)(cols * PANEL) * sizeof(REAL));
    for (int64_t first = 0; first < cols; first += BLOCK) {
        int64_t last = first + BLOCK < cols ? first + BLOCK : cols;
        for (int64_t r = 0; r < rows; r++) {
            const REAL *from = (const REAL *)sweep->weight + (row + r) * cols;
            for (int64_t i = first; i < last; i++)
                panel[i * PANEL + r] = from[sweep->order ? sweep->order[i] : i];
        }
    }
}

static void T(empty_codes)(const qt_sweep *sweep, int64_t row, const uint8_t *codes)
{
    int64_t rows = sweep->rows - row < PANEL ? sweep->rows - row : PANEL, cols = sweep->cols;
    for (int64_t first = 0; first < cols; first += BLOCK) {
        int64_t last = first + BLOCK < cols ? first + BLOCK : cols;
        for (int64_t r = 0; r < rows; r++) {
            uint8_t *to = sweep->codes + (row + r) * cols;
            for (int64_t i = first; i < last; i++)
                to[sweep->order ? sweep->order[i] : i] = codes[i * PANEL + r];
        }
    }
}

static void T(fill_groups)(const T(state) *state, int64_t row)
{
    const qt_sweep *sweep = state->sweep;
    int levels = sweep->groups == QT_GROUPS_LEVELS;
    for (int64_t group = 0; group < state->groups; group++) {
        for (int64_t r = 0; r < PANEL; r++) {
            int inside = row + r < sweep->rows;
            int64_t at = (row + r) * state->groups + group;
            REAL scale = 1, zero = 0;
            if (inside && levels) {
                scale = (REAL)((const float *)sweep->scale)[at];
                zero = sweep->offset ? (REAL)sweep->offset[at] : (REAL)0;
            } else if (inside) {
                scale = ((const REAL *)sweep->scale)[at];
                zero = (REAL)sweep->zero[at];
            }
            state->scale[group * PANEL + r] = scale;
            state->zero[group * PANEL + r] = zero;
        }
    }
}

static void T(empty_groups)(const T(state) *state, int64_t row)
{
    const qt_sweep *sweep = state->sweep;
    for (int64_t r = 0; r < PANEL && row + r < sweep->rows; r++) {
        for (int64_t group = 0; group < state->groups; group++) {
            int64_t at = (row + r) * state->groups + group;
            ((REAL *)sweep->scale)[at] = state->scale[group * PANEL + r];
            sweep->zero[at] = (uint8_t)state->zero[group * PANEL + r];
        }
    }
}

/* A chunk of panels passes over the columns together: U is read once for all of its rows. */
static void T(sweep_chunk)(T(state) state, int64_t row, int64_t panels, REAL *weights,
                           REAL *errors, REAL *tiles, REAL *scales, uint8_t *codes, REAL *loss)
{
    const qt_sweep *sweep = state.sweep;
    int64_t cols = sweep->cols, panel_size = cols * PANEL, block_size = BLOCK * PANEL;
    int64_t groups_size = state.groups * PANEL;
    memset(loss, 0, (size_t)(panels * PANEL) * sizeof(REAL));
    for (int64_t p = 0; p < panels; p++) {
        state.scale = scales + 2 * p * groups_size;
        state.zero = state.scale + groups_size;
        T(fill_panel)(sweep, row + p * PANEL, weights + p * panel_size);
        if (sweep->groups >= QT_GROUPS_GIVEN)
            T(fill_groups)(&state, row + p * PANEL);
        if (sweep->groups == QT_GROUPS_STATIC)
            for (int64_t group = 0; group < state.groups; group++)
                T(find_group)(&state, weights + p * panel_size, group);
    }
    for (int64_t from = 0, to; from < cols; from = to) {
        to = T(block_end)(&state, from);
        T(gather_factor)(tiles, sweep->hinv, cols, from, to);
        for (int64_t p = 0; p < panels; p++) {
            state.scale = scales + 2 * p * groups_size;
            state.zero = state.scale + groups_size;
            T(sweep_block)(&state, weights + p * panel_size, from, to, errors + p * block_size,
                           codes + p * panel_size, loss + p * PANEL);
        }
        const REAL *tile = tiles;
        for (int64_t first = to; first < cols; first += QT_TILE_COLUMNS) {
            for (int64_t p = 0; p < panels; p++) {
                REAL *w = weights + p * panel_size + first * PANEL;
                if (cols - first < QT_TILE_COLUMNS)
                    T(spread_edge)(w, errors + p * block_size, tile, to - from, cols - first);
                else
                    T(spread)(w, errors + p * block_size, tile, to - from);
            }
            tile += (to - from) * QT_TILE_COLUMNS;
        }
    }
    for (int64_t p = 0; p < panels; p++) {
        int64_t at = row + p * PANEL;
        state.scale = scales + 2 * p * groups_size;
        state.zero = state.scale + groups_size;
        T(empty_codes)(sweep, at, codes + p * panel_size);
        if (sweep->groups < QT_GROUPS_GIVEN)
            T(empty_groups)(&state, at);
        for (int64_t r = 0; r < PANEL && at + r < sweep->rows; r++)
            sweep->loss[at + r] = (double)loss[p * PANEL + r];
    }
}

int T(gptq_sweep)(const qt_sweep *sweep)
{
    int64_t cols = sweep->cols, size = sweep->group_size < cols ? sweep->group_size : cols;
    int64_t panels = (sweep->rows + PANEL - 1) / PANEL;
    int64_t fit = CHUNK_BYTES / (cols * PANEL * (int64_t)sizeof(REAL));
    int64_t chunk = fit < 2 ? 2 : fit > MOST_PANELS ? MOST_PANELS : fit;
    chunk = chunk < panels ? chunk : panels;
    T(book) book;
    T(lattice) lattice;
    T(state) state = {.sweep = sweep, .groups = (cols + size - 1) / size, .group_size = size};
    if (sweep->groups == QT_GROUPS_LEVELS) {
        if (sweep->levels < 1 || sweep->levels > MOST_LEVELS)
            return QT_E_ARGUMENT;
        T(sort_book)(sweep->book, sweep->levels, &book);
        state.book = &book;
        state.lattice = sweep->point ? &lattice : NULL;
        if (sweep->point && (!T(read_lattice)(sweep, &lattice) || cols % lattice.unit ||
                             size % lattice.unit))
            return QT_E_ARGUMENT;
    }

    size_t real = sizeof(REAL), width = (size_t)(chunk * PANEL);
    size_t padded = (size_t)(cols + QT_TILE_COLUMNS);
    REAL *weights = malloc(width * (size_t)cols * real);
    REAL *errors = malloc(width * BLOCK * real);
    REAL *tiles = malloc(padded * BLOCK * real);
    REAL *scales = malloc(width * (size_t)state.groups * 2 * real);
    REAL *loss = malloc(width * real);
    REAL *importance = malloc((size_t)cols * real);
    uint8_t *codes = malloc(width * (size_t)cols);
    state.position = malloc((size_t)cols * sizeof(int32_t));
    int code = QT_E_MEMORY;
    if (weights && errors && tiles && scales && loss && importance && codes && state.position) {
        for (int64_t i = 0; i < cols; i++)
            state.position[sweep->order ? sweep->order[i] : i] = (int32_t)i;
        for (int64_t i = 0; sweep->importance && i < cols; i++)
            importance[i] = (REAL)sweep->importance[sweep->order ? sweep->order[i] : i];
        state.importance = sweep->importance ? importance : NULL;
        for (int64_t p = 0; p < panels; p += chunk)
            T(sweep_chunk)(state, p * PANEL, panels - p < chunk ? panels - p : chunk, weights,
                           errors, tiles, scales, codes, loss);
        code = QT_OK;
    }
    free(weights), free(errors), free(tiles), free(scales), free(loss);
    free(importance), free(codes), free(state.position);
    return code;
}
