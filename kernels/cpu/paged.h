/* Keys and values in pages, and rows of tokens that live in them. */
#ifndef INFERD_PAGED_H
#define INFERD_PAGED_H

#include "vec.h"

#define CHUNK 64 /* tokens of a row that are attended at a time */
#define NO_SCORE -1e30f /* below every score; finite, so that differences of it stay numbers */

/* softcap * tanh(score / softcap), for scores and softcap in base 2; softcap 0: no cap. */
INLINE __m512 cap_scores(__m512 scores, float softcap) {
    if (softcap == 0.0f) return scores;
    const __m512 cap = _mm512_set1_ps(softcap), one = _mm512_set1_ps(1.0f);
    const __m512 power = exp2_16(_mm512_mul_ps(scores, _mm512_set1_ps(2.0f * LOG2_E / softcap)));
    return _mm512_fnmadd_ps(_mm512_add_ps(cap, cap), _mm512_div_ps(one, _mm512_add_ps(power, one)), cap);
}

/* One layer: both planes are [num_blocks, block_size, num_kv_heads, head_size]. */
typedef struct {
    const bf16 *keys, *values;
    int64_t num_blocks, block_size, num_kv_heads, head_size;
} paged_cache;

/* Element offsets in a plane of `count` tokens from `first` on; up to `padded`, the last of them again. */
INLINE void token_offsets(const paged_cache *cache, const int32_t *table, int64_t first, int64_t count, int64_t padded,
                          int64_t *offsets) {
    const int64_t token_size = cache->num_kv_heads * cache->head_size;
    int64_t block = first / cache->block_size, in_block = first % cache->block_size;
    for (int64_t i = 0; i < count; i++) {
        offsets[i] = (table[block] * cache->block_size + in_block) * token_size;
        if (++in_block == cache->block_size) {
            in_block = 0;
            block++;
        }
    }
    for (int64_t i = count; i < padded; i++) offsets[i] = offsets[count - 1];
}

/* Whether the tokens [first, end) lie in a table of `width` blocks and in blocks that exist. */
INLINE int tokens_exist(const paged_cache *cache, const int32_t *table, int64_t width, int64_t first, int64_t end) {
    if (end > width * cache->block_size) return 0;
    for (int64_t b = first / cache->block_size; b * cache->block_size < end; b++)
        if (table[b] < 0 || table[b] >= cache->num_blocks) return 0;
    return 1;
}

/* Tokens per part when `total` tokens are shared out: whole chunks, about four parts a thread. */
INLINE int64_t part_tokens(int64_t total, int threads, int64_t smallest) {
    const int64_t even = total / (4 * threads) / CHUNK * CHUNK + CHUNK;
    return even < smallest ? smallest : even;
}

#endif
