/* y = x * rsqrt(mean(x^2) + eps) * weight over the last dimension, float32 inside, rounded once. A weight is bf16, or
 * float32 where `wide`. */
#include "runtime.h"
#include "vec.h"

#include <math.h>

#define MIN_PARALLEL 16384 /* elements */

INLINE void scale_row(const bf16 *x, const void *weight, int wide, float sum_of_squares, int64_t size, float eps,
                      bf16 *out) {
    const __m512 scale = _mm512_set1_ps(1.0f / sqrtf(sum_of_squares / (float)size + eps));
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 m = first16(size - i);
        const __m512 y = _mm512_mul_ps(load_wide(m, x + i), scale);
        const __m512 w = wide ? _mm512_maskz_loadu_ps(m, (const float *)weight + i)
                              : load_wide(m, (const bf16 *)weight + i);
        store_narrow(out + i, m, _mm512_mul_ps(y, w));
    }
}

static void norm_row(const bf16 *x, const void *weight, int wide, int64_t size, float eps, bf16 *out) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __m512 v = load_wide(first16(size - i), x + i);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    scale_row(x, weight, wide, _mm512_reduce_add_ps(squares), size, eps, out);
}

/* The sum is rounded to bf16 first, and that rounded sum is what is normed and kept. */
static void add_norm_row(const bf16 *x, const bf16 *residual, const void *weight, int wide, int64_t size, float eps,
                         bf16 *out, bf16 *total) {
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 m = first16(size - i);
        const __m512 sum = _mm512_add_ps(load_wide(m, x + i), load_wide(m, residual + i));
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(sum);
        const __m512 v = widen(rounded);
        _mm256_mask_storeu_epi16(total + i, m, rounded);
        squares = _mm512_fmadd_ps(v, v, squares);
    }
    scale_row(total, weight, wide, _mm512_reduce_add_ps(squares), size, eps, out);
}

/* x[outer, inner, size] with any strides of the first two dimensions -> out, dense. */
int inferd_rms_norm(const bf16 *x, int64_t outer_stride, int64_t inner_stride, int64_t outer, int64_t inner,
                     int64_t size, const void *weight, int wide, float eps, bf16 *out) {
    const int64_t rows = outer * inner;
#pragma omp parallel for schedule(static) num_threads(inferd_threads()) if (rows > 1 && rows * size >= MIN_PARALLEL)
    for (int64_t r = 0; r < rows; r++)
        norm_row(x + r / inner * outer_stride + r % inner * inner_stride, weight, wide, size, eps, out + r * size);
    return INFERD_OK;
}

int inferd_add_rms_norm(const bf16 *x, int64_t x_stride, const bf16 *residual, int64_t residual_stride, int64_t rows,
                         int64_t size, const void *weight, int wide, float eps, bf16 *out, bf16 *total) {
#pragma omp parallel for schedule(static) num_threads(inferd_threads()) if (rows > 1 && rows * size >= MIN_PARALLEL)
    for (int64_t r = 0; r < rows; r++)
        add_norm_row(x + r * x_stride, residual + r * residual_stride, weight, wide, size, eps, out + r * size,
                     total + r * size);
    return INFERD_OK;
}
