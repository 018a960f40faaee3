/* Attention of one query token a row, the last of the row's tokens, over its pages.
 *
 * All heads of a group read a key and a value once from memory. A row's tokens fall into parts when there are too few
 * rows for the threads; parts are merged by their softmax sums. Scores live in base 2. */
#include "paged.h"
#include "runtime.h"

#include <math.h>
#include <omp.h>
#include <string.h>

#define GROUP 4 /* heads that are attended side by side */
#define SMALLEST_PART 128

typedef struct {
    paged_cache cache;
    const bf16 *q;
    int64_t q_stride, num_rows, num_heads;
    const int32_t *tables;
    int64_t table_stride;
    const int32_t *seq_lens;
    float scale; /* times log2(e) */
    float softcap; /* times log2(e); 0: none */
    int64_t window; /* 0: none */
    bf16 *out;
    float *lse;
} problem;

typedef struct {
    int32_t row, first_token, end_token; /* what this unit attends */
    int32_t part, num_parts, slot;       /* slot: of a kept partial state, -1 when the row has one part */
} unit;

/* Softmax state of all heads of a row: max[h], sum[h], then unnormalised values [h][padded head size]. */
static int64_t padded_size(const problem *p) { return (p->cache.head_size + 31) / 32 * 32; }
static int64_t state_size(const problem *p) { return p->num_heads * (padded_size(p) + 2); }

static int64_t first_visible(const problem *p, int64_t row) {
    const int64_t hidden = p->window ? p->seq_lens[row] - p->window : 0;
    return hidden > 0 ? hidden : 0;
}

/* Scores of 16 tokens for one head. */
INLINE __m512 score16(const bf16 *q, const bf16 *keys, const int64_t *offsets, int64_t size) {
    __m512 sum[16];
    UNROLL for (int t = 0; t < 16; t++) sum[t] = _mm512_setzero_ps();
    int64_t d = 0;
    for (; d + 32 <= size; d += 32) {
        const __m512bh qv = load_pairs(q + d);
        UNROLL for (int t = 0; t < 16; t++) sum[t] = _mm512_dpbf16_ps(sum[t], qv, load_pairs(keys + offsets[t] + d));
    }
    if (d < size) {
        const __mmask32 m = first32(size - d);
        const __m512bh qv = load_pairs_masked(m, q + d);
        UNROLL for (int t = 0; t < 16; t++)
            sum[t] = _mm512_dpbf16_ps(sum[t], qv, load_pairs_masked(m, keys + offsets[t] + d));
    }
    return sum_lanes16(sum);
}

/* Adds weights[heads][CHUNK] x values of 32 * vectors dimensions; an even and an odd token make a pair. Within 32
 * dimensions the sums lie as the unpack instructions leave them: `in_order` undoes it. */
INLINE void add_values(const int heads, const int vectors, const bf16 *weights, const bf16 *values,
                       const int64_t *offsets, int64_t count, int64_t size, float *sums, int64_t sums_stride) {
    __m512 sum[GROUP][4];
    __mmask32 m[2];
    UNROLL for (int v = 0; v < vectors; v++) m[v] = first32(size - 32 * v);
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < 2 * vectors; i++) sum[h][i] = _mm512_loadu_ps(sums + h * sums_stride + 16 * i);
    for (int64_t t = 0; t < count; t += 2) {
        __m512i pair[4];
        UNROLL for (int v = 0; v < vectors; v++) {
            const __m512i even = _mm512_maskz_loadu_epi16(m[v], values + offsets[t] + 32 * v);
            const __m512i odd = _mm512_maskz_loadu_epi16(m[v], values + offsets[t + 1] + 32 * v);
            pair[2 * v] = _mm512_unpacklo_epi16(even, odd);
            pair[2 * v + 1] = _mm512_unpackhi_epi16(even, odd);
        }
        UNROLL for (int h = 0; h < heads; h++) {
            const __m512bh w = broadcast_pair(weights + h * CHUNK + t);
            UNROLL for (int i = 0; i < 2 * vectors; i++) sum[h][i] = _mm512_dpbf16_ps(sum[h][i], w, (__m512bh)pair[i]);
        }
    }
    UNROLL for (int h = 0; h < heads; h++)
        UNROLL for (int i = 0; i < 2 * vectors; i++) _mm512_storeu_ps(sums + h * sums_stride + 16 * i, sum[h][i]);
}

INLINE void in_order(__m512 low, __m512 high, __m512 *first, __m512 *second) {
    const __m512i head = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i tail = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    *first = _mm512_permutex2var_ps(low, head, high);
    *second = _mm512_permutex2var_ps(low, tail, high);
}

/* Turns scores into weights (bf16) against the new maximum; returns by how much older sums shrink. */
INLINE float softmax_step(float *scores, int64_t count, float *max, float *sum, bf16 *weights) {
    __m512 s[CHUNK / 16], peak = _mm512_set1_ps(NO_SCORE), total = _mm512_setzero_ps();
    UNROLL for (int i = 0; i < CHUNK / 16; i++) {
        s[i] = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), first16(count - 16 * i), scores + 16 * i);
        peak = _mm512_max_ps(peak, s[i]);
    }
    const float new_max = fmaxf(*max, _mm512_reduce_max_ps(peak));
    UNROLL for (int i = 0; i < CHUNK / 16; i++) {
        const __m512 w = exp2_16(_mm512_sub_ps(s[i], _mm512_set1_ps(new_max)));
        total = _mm512_add_ps(total, w);
        store_narrow(weights + 16 * i, 0xffff, w);
    }
    const float shrink = _mm512_cvtss_f32(exp2_16(_mm512_set1_ps(*max - new_max)));
    *sum = *sum * shrink + _mm512_reduce_add_ps(total);
    *max = new_max;
    return shrink;
}

INLINE void fetch(const problem *p, int64_t offset) {
    for (int64_t d = 0; d < p->cache.head_size; d += 32) {
        _mm_prefetch((const char *)(p->cache.keys + offset + d), _MM_HINT_T1);
        _mm_prefetch((const char *)(p->cache.values + offset + d), _MM_HINT_T1);
    }
}

/* `heads` heads of one key head over one chunk; `ahead`: tokens to fetch meanwhile. */
INLINE void attend_heads(const problem *p, const int heads, const bf16 *q, int64_t kv_head, const int64_t *offsets,
                         const int64_t *ahead, int64_t count, float *max, float *sum, float *sums) {
    const int64_t size = p->cache.head_size, padded = padded_size(p), plane = kv_head * size;
    bf16 weights[GROUP * CHUNK];
    float scores[CHUNK];
    for (int h = 0; h < heads; h++) {
        for (int64_t t = 0; t < count; t += 16) {
            if (h == 0)
                for (int i = 0; i < 16; i++) fetch(p, ahead[t + i] + plane);
            const __m512 s = score16(q + h * size, p->cache.keys + plane, offsets + t, size);
            _mm512_storeu_ps(scores + t, cap_scores(_mm512_mul_ps(s, _mm512_set1_ps(p->scale)), p->softcap));
        }
        const float shrink = softmax_step(scores, count, max + h, sum + h, weights + h * CHUNK);
        for (int64_t d = 0; d < padded; d += 16)
            _mm512_storeu_ps(sums + h * padded + d,
                             _mm512_mul_ps(_mm512_loadu_ps(sums + h * padded + d), _mm512_set1_ps(shrink)));
    }
    int64_t d = 0;
    for (; d + 32 < size; d += 64)
        add_values(heads, 2, weights, p->cache.values + plane + d, offsets, count, size - d, sums + d, padded);
    if (d < size)
        add_values(heads, 1, weights, p->cache.values + plane + d, offsets, count, size - d, sums + d, padded);
}

static void attend_chunk(const problem *p, int64_t row, const int64_t *offsets, const int64_t *ahead, int64_t count,
                         float *state) {
    const int64_t size = p->cache.head_size, group = p->num_heads / p->cache.num_kv_heads;
    for (int64_t head = 0; head < p->num_heads;) {
        const int64_t kv_head = head / group, left = (kv_head + 1) * group - head;
        const bf16 *q = p->q + row * p->q_stride + head * size;
        float *max = state + head, *sum = max + p->num_heads, *sums = state + 2 * p->num_heads + head * padded_size(p);
        const int heads = left < GROUP ? (int)left : GROUP;
        switch (heads) {
            case 1: attend_heads(p, 1, q, kv_head, offsets, ahead, count, max, sum, sums); break;
            case 2: attend_heads(p, 2, q, kv_head, offsets, ahead, count, max, sum, sums); break;
            case 3: attend_heads(p, 3, q, kv_head, offsets, ahead, count, max, sum, sums); break;
            default: attend_heads(p, GROUP, q, kv_head, offsets, ahead, count, max, sum, sums);
        }
        head += heads;
    }
}

/* Offsets of the unit's tokens from `first` on, a chunk at most; returns how many. */
static int64_t chunk_offsets(const problem *p, const unit *u, int64_t first, int64_t *offsets) {
    const int64_t left = u->end_token - first, count = left < CHUNK ? left : CHUNK;
    if (count > 0) token_offsets(&p->cache, p->tables + u->row * p->table_stride, first, count, CHUNK, offsets);
    return count;
}

/* While one chunk is attended, the next is fetched: of this unit, then of the next one. */
static void attend_unit(const problem *p, const unit *u, const unit *next, float *state) {
    for (int64_t h = 0; h < p->num_heads; h++) state[h] = NO_SCORE;
    memset(state + p->num_heads, 0, (state_size(p) - p->num_heads) * sizeof(float));
    int64_t offsets[2][CHUNK], *now = offsets[0], *ahead = offsets[1];
    int64_t count = chunk_offsets(p, u, u->first_token, now);
    for (int64_t t = u->first_token; count > 0; t += CHUNK) {
        const int64_t left = chunk_offsets(p, u, t + CHUNK, ahead);
        const int64_t fetched = left > 0 ? left : chunk_offsets(p, next, next->first_token, ahead);
        attend_chunk(p, u->row, now, fetched > 0 ? ahead : now, count, state);
        int64_t *swap = now;
        now = ahead, ahead = swap, count = left;
    }
}

/* Merges the states of a row's parts and writes its output. */
static void finish_row(const problem *p, int64_t row, const float *states, int64_t num_parts) {
    const int64_t heads = p->num_heads, size = p->cache.head_size, padded = padded_size(p), stride = state_size(p);
    for (int64_t h = 0; h < heads; h++) {
        float max = NO_SCORE, sum = 0.0f;
        for (int64_t i = 0; i < num_parts; i++) max = fmaxf(max, states[i * stride + h]);
        for (int64_t i = 0; i < num_parts; i++)
            sum += states[i * stride + heads + h] * exp2f(states[i * stride + h] - max);
        const float inverse = sum != 0.0f ? 1.0f / sum : 0.0f;
        p->lse[row * heads + h] = sum != 0.0f ? max * LN_2 + logf(sum) : -INFINITY;
        for (int64_t d = 0; d < size; d += 32) {
            __m512 low = _mm512_setzero_ps(), high = low, first, second;
            for (int64_t i = 0; i < num_parts; i++) {
                const float *sums = states + i * stride + 2 * heads + h * padded + d;
                const __m512 w = _mm512_set1_ps(exp2f(states[i * stride + h] - max) * inverse);
                low = _mm512_fmadd_ps(_mm512_loadu_ps(sums), w, low);
                high = _mm512_fmadd_ps(_mm512_loadu_ps(sums + 16), w, high);
            }
            in_order(low, high, &first, &second);
            bf16 *out = p->out + (row * heads + h) * size + d;
            store_narrow(out, first16(size - d), first);
            store_narrow(out + 16, first16(size - d - 16), second);
        }
    }
}

/* Cuts rows into units of at most `part` tokens; returns how many, and how many states must be kept. */
static int64_t cut_rows(const problem *p, int64_t part, unit *units, int64_t *num_slots) {
    int64_t num_units = 0, slots = 0;
    for (int64_t r = 0; r < p->num_rows; r++) {
        const int64_t visible = p->seq_lens[r] - first_visible(p, r);
        const int64_t parts = visible <= part ? 1 : (visible + part - 1) / part;
        for (int64_t i = 0; i < parts; i++) {
            const int64_t from = first_visible(p, r) + i * part, to = i + 1 == parts ? p->seq_lens[r] : from + part;
            if (units) units[num_units] = (unit){r, from, to, i, parts, parts > 1 ? slots : -1};
            slots += parts > 1;
            num_units++;
        }
    }
    *num_slots = slots;
    return num_units;
}

static int decode(const problem *p, int64_t total) {
    const int threads = inferd_threads();
    const int64_t part = part_tokens(total, threads, SMALLEST_PART), size = state_size(p);
    int64_t num_slots;
    const int64_t num_units = cut_rows(p, part, NULL, &num_slots);
    float *states = inferd_scratch((threads + num_slots) * size * sizeof(float) + num_units * sizeof(unit));
    if (!states) return INFERD_NO_MEMORY;
    unit *units = (unit *)(states + (threads + num_slots) * size);
    cut_rows(p, part, units, &num_slots);
    const int64_t share = num_units / (4 * threads) + 1; /* neighbours stay on one thread, for what is fetched ahead */
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(dynamic, share)
        for (int64_t i = 0; i < num_units; i++) {
            const unit *u = units + i;
            float *state = states + (u->slot < 0 ? omp_get_thread_num() : threads + u->slot) * size;
            attend_unit(p, u, i + 1 < num_units ? u + 1 : u, state);
            if (u->slot < 0) finish_row(p, u->row, state, 1);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_units; i++)
            if (units[i].slot >= 0 && units[i].part == 0)
                finish_row(p, units[i].row, states + (threads + units[i].slot) * size, units[i].num_parts);
    }
    return INFERD_OK;
}

int inferd_paged_decode(const bf16 *q, int64_t q_stride, int64_t num_rows, int64_t num_heads, const bf16 *keys,
                        const bf16 *values, int64_t num_blocks, int64_t block_size, int64_t num_kv_heads,
                        int64_t head_size, const int32_t *tables, int64_t table_stride, int64_t table_width,
                        const int32_t *seq_lens, float scale, float softcap, int64_t window, bf16 *out, float *lse) {
    const problem p = {{keys, values, num_blocks, block_size, num_kv_heads, head_size}, q, q_stride, num_rows,
                       num_heads, tables, table_stride, seq_lens, scale * LOG2_E, softcap * LOG2_E, window, out, lse};
    int64_t total = 0;
    for (int64_t r = 0; r < num_rows; r++) {
        if (seq_lens[r] < 0) return INFERD_BAD_INDEX;
        const int64_t first = first_visible(&p, r);
        if (!tokens_exist(&p.cache, tables + r * table_stride, table_width, first, seq_lens[r]))
            return INFERD_BAD_INDEX;
        total += seq_lens[r] - first;
    }
    return decode(&p, total);
}
