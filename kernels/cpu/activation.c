/* out[n, size] = act(gate) * up of gate_up[n, 2 * size], act SiLU or GELU's tanh form; float32 inside, rounded once. */
#include "runtime.h"
#include "vec.h"

#define MIN_PARALLEL 16384 /* elements */

/* Both are gate / (1 + 2^z): z is -log2(e) * gate for SiLU, and -2 * log2(e) * sqrt(2 / pi) * (gate + 0.044715 * gate^3)
 * for GELU, because (1 + tanh(u)) / 2 = 1 / (1 + exp(-2 u)). */
INLINE void act_mul_row(const int gelu, const bf16 *gate, const bf16 *up, int64_t size, bf16 *out) {
    const __m512 one = _mm512_set1_ps(1.0f);
    const __m512 linear = _mm512_set1_ps(gelu ? -2.0f * 0.7978845608f * LOG2_E : -LOG2_E);
    for (int64_t i = 0; i < size; i += 16) {
        const __mmask16 m = first16(size - i);
        const __m512 g = load_wide(m, gate + i);
        __m512 z = _mm512_mul_ps(g, linear);
        if (gelu) z = _mm512_mul_ps(z, _mm512_fmadd_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(0.044715f), one));
        const __m512 act = _mm512_div_ps(g, _mm512_add_ps(one, exp2_16(z)));
        store_narrow(out + i, m, _mm512_mul_ps(act, load_wide(m, up + i)));
    }
}

int inferd_act_mul(int gelu, const bf16 *gate_up, int64_t stride, int64_t rows, int64_t size, bf16 *out) {
#pragma omp parallel for schedule(static) num_threads(inferd_threads()) if (rows > 1 && rows * size >= MIN_PARALLEL)
    for (int64_t r = 0; r < rows; r++) {
        const bf16 *gate = gate_up + r * stride, *up = gate + size;
        if (gelu)
            act_mul_row(1, gate, up, size, out + r * size);
        else
            act_mul_row(0, gate, up, size, out + r * size);
    }
    return INFERD_OK;
}
