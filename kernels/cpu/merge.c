/* Attention over the union of two sets of keys from the results over each, weighted by their log-sum-exps. */
#include "runtime.h"
#include "vec.h"

#include <math.h>

#define MIN_PARALLEL 16384 /* elements */

int inferd_merge_lse(const bf16 *out_a, const float *lse_a, const bf16 *out_b, const float *lse_b, int64_t rows,
                      int64_t size, bf16 *out) {
#pragma omp parallel for schedule(static) num_threads(inferd_threads()) if (rows * size >= MIN_PARALLEL)
    for (int64_t r = 0; r < rows; r++) {
        const float peak = fmaxf(lse_a[r], lse_b[r]);
        float a = 0.0f, b = 0.0f;
        if (peak != -INFINITY) a = expf(lse_a[r] - peak), b = expf(lse_b[r] - peak);
        const float total = a + b;
        if (total != 0.0f) a /= total, b /= total;
        for (int64_t i = 0; i < size; i += 16) {
            const __mmask16 m = first16(size - i);
            const __m512 part = _mm512_mul_ps(load_wide(m, out_b + r * size + i), _mm512_set1_ps(b));
            const __m512 y = _mm512_fmadd_ps(load_wide(m, out_a + r * size + i), _mm512_set1_ps(a), part);
            store_narrow(out + r * size + i, m, y);
        }
    }
    return INFERD_OK;
}
