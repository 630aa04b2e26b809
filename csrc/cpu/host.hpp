// What the host kernels share: the target they are compiled for, bf16 in vector registers, and how work is divided.
//
// The library is plain C ABI, knows nothing of torch or Python, allocates nothing and keeps no state. It is compiled for
// baseline x86-64; only functions marked QT_KERNEL use AVX-512, and the caller asks qt_supported() before calling any.
#pragma once

#include <cstdint>

#define QT_EXPORT extern "C" __attribute__((visibility("default")))

using bf16 = std::uint16_t;  // the upper half of an IEEE fp32
using index_t = std::int64_t;

// Calls work(i) for i in [0, count) on `threads` threads, `grain` consecutive ones at a time. Which thread takes which
// item is not fixed, so an item's result must depend on nothing but the item. One thread opens no parallel region.
template <class Work>
void divide(index_t count, index_t grain, int threads, Work work) {
  if (threads <= 1 || count <= grain) {
    for (index_t i = 0; i < count; ++i) work(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, grain) num_threads(threads)
  for (index_t i = 0; i < count; ++i) work(i);
}

#if defined(__x86_64__)

#include <immintrin.h>

#define QT_TARGET "avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,prfchw"
#define QT_KERNEL __attribute__((target(QT_TARGET)))
#define QT_INLINE static inline __attribute__((always_inline, target(QT_TARGET)))

inline constexpr index_t kLanes = 16;  // fp32 in a vector register

// Selects the lanes of a vector beginning at `done` that lie below `width`.
QT_INLINE __mmask16 lanes_left(index_t done, index_t width) {
  const index_t left = width - done;
  return left >= kLanes ? __mmask16(0xFFFF) : __mmask16((1u << left) - 1);
}

QT_INLINE __m512 widen(__m256i half) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

QT_INLINE __m512 load(const bf16* from) { return widen(_mm256_loadu_si256((const __m256i*)from)); }

QT_INLINE __m512 load(const bf16* from, __mmask16 lanes) { return widen(_mm256_maskz_loadu_epi16(lanes, from)); }

// Rounds to nearest even; denormals become zero, as the instruction defines it.
QT_INLINE __m256i narrow(__m512 value) { return (__m256i)_mm512_cvtneps_pbh(value); }

QT_INLINE void store(bf16* to, __m512 value, __mmask16 lanes) { _mm256_mask_storeu_epi16(to, lanes, narrow(value)); }

// e^x within 2 units in the last place of fp32: x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial of
// degree 7 (remainder below 2^-27), scaled by 2^n. Arguments are clamped to [-88, 88]; NaN stays NaN.
QT_INLINE __m512 exponential(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-88.0f), x));  // a NaN is the second operand
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(1.0f / 5040);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 720));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(p, n);
}

#endif
