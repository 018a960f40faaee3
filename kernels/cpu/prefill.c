/* Attention of many query tokens over paged keys and values, causal or not.
 *
 * A lane is one (token, head of the group) pair of one key head, 16 to a block and up to three blocks to a tile: keys
 * and values are broadcast from cache, and maxima and sums stay inside their lane. Scores live in base 2. */
#include "paged.h"
#include "runtime.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#define LANES 16
#define MAX_BLOCKS 3
#define STEP 8 /* keys, or dimensions of values, side by side */
#define SMALLEST_PART 256

typedef struct {
    paged_cache cache;
    const bf16 *q;
    int64_t q_stride, num_rows, num_heads;
    const int32_t *starts; /* [num_rows + 1] of query tokens */
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *seq_lens;
    int causal; /* 0: every query sees all tokens of its row */
    float scale; /* times log2(e) */
    float softcap; /* times log2(e); 0: none */
    int64_t window; /* 0: none */
    bf16 *out;
    float *lse;
} problem;

typedef struct {
    int32_t row, lane, blocks, kv_head;
    int32_t first_token, end_token; /* what this unit attends */
    int32_t part, num_parts, slot;  /* slot: of a kept partial state, -1 when the tile has one part */
} unit;

/* Softmax state of a tile: max[lanes], sum[lanes], then unnormalised values [head_size rounded up][lanes]. */
static int64_t padded_size(const problem *p) { return (p->cache.head_size + 31) / 32 * 32; }
static int64_t state_size(const problem *p) { return MAX_BLOCKS * LANES * (padded_size(p) + 2); }
static int64_t group_size(const problem *p) { return p->num_heads / p->cache.num_kv_heads; }
static int64_t row_lanes(const problem *p, int64_t row) {
    return (p->starts[row + 1] - p->starts[row]) * group_size(p);
}

/* The tokens [*first, *end) that a lane sees; lanes beyond the row's last see what the last sees. */
static void lane_range(const problem *p, int64_t row, int64_t lane, int64_t *first, int64_t *end) {
    const int64_t last = row_lanes(p, row) - 1, queries = p->starts[row + 1] - p->starts[row];
    const int64_t token = (lane < last ? lane : last) / group_size(p);
    *end = p->causal ? p->seq_lens[row] - queries + token + 1 : p->seq_lens[row];
    *first = p->window && *end > p->window ? *end - p->window : 0;
}

static int64_t lane_head(const problem *p, const unit *u, int64_t lane) {
    return u->kv_head * group_size(p) + lane % group_size(p);
}
static int64_t lane_token(const problem *p, const unit *u, int64_t lane) {
    return p->starts[u->row] + lane / group_size(p);
}

/* Queries of a tile -> packed[blocks][head_size / 2][16] pairs; lanes beyond the row's last are zero. */
static void pack_queries(const problem *p, const unit *u, uint32_t *packed) {
    const int64_t pairs = p->cache.head_size / 2, lanes = row_lanes(p, u->row);
    for (int b = 0; b < u->blocks; b++)
        for (int64_t j = 0; j < pairs; j += 16) {
            __m512i r[LANES];
            for (int i = 0; i < LANES; i++) {
                const int64_t lane = u->lane + b * LANES + i;
                if (lane >= lanes) {
                    r[i] = _mm512_setzero_si512();
                    continue;
                }
                const bf16 *q = p->q + lane_token(p, u, lane) * p->q_stride + lane_head(p, u, lane) * pairs * 2;
                r[i] = _mm512_maskz_loadu_epi32(first16(pairs - j), (const uint32_t *)q + j);
            }
            transpose16(r);
            for (int i = 0; i < 16 && j + i < pairs; i++)
                _mm512_storeu_si512(packed + ((b * pairs) + j + i) * LANES, r[i]);
        }
}

/* scores[count][blocks][16] = scale * keys . queries */
INLINE void score_chunk(const int blocks, const uint32_t *packed, const bf16 *keys, const int64_t *offsets,
                        int64_t count, int64_t pairs, float scale, float *scores) {
    for (int64_t t = 0; t < count; t += STEP) {
        __m512 sum[STEP][MAX_BLOCKS];
        const bf16 *key[STEP];
        UNROLL for (int i = 0; i < STEP; i++) {
            key[i] = keys + offsets[t + i];
            UNROLL for (int b = 0; b < blocks; b++) sum[i][b] = _mm512_setzero_ps();
        }
        for (int64_t d = 0; d < pairs; d++) {
            __m512bh qv[MAX_BLOCKS];
            UNROLL for (int b = 0; b < blocks; b++) qv[b] = load_pairs(packed + (b * pairs + d) * LANES);
            UNROLL for (int i = 0; i < STEP; i++) {
                const __m512bh kv = broadcast_pair(key[i] + 2 * d);
                UNROLL for (int b = 0; b < blocks; b++) sum[i][b] = _mm512_dpbf16_ps(sum[i][b], qv[b], kv);
            }
        }
        UNROLL for (int i = 0; i < STEP; i++)
            UNROLL for (int b = 0; b < blocks; b++)
                _mm512_storeu_ps(scores + ((t + i) * blocks + b) * LANES,
                                 _mm512_mul_ps(sum[i][b], _mm512_set1_ps(scale)));
    }
}

/* Scores of tokens that a lane does not see become -inf. `first` is the chunk's first token. */
static void mask_chunk(const problem *p, const unit *u, int64_t first, int64_t count, float *scores) {
    for (int b = 0; b < u->blocks; b++) {
        int32_t low[LANES], high[LANES];
        for (int i = 0; i < LANES; i++) {
            int64_t begin, end;
            lane_range(p, u->row, u->lane + b * LANES + i, &begin, &end);
            low[i] = (int32_t)begin;
            high[i] = (int32_t)(end < u->end_token ? end : u->end_token);
        }
        const __m512i begins = _mm512_loadu_si512(low), ends = _mm512_loadu_si512(high);
        for (int64_t t = 0; t < count; t++) {
            const __m512i token = _mm512_set1_epi32((int32_t)(first + t));
            const __mmask16 seen = _mm512_cmple_epi32_mask(begins, token) & _mm512_cmplt_epi32_mask(token, ends);
            float *s = scores + (t * u->blocks + b) * LANES;
            _mm512_storeu_ps(s, _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), seen, s));
        }
    }
}

/* scores -> weights[count / 2][blocks][16] pairs of bf16 against the new maxima; shrink[blocks][16] of older sums. */
INLINE void softmax_chunk(const int blocks, const float *scores, int64_t count, float *max, float *sum,
                          uint32_t *weights, float *shrink) {
    for (int b = 0; b < blocks; b++) {
        const float *s = scores + b * LANES;
        const __m512 old_max = _mm512_loadu_ps(max + b * LANES);
        __m512 new_max = old_max, total = _mm512_setzero_ps();
        for (int64_t t = 0; t < count; t++) new_max = _mm512_max_ps(new_max, _mm512_loadu_ps(s + t * blocks * LANES));
        for (int64_t t = 0; t < count; t += 2) {
            const __m512 even = exp2_16(_mm512_sub_ps(_mm512_loadu_ps(s + t * blocks * LANES), new_max));
            const __m512 odd = exp2_16(_mm512_sub_ps(_mm512_loadu_ps(s + (t + 1) * blocks * LANES), new_max));
            total = _mm512_add_ps(total, _mm512_add_ps(even, odd));
            _mm512_storeu_si512(weights + (t / 2 * blocks + b) * LANES, pair_up(even, odd));
        }
        const __m512 factor = exp2_16(_mm512_sub_ps(old_max, new_max));
        _mm512_storeu_ps(shrink + b * LANES, factor);
        _mm512_storeu_ps(max + b * LANES, new_max);
        _mm512_storeu_ps(sum + b * LANES, _mm512_fmadd_ps(_mm512_loadu_ps(sum + b * LANES), factor, total));
    }
}

/* Values -> pairs[count / 2][padded] of an even and an odd token, dimensions as the unpack instructions leave them. */
static void pair_values(const bf16 *values, const int64_t *offsets, int64_t count, int64_t size, uint32_t *pairs) {
    const int64_t padded = (size + 31) / 32 * 32;
    for (int64_t t = 0; t < count; t += 2)
        for (int64_t d = 0; d < padded; d += 32) {
            const __mmask32 m = first32(size - d);
            const __m512i even = _mm512_maskz_loadu_epi16(m, values + offsets[t] + d);
            const __m512i odd = _mm512_maskz_loadu_epi16(m, values + offsets[t + 1] + d);
            _mm512_storeu_si512(pairs + t / 2 * padded + d, _mm512_unpacklo_epi16(even, odd));
            _mm512_storeu_si512(pairs + t / 2 * padded + d + 16, _mm512_unpackhi_epi16(even, odd));
        }
}

/* Where `pair_values` leaves dimension i of 32. */
static int unpacked_place(int i) { return i / 8 * 4 + i % 4 + (i & 4 ? 16 : 0); }

/* sums[padded][blocks][16] = shrink * sums + values . weights */
INLINE void add_values(const int blocks, const uint32_t *weights, const uint32_t *pairs, int64_t count, int64_t padded,
                       const float *shrink, float *sums) {
    __m512 factor[MAX_BLOCKS];
    UNROLL for (int b = 0; b < blocks; b++) factor[b] = _mm512_loadu_ps(shrink + b * LANES);
    for (int64_t d = 0; d < padded; d += STEP) {
        float *out = sums + d * blocks * LANES;
        __m512 sum[STEP][MAX_BLOCKS];
        UNROLL for (int i = 0; i < STEP; i++)
            UNROLL for (int b = 0; b < blocks; b++)
                sum[i][b] = _mm512_mul_ps(_mm512_loadu_ps(out + (i * blocks + b) * LANES), factor[b]);
        for (int64_t t = 0; t < count / 2; t++) {
            __m512bh w[MAX_BLOCKS];
            UNROLL for (int b = 0; b < blocks; b++) w[b] = load_pairs(weights + (t * blocks + b) * LANES);
            UNROLL for (int i = 0; i < STEP; i++) {
                const __m512bh v = broadcast_pair(pairs + t * padded + d + i);
                UNROLL for (int b = 0; b < blocks; b++) sum[i][b] = _mm512_dpbf16_ps(sum[i][b], w[b], v);
            }
        }
        UNROLL for (int i = 0; i < STEP; i++)
            UNROLL for (int b = 0; b < blocks; b++) _mm512_storeu_ps(out + (i * blocks + b) * LANES, sum[i][b]);
    }
}

INLINE void attend_unit(const problem *p, const unit *u, const int blocks, uint32_t *work, float *state) {
    const int64_t size = p->cache.head_size, padded = padded_size(p), plane = u->kv_head * size;
    float scores[CHUNK * MAX_BLOCKS * LANES], shrink[MAX_BLOCKS * LANES];
    uint32_t weights[CHUNK / 2 * MAX_BLOCKS * LANES], *packed = work, *pairs = work + size / 2 * blocks * LANES;
    float *max = state, *sum = state + blocks * LANES, *sums = state + 2 * blocks * LANES;
    int64_t offsets[CHUNK], unused, all_begin, all_end;
    lane_range(p, u->row, u->lane, &unused, &all_end);
    lane_range(p, u->row, u->lane + blocks * LANES - 1, &all_begin, &unused);
    for (int i = 0; i < blocks * LANES; i++) max[i] = NO_SCORE;
    memset(sum, 0, blocks * LANES * (padded + 1) * sizeof(float));
    pack_queries(p, u, packed);
    for (int64_t t = u->first_token; t < u->end_token; t += CHUNK) {
        const int64_t count = u->end_token - t < CHUNK ? u->end_token - t : CHUNK;
        const int64_t whole = (count + STEP - 1) / STEP * STEP;
        token_offsets(&p->cache, p->tables + u->row * p->table_stride, t, count, whole, offsets);
        score_chunk(blocks, packed, p->cache.keys + plane, offsets, whole, size / 2, p->scale, scores);
        if (p->softcap != 0.0f)
            for (int64_t i = 0; i < whole * blocks * LANES; i += LANES)
                _mm512_storeu_ps(scores + i, cap_scores(_mm512_loadu_ps(scores + i), p->softcap));
        if (t < all_begin || t + whole > all_end || whole > count) mask_chunk(p, u, t, whole, scores);
        softmax_chunk(blocks, scores, whole, max, sum, weights, shrink);
        pair_values(p->cache.values + plane, offsets, whole, size, pairs);
        add_values(blocks, weights, pairs, whole, padded, shrink, sums);
    }
}

static void attend(const problem *p, const unit *u, uint32_t *work, float *state) {
    switch (u->blocks) {
        case 1: attend_unit(p, u, 1, work, state); break;
        case 2: attend_unit(p, u, 2, work, state); break;
        default: attend_unit(p, u, 3, work, state);
    }
}

/* Adds state b to state a. */
static void merge_states(float *a, const float *b, int64_t lanes, int64_t padded) {
    for (int64_t i = 0; i < lanes; i += LANES) {
        const __m512 max_a = _mm512_loadu_ps(a + i), max_b = _mm512_loadu_ps(b + i), max = _mm512_max_ps(max_a, max_b);
        const __m512 scale_a = exp2_16(_mm512_sub_ps(max_a, max)), scale_b = exp2_16(_mm512_sub_ps(max_b, max));
        _mm512_storeu_ps(a + i, max);
        for (int64_t j = lanes; j < lanes * (padded + 2); j += lanes) {
            const __m512 part = _mm512_mul_ps(_mm512_loadu_ps(b + j + i), scale_b);
            _mm512_storeu_ps(a + j + i, _mm512_fmadd_ps(_mm512_loadu_ps(a + j + i), scale_a, part));
        }
    }
}

static void write_tile(const problem *p, const unit *u, const float *state) {
    const int64_t size = p->cache.head_size, lanes = u->blocks * LANES;
    const float *sums = state + 2 * lanes;
    for (int b = 0; b < u->blocks; b++) {
        const int64_t first = u->lane + b * LANES, left = row_lanes(p, u->row) - first;
        const __m512 sum = _mm512_loadu_ps(state + lanes + b * LANES);
        const __m512 inverse = _mm512_maskz_div_ps(_mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NEQ_UQ),
                                                   _mm512_set1_ps(1.0f), sum);
        for (int64_t d = 0; d < size; d += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; i++) {
                const int64_t place = d / 32 * 32 + unpacked_place((int)(d % 32) + i);
                r[i] = (__m512i)_mm512_mul_ps(_mm512_loadu_ps(sums + place * lanes + b * LANES), inverse);
            }
            transpose16(r);
            for (int64_t i = 0; i < LANES && i < left; i++) {
                const int64_t token = lane_token(p, u, first + i), head = lane_head(p, u, first + i);
                store_narrow(p->out + (token * p->num_heads + head) * size + d, first16(size - d), (__m512)r[i]);
            }
        }
        for (int64_t i = 0; i < LANES && i < left; i++) {
            const float total = state[lanes + b * LANES + i], max = state[b * LANES + i];
            p->lse[lane_token(p, u, first + i) * p->num_heads + lane_head(p, u, first + i)] =
                total != 0.0f ? max * LN_2 + logf(total) : -INFINITY;
        }
    }
}

/* Three blocks to a tile while that leaves no lone block. */
static int tile_blocks(int64_t lanes_left) {
    const int64_t blocks = (lanes_left + LANES - 1) / LANES;
    return blocks == 1 ? 1 : blocks == 2 || blocks == 4 ? 2 : 3;
}

typedef struct {
    int64_t units, slots, tokens; /* how many units, kept states, and tokens over all tiles */
} cut;

/* Cuts every row into tiles and every tile into parts of at most `part` tokens; writes units unless NULL. */
static cut cut_rows(const problem *p, int64_t part, unit *units) {
    cut c = {0, 0, 0};
    for (int64_t r = 0; r < p->num_rows; r++) {
        const int64_t lanes = row_lanes(p, r);
        for (int64_t lane = 0; lane < lanes;) {
            const int blocks = tile_blocks(lanes - lane);
            int64_t first, end, unused;
            lane_range(p, r, lane, &first, &unused);
            lane_range(p, r, lane + blocks * LANES - 1, &unused, &end);
            const int64_t parts = end - first <= part ? 1 : (end - first + part - 1) / part;
            for (int64_t h = 0; h < p->cache.num_kv_heads; h++)
                for (int64_t i = 0; i < parts; i++) {
                    const int64_t from = first + i * part, to = i + 1 == parts ? end : from + part;
                    const int64_t slot = parts > 1 ? c.slots : -1;
                    if (units) units[c.units] = (unit){r, lane, blocks, h, from, to, i, parts, slot};
                    c.slots += parts > 1;
                    c.units++;
                }
            c.tokens += (end - first) * p->cache.num_kv_heads;
            lane += blocks * LANES;
        }
    }
    return c;
}

static int prefill(const problem *p) {
    const int threads = inferd_threads();
    const int64_t part = part_tokens(cut_rows(p, INT64_MAX, NULL).tokens, threads, SMALLEST_PART);
    const cut c = cut_rows(p, part, NULL);
    const int64_t size = state_size(p), padded = padded_size(p);
    const int64_t work = MAX_BLOCKS * LANES * padded / 2 + CHUNK / 2 * padded; /* packed queries, paired values */
    char *memory = inferd_scratch(((threads + c.slots) * size + threads * work) * 4 + c.units * sizeof(unit));
    if (!memory) return INFERD_NO_MEMORY;
    float *states = (float *)memory;
    uint32_t *works = (uint32_t *)(states + (threads + c.slots) * size);
    unit *units = (unit *)(works + threads * work);
    cut_rows(p, part, units);
#pragma omp parallel num_threads(threads)
    {
        const int me = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = c.units - 1; i >= 0; i--) { /* a causal row's last tiles are its longest */
            const unit *u = units + i;
            float *state = states + (u->slot < 0 ? me : threads + u->slot) * size;
            attend(p, u, works + me * work, state);
            if (u->slot < 0) write_tile(p, u, state);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < c.units; i++) {
            const unit *u = units + i;
            if (u->slot < 0 || u->part > 0) continue;
            float *state = states + (threads + u->slot) * size;
            for (int64_t k = 1; k < u->num_parts; k++)
                merge_states(state, state + k * size, u->blocks * LANES, padded);
            write_tile(p, u, state);
        }
    }
    return INFERD_OK;
}

/* Row r: queries starts[r] .. starts[r + 1] - 1, which are the last of its seq_lens[r] tokens when causal. */
int inferd_paged_prefill(const bf16 *q, int64_t q_stride, int64_t num_rows, int64_t num_heads, const bf16 *keys,
                         const bf16 *values, int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
                         int64_t head_size, const int32_t *starts, const int32_t *tables, int64_t table_stride,
                         int64_t table_width, const int32_t *seq_lens, int causal, float scale, float softcap, int64_t window,
                         bf16 *out, float *lse) {
    const problem p = {{keys, values, num_blocks, block_size, num_kv_heads, head_size}, q, q_stride, num_rows,
                       num_heads, starts, tables, table_stride, seq_lens, causal, scale * LOG2_E, softcap * LOG2_E, window, out, lse};
    for (int64_t r = 0; r < num_rows; r++) {
        const int64_t queries = starts[r + 1] - starts[r];
        if (queries < 0 || seq_lens[r] < (causal ? queries : 1)) return INFERD_BAD_INDEX;
        if (queries == 0) continue;
        int64_t first, unused;
        lane_range(&p, r, 0, &first, &unused);
        if (!tokens_exist(&p.cache, tables + r * table_stride, table_width, first, seq_lens[r]))
            return INFERD_BAD_INDEX;
    }
    return prefill(&p);
}
