/* 512-bit helpers for bfloat16 data with float32 sums. Needs AVX512-BF16. */
#ifndef INFERD_VEC_H
#define INFERD_VEC_H

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

typedef uint16_t bf16;

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 32")

#define LOG2_E 1.44269504088896340736f
#define LN_2 0.69314718055994530942f

/* Bits set for the first n of 16 or 32 lanes; n may be beyond either end. */
INLINE __mmask16 first16(int64_t n) { return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1); }
INLINE __mmask32 first32(int64_t n) { return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (__mmask32)((1u << n) - 1); }

INLINE __m512bh load_pairs(const void *p) { return (__m512bh)_mm512_loadu_si512(p); }
INLINE __m512bh load_pairs_masked(__mmask32 m, const void *p) { return (__m512bh)_mm512_maskz_loadu_epi16(m, p); }
INLINE __m512bh broadcast_pair(const void *p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* 16 bf16 <-> 16 float32 */
INLINE __m512 widen(__m256i x) { return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16); }
INLINE __m512 load_wide(__mmask16 m, const bf16 *p) { return widen(_mm256_maskz_loadu_epi16(m, p)); }
INLINE void store_narrow(bf16 *p, __mmask16 m, __m512 x) {
    _mm256_mask_storeu_epi16(p, m, (__m256i)_mm512_cvtneps_pbh(x));
}

/* Two float32 vectors to 16 pairs (low half first) of bf16. */
INLINE __m512i pair_up(__m512 low, __m512 high) {
    __m512i lo = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(low));
    __m512i hi = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(high));
    return _mm512_or_si512(lo, _mm512_slli_epi32(hi, 16));
}

/* 2^x, relative error below 3e-7; NaN stays NaN, -inf gives 0. Minimax polynomial on [-1/2, 1/2]. */
INLINE __m512 exp2_16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-160.0f), x); /* this operand order keeps NaN */
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.5353362e-4f);
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.3398874e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(9.6184373e-3f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(5.5503324e-2f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(2.4022648e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(6.9314720e-1f));
    y = _mm512_fmadd_ps(y, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, whole);
}

/* r[i] lane j <-> r[j] lane i */
INLINE void transpose16(__m512i r[16]) {
    __m512i t[16];
    UNROLL for (int i = 0; i < 8; i++) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
    UNROLL for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}

/* Adds a's two halves and b's two halves at a distance of 8 lanes: a's sums end in the low half, b's in the high. */
INLINE __m512 fold8(__m512 a, __m512 b) {
    return _mm512_add_ps(_mm512_mask_blend_ps(0xff00, a, b), _mm512_shuffle_f32x4(a, b, 0x4e));
}
/* The same at a distance of 4 lanes, inside each half. */
INLINE __m512 fold4(__m512 a, __m512 b) {
    __m512 crossed = _mm512_mask_blend_ps(0xf0f0, b, a);
    __m512 swapped = _mm512_shuffle_f32x4(crossed, crossed, 0xb1);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xf0f0, a, b), swapped);
}
INLINE __m512 fold2(__m512 a, __m512 b) {
    __m512 swapped = _mm512_permute_ps(_mm512_mask_blend_ps(0xcccc, b, a), 0x4e);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xcccc, a, b), swapped);
}
INLINE __m512 fold1(__m512 a, __m512 b) {
    __m512 swapped = _mm512_permute_ps(_mm512_mask_blend_ps(0xaaaa, b, a), 0xb1);
    return _mm512_add_ps(_mm512_mask_blend_ps(0xaaaa, a, b), swapped);
}

/* Lane i of the result: the sum of all lanes of r[i]. */
INLINE __m512 sum_lanes16(const __m512 r[16]) {
    __m512 s[8];
    UNROLL for (int i = 0; i < 8; i++) s[i] = fold8(r[i], r[i + 8]);
    UNROLL for (int i = 0; i < 4; i++) s[i] = fold4(s[i], s[i + 4]);
    UNROLL for (int i = 0; i < 2; i++) s[i] = fold2(s[i], s[i + 2]);
    return fold1(s[0], s[1]);
}

#endif
