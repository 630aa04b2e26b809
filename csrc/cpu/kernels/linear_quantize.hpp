// Activations as integers: what linear_integer.cpp multiplies.
//
// A row becomes: its integers in the order that the multiplication of this instruction set reads them, then per group
// of k a scale (fp32) and the sum of the integers (int32). 16 bits: x = q * scale with |q| <= 32639 = 127 * 256 + 127,
// rounded to nearest even, one scale per group; 8 bits: |q| <= 127, one scale per row. Integers and scales are the same
// on every processor. A group without numbers above 1e-30 becomes zero; one with an infinity or a NaN gets a NaN for
// its scale, so that all of the row's results are NaN, and no other row's.
//
// A thread owns a row. Bytes: the row twice (the second time out of the first-level cache), its integers once.
#pragma once

#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kXGroup = 128;  // of k that share a scale of 16-bit x where the weight has no groups
inline constexpr float kMost16 = 32639.0f, kMost8 = 127.0f, kLeast = 1e-30f;

#if defined(__AVX512VNNI__)
constexpr index_t integer_bytes(bool eight) { return eight ? 1 : 2; }
#else
constexpr index_t integer_bytes(bool) { return 2; }
#endif

// Where things lie in a row, in bytes.
struct QuantizedX {
  index_t groups, scales_at, sums_at, row_bytes;
};

QT_INLINE index_t in_lines(index_t bytes) { return (bytes + 63) / 64 * 64; }

QT_INLINE QuantizedX quantized_x(index_t depth, index_t group, bool eight) {
  QuantizedX x;
  x.groups = (depth + group - 1) / group;
  x.scales_at = in_lines((depth + 7) / 8 * 8 * integer_bytes(eight));
  x.sums_at = x.scales_at + x.groups * 4;
  x.row_bytes = in_lines(x.sums_at + x.groups * 4) + 64;  // rows of a power of two would share cache sets
  return x;
}

QT_INLINE QuantizedX quantized_x(const LinearCall& call) {
  return quantized_x(call.weight->depth, call.x_group, call.int8_activations);
}

Preparation preparation(const Weight& weight, Dtype, bool int8_activations) {
  const index_t group = weight.group != kWholeDepth ? weight.group : int8_activations ? weight.depth : kXGroup;
  return {1, quantized_x(weight.depth, group, int8_activations).row_bytes, group};
}

// The largest magnitude as bits: above those of infinity for a NaN.
template <class Element>
QT_INLINE std::int32_t largest_bits(const Element* x, index_t count) {
  i32v most = i32v{};
  for (index_t k = 0; k < count; k += kLanes) {
    const i32v bits = as_bits(load(x + k, count - k)) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  std::int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  return largest;
}

// kLanes integers at k of a row, in the order of the multiplication. There is room for whole vectors of 8 k.
QT_INLINE void store_integers(char* row, index_t k, i32v q, bool eight) {
#if defined(__AVX512VNNI__)
  if (eight) {
    _mm_storeu_si128((__m128i*)(row + k), _mm512_cvtepi32_epi8((__m512i)q));
    return;
  }
  const i32v low = q << 24 >> 24, high = (q - low) >> 8;
  const __m128i lows = _mm512_cvtepi32_epi8((__m512i)low), highs = _mm512_cvtepi32_epi8((__m512i)high);
  _mm_storeu_si128((__m128i*)(row + k * 2), _mm_unpacklo_epi32(highs, lows));
  _mm_storeu_si128((__m128i*)(row + k * 2 + 16), _mm_unpackhi_epi32(highs, lows));
#else
  (void)eight;
  std::int16_t* out = (std::int16_t*)row + k;
  for (int i = 0; i < kLanes; i += 4) {
    out[i] = std::int16_t(q[i]), out[i + 1] = std::int16_t(q[i + 2]);
    out[i + 2] = std::int16_t(q[i + 1]), out[i + 3] = std::int16_t(q[i + 3]);
  }
#endif
}

template <class Element>
void quantize_group(const Element* x, index_t count, std::int32_t largest, float most, bool eight, char* row,
                    index_t at, float* scale, std::int32_t* sum) {
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  const bool finite = largest < 0x7F800000;
  const f32v inverse = all(finite && magnitude >= kLeast ? most / magnitude : 0.0f);
  *scale = magnitude >= kLeast || !finite ? magnitude / most : 0.0f;
  if (!finite) *scale = magnitude - magnitude;  // NaN
  i32v sums = i32v{};
  const index_t whole_steps = (count + 7) / 8 * 8;  // 4-bit weights come 8 k at a time
  for (index_t k = 0; k < whole_steps; k += kLanes) {
    const i32v q = finite && k < count ? to_int(round(load(x + k, count - k) * inverse)) : i32v{};
    store_integers(row, at + k, q, eight);
    sums += q;
  }
  std::int32_t total = 0;
  for (int i = 0; i < kLanes; ++i) total += sums[i];
  *sum = total;
}

template <class Element>
void quantize_row(const LinearCall& call, const QuantizedX& layout, const Element* x, char* row) {
  const index_t depth = call.weight->depth, group = call.x_group;
  const bool eight = call.int8_activations;
  float* scales = (float*)(row + layout.scales_at);
  std::int32_t* sums = (std::int32_t*)(row + layout.sums_at);
  std::int32_t largest = eight ? largest_bits(x, depth) : 0;
  for (index_t g = 0; g < layout.groups; ++g) {
    const index_t at = g * group, count = depth - at < group ? depth - at : group;
    if (!eight) largest = largest_bits(x + at, count);
    quantize_group(x + at, count, largest, eight ? kMost8 : kMost16, eight, row, at, scales + g, sums + g);
  }
}

void quantize_rows(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  const QuantizedX layout = quantized_x(call);
  for (index_t i = begin; i < end; ++i) {
    char* row = (char*)call.prepared + i * call.prepared_stride;
    const index_t at = i * call.x_stride;
    switch (call.dtype) {
      case Dtype::bf16: quantize_row(call, layout, (const bf16*)call.x + at, row); break;
      case Dtype::fp16: quantize_row(call, layout, (const fp16*)call.x + at, row); break;
      default: quantize_row(call, layout, (const float*)call.x + at, row); break;
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
