/* out[n, size] = silu(gate) * up of gate_up[n, 2 * size], float32 inside, rounded once. */
#include "runtime.h"
#include "vec.h"

#define MIN_PARALLEL 16384 /* elements */

static void silu_mul_row(const bf16 *gate, const bf16 *up, int64_t size, bf16 *out) {
    const __m512 one = _mm512_set1_ps(1.0f), minus_log2_e = _mm512_set1_ps(-LOG2_E);
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 m = first16(size - i);
        const __m512 g = load_wide(m, gate + i);
        const __m512 denominator = _mm512_add_ps(one, exp2_16(_mm512_mul_ps(g, minus_log2_e)));
        store_narrow(out + i, m, _mm512_mul_ps(_mm512_div_ps(g, denominator), load_wide(m, up + i)));
    }
}

int inferd_silu_mul(const bf16 *gate_up, int64_t stride, int64_t rows, int64_t size, bf16 *out) {
#pragma omp parallel for schedule(static) num_threads(inferd_threads()) if (rows > 1 && rows * size >= MIN_PARALLEL)
    for (int64_t r = 0; r < rows; r++)
        silu_mul_row(gate_up + r * stride, gate_up + r * stride + size, size, out + r * size);
    return INFERD_OK;
}
