/* y[rows, out] += (x[rows, in] @ a[slot].T) @ b[slot] for tiles of rows that have one adapter.
 *
 * First every product with a row of `a` is summed, then every output; in between all threads meet. */
#include "runtime.h"
#include "vec.h"

#define DOT_FACTORS 4
#define DOT_ROWS 4
#define UP_ROWS 4
#define UP_COLUMNS 64 /* of one share */
#define MIN_PARALLEL 400000 /* multiply-adds */

typedef struct {
    int32_t slot, first, count, rank;
} tile;

typedef struct {
    bf16 *y;
    int64_t y_stride;
    const bf16 *x;
    int64_t x_stride;
    const bf16 *a, *b; /* [slots][max_rank][matrices][in], [slots][max_rank][out] */
    int64_t max_rank, num_matrices, in_features, out_features;
    const int64_t *rows;
    float *inner; /* [num_rows][max_rank * matrices] */
} problem;

/* `rows` rows of x, from place `first` on, with DOT_FACTORS rows of a, of which `factors` count. */
INLINE void dot_tile(const problem *p, const bf16 *a, int64_t first, const int rows, int64_t factor, int64_t factors) {
    const int64_t k_end = p->in_features;
    const bf16 *x[DOT_ROWS], *w[DOT_FACTORS];
    __m512 sum[DOT_ROWS][DOT_FACTORS];
    UNROLL for (int i = 0; i < DOT_FACTORS; i++) w[i] = a + (factor + (i < factors ? i : 0)) * k_end;
    UNROLL for (int r = 0; r < rows; r++) {
        x[r] = p->x + p->rows[first + r] * p->x_stride;
        UNROLL for (int i = 0; i < DOT_FACTORS; i++) sum[r][i] = _mm512_setzero_ps();
    }
    for (int64_t k = 0; k < k_end; k += 32) {
        const __mmask32 m = first32(k_end - k);
        __m512bh wv[DOT_FACTORS];
        UNROLL for (int i = 0; i < DOT_FACTORS; i++) wv[i] = load_pairs_masked(m, w[i] + k);
        UNROLL for (int r = 0; r < rows; r++) {
            const __m512bh xv = load_pairs_masked(m, x[r] + k);
            UNROLL for (int i = 0; i < DOT_FACTORS; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], wv[i], xv);
        }
    }
    UNROLL for (int r = 0; r < rows; r++) {
        float *target = p->inner + (first + r) * p->max_rank * p->num_matrices + factor;
        for (int i = 0; i < factors; i++) target[i] = _mm512_reduce_add_ps(sum[r][i]);
    }
}

static void down(const problem *p, const tile *t, int64_t factor) {
    const bf16 *a = p->a + (int64_t)t->slot * p->max_rank * p->num_matrices * p->in_features;
    const int64_t left = (int64_t)t->rank * p->num_matrices - factor, factors = left < DOT_FACTORS ? left : DOT_FACTORS;
    int64_t r = 0;
    for (; r + DOT_ROWS <= t->count; r += DOT_ROWS) dot_tile(p, a, t->first + r, DOT_ROWS, factor, factors);
    switch (t->count - r) {
        case 3: dot_tile(p, a, t->first + r, 3, factor, factors); break;
        case 2: dot_tile(p, a, t->first + r, 2, factor, factors); break;
        case 1: dot_tile(p, a, t->first + r, 1, factor, factors); break;
        default: break;
    }
}

INLINE void up_tile(const problem *p, const tile *t, int64_t first, const int rows, int64_t matrix, int64_t column,
                    __mmask16 m) {
    const bf16 *b = p->b + (int64_t)t->slot * p->max_rank * p->out_features + column;
    const int64_t inner_stride = p->max_rank * p->num_matrices;
    const float *inner = p->inner + first * inner_stride + matrix;
    __m512 sum[UP_ROWS];
    UNROLL for (int r = 0; r < rows; r++) sum[r] = load_wide(m, p->y + p->rows[first + r] * p->y_stride + column);
    for (int64_t k = 0; k < t->rank; k++) {
        const __m512 factor = load_wide(m, b + k * p->out_features);
        UNROLL for (int r = 0; r < rows; r++)
            sum[r] = _mm512_fmadd_ps(factor, _mm512_set1_ps(inner[r * inner_stride + k * p->num_matrices]), sum[r]);
    }
    UNROLL for (int r = 0; r < rows; r++) store_narrow(p->y + p->rows[first + r] * p->y_stride + column, m, sum[r]);
}

/* Columns [begin, end) of one matrix. */
static void up(const problem *p, const tile *t, int64_t matrix, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c += 16) {
        const __mmask16 m = first16(end - c);
        int64_t r = 0;
        for (; r + UP_ROWS <= t->count; r += UP_ROWS) up_tile(p, t, t->first + r, UP_ROWS, matrix, c, m);
        for (; r < t->count; r++) up_tile(p, t, t->first + r, 1, matrix, c, m);
    }
}

static int is_inside(const tile *tiles, int64_t num_tiles, const int64_t *rows, int64_t num_rows, int64_t num_tokens,
                     int64_t num_slots, int64_t max_rank) {
    for (int64_t i = 0; i < num_tiles; i++) {
        const tile *t = tiles + i;
        if (t->slot < 0) continue;
        if (t->slot >= num_slots || t->rank < 0 || t->rank > max_rank || t->count < 0 || t->first < 0) return 0;
        if ((int64_t)t->first + t->count > num_rows) return 0;
    }
    for (int64_t i = 0; i < num_rows; i++)
        if (rows[i] < 0 || rows[i] >= num_tokens) return 0;
    return 1;
}

/* Strides in elements; `sizes` are the outputs of each matrix; tiles with a negative slot are passed over. */
int inferd_add_lora(bf16 *y, int64_t y_stride, const bf16 *x, int64_t x_stride, int64_t num_tokens, const bf16 *a,
                    const bf16 *b, int64_t num_slots, int64_t max_rank, int64_t num_matrices, const int64_t *sizes,
                    int64_t in_features, const int64_t *rows, int64_t num_rows, const tile *tiles, int64_t num_tiles) {
    if (!is_inside(tiles, num_tiles, rows, num_rows, num_tokens, num_slots, max_rank)) return INFERD_BAD_INDEX;
    int64_t out_features = 0, shares = 0;
    for (int64_t i = 0; i < num_matrices; i++) {
        out_features += sizes[i];
        shares += (sizes[i] + UP_COLUMNS - 1) / UP_COLUMNS;
    }
    float *inner = inferd_scratch(num_rows * max_rank * num_matrices * sizeof(float));
    if (!inner) return INFERD_NO_MEMORY;
    const problem p = {y, y_stride, x, x_stride, a, b, max_rank, num_matrices, in_features, out_features, rows, inner};
    const int64_t groups = (max_rank * num_matrices + DOT_FACTORS - 1) / DOT_FACTORS;
    const int64_t work = num_rows * max_rank * (num_matrices * in_features + out_features);
#pragma omp parallel num_threads(inferd_threads()) if (work >= MIN_PARALLEL)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles * groups; i++) {
            const tile *t = tiles + i / groups;
            const int64_t factor = i % groups * DOT_FACTORS;
            if (t->slot >= 0 && factor < t->rank * num_matrices) down(&p, t, factor);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_tiles * shares; i++) {
            const tile *t = tiles + i / shares;
            int64_t share = i % shares, matrix = 0, begin = 0;
            for (int64_t own; share >= (own = (sizes[matrix] + UP_COLUMNS - 1) / UP_COLUMNS); matrix++) {
                share -= own;
                begin += sizes[matrix];
            }
            const int64_t first = begin + share * UP_COLUMNS, end = begin + sizes[matrix];
            if (t->slot >= 0) up(&p, t, matrix, first, first + UP_COLUMNS < end ? first + UP_COLUMNS : end);
        }
    }
    return INFERD_OK;
}
