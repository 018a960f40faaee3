/* out[n, out_features] = x[n, in_features] @ weight[out_features, in_features].T + bias, over the weight as it lies.
 *
 * Few rows: dot products along a weight row. More rows: x is transposed into blocks of 16 rows so that a lane is a row
 * of x and each weight pair is broadcast; nothing is summed across lanes, and the weight needs no repacking. */
#include "runtime.h"
#include "vec.h"

#define DOT_OUTPUTS 4
#define DOT_TILE_ROWS 5
#define DOT_ROWS 22 /* up to here lanes would be too empty */
#define AHEAD_BYTES 8192 /* fetched into the second level: the first has too few fill buffers to stream */
#define SHARES 4 /* of the outputs for each thread: few, because what is fetched ahead at a share's end is wasted */
#define LANE_OUTPUTS 8
#define BLOCK_ROWS 16
#define PACKED_BYTES (448 * 1024) /* of x at a time: half of a core's second-level cache */

typedef struct {
    const bf16 *x;
    int64_t x_stride, num_rows;
    const bf16 *weight, *bias; /* bias may be NULL */
    int64_t out_features, in_features;
    void *out; /* bf16, or float when `wide` */
    int wide;
} problem;

INLINE void store_outputs(const problem *p, int64_t row, int64_t first_out, __mmask16 m, __m512 y) {
    const int64_t place = row * p->out_features + first_out;
    if (p->wide) _mm512_mask_storeu_ps((float *)p->out + place, m, y);
    else store_narrow((bf16 *)p->out + place, m, y);
}

/* Lane i: the sum of all lanes of r[i]. */
INLINE __m128 sum_lanes4(const __m512 r[4]) {
    __m512 sums = fold4(fold8(r[0], r[2]), fold8(r[1], r[3]));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0x4e));
    sums = _mm512_add_ps(sums, _mm512_permute_ps(sums, 0xb1));
    const __m512i first_of_quarters = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(first_of_quarters, sums));
}

INLINE void dot_tile(const problem *p, int64_t first_row, const int rows, int64_t first_out) {
    const int64_t k_end = p->in_features;
    const bf16 *w = p->weight + first_out * k_end, *x = p->x + first_row * p->x_stride;
    __m512 sum[DOT_TILE_ROWS][DOT_OUTPUTS];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int i = 0; i < DOT_OUTPUTS; i++) sum[r][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < k_end; k += 32) {
        const __mmask32 m = first32(k_end - k);
        __m512bh wv[DOT_OUTPUTS];
        UNROLL for (int i = 0; i < DOT_OUTPUTS; i++) {
            wv[i] = load_pairs_masked(m, w + i * k_end + k);
            _mm_prefetch((const char *)(w + i * k_end + k) + AHEAD_BYTES, _MM_HINT_T1);
        }
        UNROLL for (int r = 0; r < rows; r++) {
            __m512bh xv = load_pairs_masked(m, x + r * p->x_stride + k);
            UNROLL for (int i = 0; i < DOT_OUTPUTS; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], wv[i], xv);
        }
    }
    const __m512 bias = p->bias ? load_wide(0xf, p->bias + first_out) : _mm512_setzero_ps();
    UNROLL for (int r = 0; r < rows; r++) {
        const __m512 y = _mm512_add_ps(_mm512_castps128_ps512(sum_lanes4(sum[r])), bias);
        store_outputs(p, first_row + r, first_out, 0xf, y);
    }
}

static void dot_outputs(const problem *p, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i += DOT_OUTPUTS) {
        const int64_t out = i + DOT_OUTPUTS > end ? end - DOT_OUTPUTS : i;
        int64_t row = 0;
        for (; row + DOT_TILE_ROWS <= p->num_rows; row += DOT_TILE_ROWS) dot_tile(p, row, DOT_TILE_ROWS, out);
        switch (p->num_rows - row) {
            case 4: dot_tile(p, row, 4, out); break;
            case 3: dot_tile(p, row, 3, out); break;
            case 2: dot_tile(p, row, 2, out); break;
            case 1: dot_tile(p, row, 1, out); break;
            default: break;
        }
    }
}

/* x[rows <= 16, in_features] -> packed[in_features / 2][16] pairs; missing rows are zero. */
static void pack_block(const bf16 *x, int64_t x_stride, int64_t rows, int64_t in_features, uint32_t *packed) {
    const int64_t num_pairs = in_features / 2;
    for (int64_t j = 0; j < num_pairs; j += 16) {
        const __mmask16 m = first16(num_pairs - j);
        const __m512i zero = _mm512_setzero_si512();
        __m512i r[BLOCK_ROWS];
        UNROLL for (int i = 0; i < BLOCK_ROWS; i++)
            r[i] = i < rows ? _mm512_maskz_loadu_epi32(m, (const uint32_t *)(x + i * x_stride) + j) : zero;
        transpose16(r);
        for (int i = 0; i < 16 && j + i < num_pairs; i++) _mm512_store_si512(packed + (j + i) * BLOCK_ROWS, r[i]);
    }
}

/* A tile of outputs for `blocks` blocks of rows, starting at first_row; `ahead` is what to fetch meanwhile. */
INLINE void lane_tile(const problem *p, const int blocks, const uint32_t *packed, int64_t first_row,
                      int64_t first_out, const char *ahead) {
    const int64_t k_end = p->in_features, block_pairs = k_end / 2 * BLOCK_ROWS;
    const bf16 *w = p->weight + first_out * k_end;
    __m512 sum[LANE_OUTPUTS][3];
    UNROLL for (int i = 0; i < LANE_OUTPUTS; i++)
        UNROLL for (int b = 0; b < blocks; b++) sum[i][b] = _mm512_setzero_ps();
    for (int64_t k = 0; k < k_end; k += 2) {
        __m512bh xv[3];
        UNROLL for (int b = 0; b < blocks; b++) xv[b] = load_pairs(packed + b * block_pairs + k / 2 * BLOCK_ROWS);
        _mm_prefetch(ahead + k * LANE_OUTPUTS * 2, _MM_HINT_T1);
        UNROLL for (int i = 0; i < LANE_OUTPUTS; i++) {
            __m512bh wv = broadcast_pair(w + i * k_end + k);
            UNROLL for (int b = 0; b < blocks; b++) sum[i][b] = _mm512_dpbf16_ps(sum[i][b], xv[b], wv);
        }
    }
    const __mmask16 m = first16(LANE_OUTPUTS);
    UNROLL for (int b = 0; b < blocks; b++) {
        __m512i r[16] = {0};
        UNROLL for (int i = 0; i < LANE_OUTPUTS; i++) r[i] = (__m512i)sum[i][b];
        transpose16(r);
        const __m512 bias = p->bias ? load_wide(m, p->bias + first_out) : _mm512_setzero_ps();
        const int64_t row = first_row + b * BLOCK_ROWS;
        for (int i = 0; i < 16 && row + i < p->num_rows; i++)
            store_outputs(p, row + i, first_out, m, _mm512_add_ps((__m512)r[i], bias));
    }
}

/* All packed blocks against one tile of outputs. */
static void lane_outputs(const problem *p, const uint32_t *packed, int64_t first_row, int64_t num_blocks,
                         int64_t first_out) {
    const int64_t block_pairs = p->in_features / 2 * BLOCK_ROWS;
    const char *ahead = (const char *)(p->weight + (first_out + LANE_OUTPUTS) * p->in_features);
    for (int64_t b = 0; b < num_blocks;) {
        const int64_t left = num_blocks - b, row = first_row + b * BLOCK_ROWS;
        const uint32_t *block = packed + b * block_pairs;
        const int take = left == 1 ? 1 : left == 2 || left == 4 ? 2 : 3;
        switch (take) {
            case 3: lane_tile(p, 3, block, row, first_out, ahead); break;
            case 2: lane_tile(p, 2, block, row, first_out, ahead); break;
            default: lane_tile(p, 1, block, row, first_out, ahead);
        }
        ahead = (const char *)packed;
        b += take;
    }
}

static int lanes_linear(const problem *p) {
    const int64_t row_bytes = p->in_features * 2;
    int64_t max_blocks = PACKED_BYTES / (row_bytes * BLOCK_ROWS);
    if (max_blocks < 2) max_blocks = 2;
    const int64_t all_blocks = (p->num_rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    if (max_blocks > all_blocks) max_blocks = all_blocks;
    uint32_t *packed = inferd_scratch(max_blocks * BLOCK_ROWS * row_bytes);
    if (!packed) return INFERD_NO_MEMORY;
    const int64_t num_tiles = (p->out_features + LANE_OUTPUTS - 1) / LANE_OUTPUTS;
    const int64_t per_share = num_tiles / (SHARES * inferd_threads()) + 1;
#pragma omp parallel num_threads(inferd_threads())
    for (int64_t b0 = 0; b0 < all_blocks; b0 += max_blocks) {
        const int64_t blocks = all_blocks - b0 < max_blocks ? all_blocks - b0 : max_blocks;
#pragma omp for schedule(static)
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t row = (b0 + b) * BLOCK_ROWS;
            pack_block(p->x + row * p->x_stride, p->x_stride, p->num_rows - row, p->in_features,
                       packed + b * BLOCK_ROWS * (p->in_features / 2));
        }
#pragma omp for schedule(dynamic, per_share)
        for (int64_t t = 0; t < num_tiles; t++) {
            const int64_t last = p->out_features - LANE_OUTPUTS, out = t * LANE_OUTPUTS;
            lane_outputs(p, packed, b0 * BLOCK_ROWS, blocks, out < last ? out : last);
        }
    }
    return INFERD_OK;
}

/* Needs an even in_features and out_features >= 8; x_stride in elements; out is float when `wide`, else bf16. */
int inferd_linear(const bf16 *x, int64_t x_stride, int64_t num_rows, const bf16 *weight, const bf16 *bias,
                  int64_t out_features, int64_t in_features, void *out, int wide) {
    const problem p = {x, x_stride, num_rows, weight, bias, out_features, in_features, out, wide};
    if (num_rows > DOT_ROWS) return lanes_linear(&p);
    const int64_t share = out_features / (SHARES * inferd_threads()) / DOT_OUTPUTS * DOT_OUTPUTS + DOT_OUTPUTS;
    const int64_t num_shares = (out_features + share - 1) / share;
#pragma omp parallel for schedule(dynamic, 1) num_threads(inferd_threads())
    for (int64_t s = 0; s < num_shares; s++) {
        const int64_t end = (s + 1) * share < out_features ? (s + 1) * share : out_features;
        dot_outputs(&p, s * share, end);
    }
    return INFERD_OK;
}
