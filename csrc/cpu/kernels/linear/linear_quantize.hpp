// Quantization of activations for linear_integer.cpp.
//
// A quantized row is its integers, in the read order of the instruction set's kernel. For each group of k follow a scale (fp32)
// and an offset (int32). The offset is minus the sum of the group's integers times the stored integer that means zero: it
// corrects a sum over unsigned weights. 16 bits: x = q * scale with |q| <= 32639 = 127 * 256 + 127, rounded to nearest even, one
// scale per group. 8 bits: |q| <= 127, one scale per row or per group. Integers and scales are the same on every processor. A
// group without magnitudes above 1e-30 becomes zero. A group with an infinity or a NaN gets the scale NaN, so all results of this
// row, and of no other, are NaN.
//
// A thread owns a row. Bytes: the row twice (the second time from the L1 cache), its integers once. Limiter: cache bandwidth.
// Independent of batch size.
#pragma once

#include "amx.hpp"
#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

// k with a common scale of 16-bit x, if the weight has no groups: the maximum with an exact 32-bit sum.
inline constexpr index_t kXGroup = 256;
inline constexpr index_t kXBlock = 32;  // k quantized at a time; groups are whole blocks
inline constexpr index_t kMost8 = 127, kMost16 = 32639;
inline constexpr float kLeast = 1e-30f;
static_assert(255 * kMost16 * kXGroup <= 0x7FFFFFFF && kXGroup % kXBlock == 0);

// Bytes from one k to the next, and number of planes. On AMX, 16-bit x is a plane of high bytes and a plane of low bytes, at the
// starts of the two halves of a row. The planes of all rows thus have one stride, and a register holds both planes of eight rows.
#if defined(QT_AMX)
constexpr index_t integer_bytes(bool) { return 1; }
constexpr index_t planes_of(bool eight) { return eight ? 1 : 2; }
#else
constexpr index_t integer_bytes(bool eight) { return kDotsBytes && eight ? 1 : 2; }
constexpr index_t planes_of(bool) { return 1; }
#endif

// Layout of a row, in bytes. Per group of weights (of x, if weights have none): the scale of x, and the offset, its negated
// integer sum times the weights' middle. Formats that shift add a share, scale * -offset. With groups of 16, two groups share a
// scale, which is stored twice.
struct QuantizedX {
  index_t plane;  // whole cache lines, zero-padded
  index_t apart;  // bytes from a plane to the next
  index_t in_group, groups, scales_at, offsets_at, shares_at, row_bytes;
};

QT_INLINE index_t in_lines(index_t bytes) { return (bytes + 63) / 64 * 64; }

QT_INLINE QuantizedX quantized_x(const Weight& weight, index_t x_group, bool eight) {
  QuantizedX x;
  x.in_group = weight.group != kWholeDepth ? weight.group : x_group;
  x.groups = (weight.depth + x.in_group - 1) / x.in_group;
  x.plane = in_lines((weight.depth + kXBlock - 1) / kXBlock * kXBlock * integer_bytes(eight));
  x.scales_at = x.plane;
  const index_t in_shares = shifts(weight.scales) ? x.groups * 4 : 0;
  if (planes_of(eight) == 2) {  // scales and shares follow the first plane, offsets the second
    x.shares_at = x.scales_at + x.groups * 4;
    x.apart = (in_lines(x.shares_at + in_shares) + 64) | 64;  // an odd number of lines
    x.offsets_at = x.apart + x.plane;
    x.row_bytes = 2 * x.apart;
    return x;
  }
  x.apart = x.plane;
  x.offsets_at = x.scales_at + x.groups * 4;
  x.shares_at = x.offsets_at + x.groups * 4;
  const index_t end = x.shares_at + in_shares;
  x.row_bytes = in_lines(end) + 64;  // otherwise rows of a power-of-two size share cache sets
  return x;
}

QT_INLINE QuantizedX quantized_x(const LinearCall& call) {
  return quantized_x(*call.weight, call.x_group, are_eight_bits(call.inputs));
}

// The largest magnitude of each lane over 32 numbers. `largest_of` returns the largest over all lanes as fp32 bits; for NaN they
// are above those of infinity.
#if defined(__AVX512BW__)
QT_INLINE i32v larger(i32v most, const float* x) {
  const i32v magnitude = all(0x7FFFFFFF);
  most = (i32v)_mm512_max_epi32((__m512i)most, (__m512i)(load_bits(x) & magnitude));
  return (i32v)_mm512_max_epi32((__m512i)most, (__m512i)(load_bits(x + kLanes) & magnitude));
}
template <class Half>
QT_INLINE i32v larger(i32v most, const Half* x) {
  return (i32v)_mm512_max_epu16((__m512i)most, (__m512i)(load_bits(x) & all(0x7FFF7FFF)));
}
QT_INLINE std::int32_t largest_of(i32v most, const float*) { return _mm512_reduce_max_epi32((__m512i)most); }
template <class Half>
QT_INLINE std::int32_t largest_of(i32v most, const Half*) {
  const i32v low = most & 0xFFFF, high = (i32v)((u32v)most >> 16);
  const std::int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)low, (__m512i)high));
  Half lanes[kLanes] = {{std::uint16_t(bits)}};
  return as_bits(load(lanes))[0];
}
#else
template <class Element>
QT_INLINE i32v larger(i32v most, const Element* x) {
  for (index_t k = 0; k < kXBlock; k += kLanes) {
    const i32v bits = as_bits(load(x + k)) & 0x7FFFFFFF;
    most = bits > most ? bits : most;
  }
  return most;
}
template <class Element>
QT_INLINE std::int32_t largest_of(i32v most, const Element*) {
  std::int32_t largest = 0;
  for (int i = 0; i < kLanes; ++i) largest = most[i] > largest ? most[i] : largest;
  return largest;
}
#endif

// Address of a block; if fewer than kXBlock numbers are left, of a zero-padded copy.
template <class Element>
QT_INLINE const Element* block_at(const Element* x, index_t left, Element (&copy)[kXBlock]) {
  if (left >= kXBlock) return x;
  std::memset(copy, 0, sizeof copy);
  std::memcpy(copy, x, left * sizeof(Element));
  return copy;
}

template <class Element>
QT_INLINE std::int32_t largest_bits(const Element* x, index_t count) {
  i32v most = i32v{};
  Element copy[kXBlock];
  for (index_t k = 0; k < count; k += kXBlock) most = larger(most, block_at(x + k, count - k, copy));
  return largest_of(most, x);
}

// Quantizes a block of x with factor `inverse` to `out`, in kernel order. Adds the integers to the lanes of `sums`, by half
// blocks, which sums_of separates.
#if defined(__AVX512VNNI__)
struct HalfBlocks {  // so that the pack from 32 to 16 bits, which works by 128-bit lanes, keeps the order of k
  f32v low, high;
};

QT_INLINE HalfBlocks half_blocks(const bf16* x) {
  const __m512i numbers = _mm512_loadu_si512(x), zeros = _mm512_setzero_si512();
  return {(f32v)_mm512_unpacklo_epi16(zeros, numbers), (f32v)_mm512_unpackhi_epi16(zeros, numbers)};
}
template <class Element>
QT_INLINE HalfBlocks half_blocks(const Element* x) {
  const f32v a = load(x), b = load(x + kLanes);
  return {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xDD)};
}

template <class Element>
QT_INLINE void quantize_block(const Element* x, f32v inverse, bool eight, char* out, [[maybe_unused]] index_t apart, i32v (&sums)[2]) {
  const HalfBlocks block = half_blocks(x);
  const __m512i low = _mm512_cvtps_epi32(block.low * inverse), high = _mm512_cvtps_epi32(block.high * inverse);
  const __m512i q = _mm512_packs_epi32(low, high);
  sums[0] = (i32v)_mm512_dpwssd_epi32((__m512i)sums[0], q, _mm512_set1_epi16(1));  // lanes in the order of k
  if (eight) {
    _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi16_epi8(q));
    return;
  }
  // The low bytes are those of q; the high bytes compensate their sign.
  const __m512i rounded = _mm512_add_epi16(q, _mm512_set1_epi16(128));
#if defined(QT_AMX)
  _mm256_storeu_si256((__m256i*)out, _mm512_cvtepi16_epi8(_mm512_srai_epi16(rounded, 8)));
  _mm256_storeu_si256((__m256i*)(out + apart), _mm512_cvtepi16_epi8(q));
#else
  // Alternates four high and four low bytes.
  const __m512i halves = _mm512_ternarylogic_epi32(_mm512_set1_epi16(short(0xFF00)), rounded, q, 0xCA);
  const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(1, 3, 5, 7, 0, 2, 4, 6, 9, 11, 13, 15, 8, 10, 12, 14));
  _mm512_storeu_si512(out, _mm512_shuffle_epi8(halves, order));
#endif
}
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(__AVXVNNI__)
// Groups of four for multiply_pairs, in the order k, k + 2, k + 1, k + 3, for both precisions.
template <class Element>
QT_INLINE void quantize_block(const Element* x, f32v inverse, bool, char* out, index_t, i32v (&sums)[2]) {
  const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
  for (index_t k = 0; k < kXBlock; k += 2 * kLanes) {
    const __m256i low = _mm256_cvtps_epi32(load(x + k) * inverse), high = _mm256_cvtps_epi32(load(x + k + kLanes) * inverse);
    const __m256i q = _mm256_permute4x64_epi64(_mm256_packs_epi32(low, high), 0xD8);  // packs works by 128-bit lanes
    i32v& of_half = sums[k * 2 / kXBlock];
    of_half = multiply_pairs(of_half, (i32v)q, all(0x00010001));
    _mm256_storeu_si256((__m256i*)(out + 2 * k), _mm256_shuffle_epi8(q, order));
  }
}
#else
typedef std::int32_t i32x4 __attribute__((vector_size(16)));
typedef std::int8_t i8x16 __attribute__((vector_size(16)));

// Four integers for dot_bytes: one byte each, or four high bytes, then four low bytes.
QT_INLINE void store_bytes(i32x4 q, bool eight, char* out) {
  // The low bytes are those of q; the high bytes compensate their sign.
  const i8x16 halves = (i8x16)((q & 0xFF) | ((q + 128) & 0xFF00));
#if defined(__clang__)
  const i8x16 ordered = __builtin_shufflevector(halves, halves, 0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13);
#else
  const i8x16 ordered = __builtin_shuffle(halves, i8x16{0, 4, 8, 12, 1, 5, 9, 13, 0, 4, 8, 12, 1, 5, 9, 13});
#endif
  if (eight)
    std::memcpy(out, &ordered, 4);
  else
    std::memcpy(out, (const char*)&ordered + 4, 8);
}

// Four integers for multiply_pairs: k, k + 2, k + 1, k + 3.
QT_INLINE void store_pairs(i32x4 q, char* out) {
  const std::int16_t integers[] = {std::int16_t(q[0]), std::int16_t(q[2]), std::int16_t(q[1]), std::int16_t(q[3])};
  std::memcpy(out, integers, sizeof integers);
}

template <class Element>
QT_INLINE void quantize_block(const Element* x, f32v inverse, bool eight, char* out, index_t, i32v (&sums)[2]) {
  for (index_t k = 0; k < kXBlock; k += kLanes) {
    const i32v q = to_int(round(load(x + k) * inverse));
    sums[k * 2 / kXBlock] += q;
    for (int i = 0; i < kLanes; i += 4) {
      i32x4 four;
      std::memcpy(&four, (const char*)&q + i * 4, sizeof four);
      if constexpr (kDotsBytes)
        store_bytes(four, eight, out + (k + i) * integer_bytes(eight));
      else
        store_pairs(four, out + (k + i) * 2);
    }
  }
}
#endif

// Sums of the first and second halves of blocks; without `halves`, the whole sum in the first.
struct HalfSums {
  std::int32_t of[2];
};
QT_INLINE HalfSums sums_of(const i32v (&sums)[2], bool halves) {
#if defined(__AVX512F__)
  if (!halves) return {{_mm512_reduce_add_epi32((__m512i)(sums[0] + sums[1])), 0}};
#if defined(__AVX512VNNI__)
  return {{_mm512_mask_reduce_add_epi32(0x00FF, (__m512i)sums[0]), _mm512_mask_reduce_add_epi32(0xFF00, (__m512i)sums[0])}};
#else
  return {{_mm512_reduce_add_epi32((__m512i)sums[0]), _mm512_reduce_add_epi32((__m512i)sums[1])}};
#endif
#else
  HalfSums total{};
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < kLanes; ++i) total.of[halves ? half : 0] += sums[half][i];
  return total;
#endif
}

// Quantizes numbers with the largest magnitude `largest` to at most `most`. Returns the sums of the integers.
template <class Element>
QT_INLINE HalfSums quantize_group(const Element* x, index_t count, std::int32_t largest, bool eight, char* out, index_t apart,
                                  float* scale, bool halves) {
  const float most = float(eight ? kMost8 : kMost16);
  float magnitude;
  std::memcpy(&magnitude, &largest, sizeof magnitude);
  if (largest >= 0x7F800000 || magnitude < kLeast) {
    *scale = largest >= 0x7F800000 ? magnitude - magnitude : 0.0f;  // NaN
    for (index_t p = 0; p < planes_of(eight); ++p)
      std::memset(out + p * apart, 0, (count + kXBlock - 1) / kXBlock * kXBlock * integer_bytes(eight));
    return {};
  }
  *scale = magnitude / most;
  const f32v inverse = all(most / magnitude);
  i32v sums[2] = {};
  Element copy[kXBlock];
  for (index_t k = 0; k < count; k += kXBlock)
    quantize_block(block_at(x + k, count - k, copy), inverse, eight, out + k * integer_bytes(eight), apart, sums);
  return sums_of(sums, halves);
}

template <class Element>
void quantize_row(const LinearCall& call, const QuantizedX& layout, const Element* x, char* row) {
  const index_t depth = call.weight->depth, group = call.x_group;
  const bool eight = are_eight_bits(call.inputs), by_row = call.inputs == Inputs::eight_bits;
  const std::int32_t middle = middle_of(call.weight->codes);
  const bool halves = layout.in_group < group, shares = shifts(call.weight->scales);
  float *scale = (float*)(row + layout.scales_at), *share = (float*)(row + layout.shares_at);
  std::int32_t* offset = (std::int32_t*)(row + layout.offsets_at);
  std::int32_t largest = by_row ? largest_bits(x, depth) : 0;
  for (index_t at = 0; at < depth; at += group) {
    const index_t count = depth - at < group ? depth - at : group;
    if (!by_row) largest = largest_bits(x + at, count);
    char* const integers = row + at * integer_bytes(eight);
    const HalfSums sums = quantize_group(x + at, count, largest, eight, integers, layout.apart, scale, halves);
    const float first = *scale;
    for (int half = 0; half < 1 + (halves && count > layout.in_group); ++half) {
      *offset = -middle * sums.of[half];
      if (shares) *share++ = first * -float(*offset);
      *scale++ = first, ++offset;
    }
  }
#if defined(QT_AMX)  // AMX multiplies whole lines
  const index_t written = (depth + kXBlock - 1) / kXBlock * kXBlock;
  for (index_t p = 0; p < planes_of(eight); ++p)
    std::memset(row + p * layout.apart + written, 0, std::size_t(layout.plane - written));
#endif
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
