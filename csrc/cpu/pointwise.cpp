// The operations between multiplications, in bf16 with fp32 arithmetic: RMS norm, gate of a SwiGLU, rotary positions.
//
// A thread owns one token (a head of one, for norms over heads). Each input is read once or, out of the first-level cache,
// twice; each output written once: 4 to 6 bytes and some 10 FLOPs an element. Limiter: cache or memory bandwidth, for the
// gate the exponential. Only the norm reduces: 16 fp32 sums over dimensions i mod 16, ascending, then pairwise across
// the register. Nothing depends on how many tokens there are.
#include "host.hpp"

#if defined(__x86_64__)

#include <cmath>
#include <cstring>

namespace {

constexpr index_t kGrain = 8;  // tokens a thread takes at a time

QT_KERNEL void norm(const bf16* x, const bf16* weight, index_t width, float eps, bf16* y) {
  __m512 squares = _mm512_setzero_ps();
  for (index_t i = 0; i < width; i += kLanes) {
    const __m512 value = load(x + i, lanes_left(i, width));
    squares = _mm512_fmadd_ps(value, value, squares);
  }
  const float mean = _mm512_reduce_add_ps(squares) / float(width);
  const __m512 scale = _mm512_set1_ps(1.0f / std::sqrt(mean + eps));
  for (index_t i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = lanes_left(i, width);
    const __m512 rounded = widen(narrow(_mm512_mul_ps(load(x + i, lanes), scale)));  // where the reference rounds
    store(y + i, _mm512_mul_ps(rounded, load(weight + i, lanes)), lanes);
  }
}

QT_KERNEL void gate(const bf16* gate_up, index_t width, bf16* y) {
  const __m512 one = _mm512_set1_ps(1.0f);
  for (index_t i = 0; i < width; i += kLanes) {
    const __mmask16 lanes = lanes_left(i, width);
    const __m512 x = load(gate_up + i, lanes), up = load(gate_up + width + i, lanes);
    const __m512 denominator = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
    const __m512 silu = widen(narrow(_mm512_div_ps(x, denominator)));  // where the reference rounds
    store(y + i, _mm512_mul_ps(silu, up), lanes);
  }
}

// One head: pairs (i, i + half) turned by their angle, what lies past the rotary dimensions copied.
QT_KERNEL void rotate(const bf16* x, const bf16* cosines, const bf16* sines, index_t rotary, index_t width, bf16* y) {
  const index_t half = rotary / 2;
  for (index_t i = 0; i < half; i += kLanes) {
    const __mmask16 lanes = lanes_left(i, half);
    const __m512 first = load(x + i, lanes), second = load(x + half + i, lanes);
    const __m512 first_turned = _mm512_mul_ps(second, load(sines + i, lanes));
    const __m512 second_turned = _mm512_mul_ps(first, load(sines + half + i, lanes));
    store(y + i, _mm512_fmsub_ps(first, load(cosines + i, lanes), first_turned), lanes);
    store(y + half + i, _mm512_fmadd_ps(second, load(cosines + half + i, lanes), second_turned), lanes);
  }
  if (rotary < width) std::memcpy(y + rotary, x + rotary, (width - rotary) * sizeof(bf16));
}

}  // namespace

// x, y: [tokens][heads][width], of x tokens and heads lie at their strides, y is contiguous; weight: [width].
QT_EXPORT void qt_rms_norm(const bf16* x, index_t token_stride, index_t head_stride, index_t tokens, index_t heads,
                           index_t width, const bf16* weight, float eps, bf16* y, int threads) {
  divide(tokens, kGrain, threads, [=](index_t token) {
    for (index_t head = 0; head < heads; ++head)
      norm(x + token * token_stride + head * head_stride, weight, width, eps, y + (token * heads + head) * width);
  });
}

// gate_up: [tokens][2 * width], rows `stride` apart; y: [tokens][width].
QT_EXPORT void qt_silu_and_mul(const bf16* gate_up, index_t stride, index_t tokens, index_t width, bf16* y, int threads) {
  divide(tokens, kGrain, threads, [=](index_t token) { gate(gate_up + token * stride, width, y + token * width); });
}

// qkv: [tokens][heads + 2 * kv_heads][width], contiguous; cosines, sines: [tokens][rotary]; keys, values: rows of `width`;
// write_index: [tokens][kv_heads], the row of each key and value; queries: [tokens][heads][width].
QT_EXPORT void qt_rope_kv_write(const bf16* qkv, index_t tokens, index_t heads, index_t kv_heads, index_t width,
                                const bf16* cosines, const bf16* sines, index_t rotary, bf16* keys, bf16* values,
                                const std::int64_t* write_index, bf16* queries, int threads) {
  divide(tokens, kGrain, threads, [=](index_t token) {
    const bf16* x = qkv + token * (heads + 2 * kv_heads) * width;
    const bf16 *c = cosines + token * rotary, *s = sines + token * rotary;
    for (index_t head = 0; head < heads; ++head)
      rotate(x + head * width, c, s, rotary, width, queries + (token * heads + head) * width);
    for (index_t head = 0; head < kv_heads; ++head) {
      const index_t row = write_index[token * kv_heads + head] * width;
      rotate(x + (heads + head) * width, c, s, rotary, width, keys + row);
      std::memcpy(values + row, x + (heads + kv_heads + head) * width, width * sizeof(bf16));
    }
  });
}

#endif
