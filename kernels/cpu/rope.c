/* Rotates queries and keys in place by halves (dimension i pairs with i + d/2), then stores keys and values. */
#include "runtime.h"
#include "vec.h"

#include <string.h>

#define MIN_PARALLEL 16 /* tokens */

static void rotate(bf16 *x, const float *cos_sin, int64_t half) {
    for (int64_t i = 0; i < half; i += 16) {
        const __mmask16 m = first16(half - i);
        const __m512 cos = _mm512_maskz_loadu_ps(m, cos_sin + i), sin = _mm512_maskz_loadu_ps(m, cos_sin + half + i);
        const __m512 a = load_wide(m, x + i), b = load_wide(m, x + half + i);
        store_narrow(x + i, m, _mm512_fmsub_ps(a, cos, _mm512_mul_ps(b, sin)));
        store_narrow(x + half + i, m, _mm512_fmadd_ps(b, cos, _mm512_mul_ps(a, sin)));
    }
}

/* Row strides in elements; heads of a row are dense. cos_sin[max_position, d]; a cache plane is [num_slots, hk, d]. */
int inferd_rope_store(bf16 *q, int64_t q_stride, int64_t num_heads, bf16 *k, int64_t k_stride, const bf16 *v,
                      int64_t v_stride, int64_t num_kv_heads, int64_t head_size, int64_t rows,
                      const int64_t *positions, const float *cos_sin, int64_t max_position, bf16 *key_cache,
                      bf16 *value_cache, const int64_t *slots, int64_t num_slots) {
    const int64_t token_size = num_kv_heads * head_size;
    for (int64_t r = 0; r < rows; r++)
        if (positions[r] < 0 || positions[r] >= max_position || slots[r] < -1 || slots[r] >= num_slots)
            return INFERD_BAD_INDEX;
#pragma omp parallel for schedule(static) num_threads(inferd_threads()) if (rows >= MIN_PARALLEL)
    for (int64_t r = 0; r < rows; r++) {
        const float *angles = cos_sin + positions[r] * head_size;
        for (int64_t h = 0; h < num_heads; h++) rotate(q + r * q_stride + h * head_size, angles, head_size / 2);
        for (int64_t h = 0; h < num_kv_heads; h++) rotate(k + r * k_stride + h * head_size, angles, head_size / 2);
        if (slots[r] < 0) continue;
        memcpy(key_cache + slots[r] * token_size, k + r * k_stride, token_size * sizeof(bf16));
        memcpy(value_cache + slots[r] * token_size, v + r * v_stride, token_size * sizeof(bf16));
    }
    return INFERD_OK;
}
