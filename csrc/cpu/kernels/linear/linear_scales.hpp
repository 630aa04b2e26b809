// Decodes the scales, zero points and minima of a group from its block's head (Scales).
#pragma once

#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kHalves = kTileColumns * 2;  // bytes of one fp16 for each column

QT_INLINE f32v floats_of(const char* unsigned_bytes) { return to_float(load_bytes(unsigned_bytes)); }

// Loads signed bytes as 32-bit integers, one per lane.
QT_INLINE i32v load_signed_bytes(const char* from) {
#if defined(__AVX512F__)
  return (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  i32v values;
  for (int i = 0; i < kLanes; ++i) values[i] = (signed char)from[i];
  return values;
#endif
}

QT_INLINE f32v signed_floats_of(const char* bytes) { return to_float(load_signed_bytes(bytes)); }

// Powers of two from their exponents; 2^-127 for 0.
QT_INLINE f32v powers_of(const char* exponents) {
  const i32v bits = load_bytes(exponents);
  return as_float(bits << 23 | ((bits == 0) & 0x00400000));
}

// fp8 e4m3 without NaN: the multiplication changes the exponent bias and normalizes denormals.
QT_INLINE f32v eighths_of(i32v bits) {
  const f32v magnitude = as_float((bits & 0x7F) << 20) * all(1.329227995784916e36f);  // 2^120
  return as_float(as_bits(magnitude) | (bits & 0x80) << 24);
}

// Scale of group `group` of a block, for one vector of columns from `column` on. Formats with zero points or minima (shifts) also
// have a shift, the factor of `middle` times the sum of x. A weight is (stored - middle) scale + middle shift. halves: the head's
// fp16 numbers from the column on, stored or widened. over_middle: 1 / middle.
template <class Half>
QT_INLINE void scales_of(Scales scales, const Half* halves, const char* head, index_t group, index_t column, float over_middle, f32v& scale,
                         f32v& shift) {
  switch (scales) {
    case Scales::column: scale = all(1.0f); return;
    case Scales::half: scale = load(halves); return;
    case Scales::half_zero:
      scale = load(halves);
      shift = scale * (1.0f - floats_of(head + kHalves + column) * over_middle);
      return;
    case Scales::half_minimum:
      scale = load(halves);
      shift = fma(load(halves + kTileColumns), all(over_middle), scale);
      return;
    case Scales::bytes:
      scale = load(halves) * signed_floats_of(head + kHalves + group * kTileColumns + column);
      return;
    case Scales::bytes_minimum: {
      const char* const bytes = head + 2 * kHalves + group * 2 * kTileColumns + column;
      scale = load(halves) * floats_of(bytes);
      shift = fma(load(halves + kTileColumns) * floats_of(bytes + kTileColumns), all(-over_middle), scale);
      return;
    }
    case Scales::nibbles: {
      const i32v bytes = load_bytes(head + 2 * kHalves + group * kTileColumns + column);
      scale = load(halves) * to_float(bytes & 15);
      shift = fma(load(halves + kTileColumns) * to_float(bytes >> 4), all(-over_middle), scale);
      return;
    }
    case Scales::exponent: scale = powers_of(head + column); return;
    case Scales::eighth: scale = eighths_of(load_bytes(head + column)); return;
    case Scales::single: scale = load((const float*)head + group * kTileColumns + column); return;
    case Scales::single_zero: {
      const float* const singles = (const float*)head + column;
      scale = load(singles);
      shift = scale * (1.0f - load(singles + kTileColumns) * over_middle);
      return;
    }
    case Scales::single_shift: {
      const float* const singles = (const float*)head + group * 2 * kTileColumns + column;
      scale = load(singles), shift = load(singles + kTileColumns);
      return;
    }
  }
}

QT_INLINE void scales_of(Scales scales, const char* head, index_t group, index_t column, float over_middle, f32v& scale, f32v& shift) {
  scales_of(scales, (const fp16*)head + column, head, group, column, over_middle, scale, shift);
}

// True if all groups of a block use the same two fp16 numbers.
constexpr bool share_halves(Scales scales) {
  return scales == Scales::bytes || scales == Scales::bytes_minimum || scales == Scales::nibbles;
}

// True if a group's scale is composed of several numbers: loops that reuse it convert it to fp32 first.
constexpr bool is_composed(Scales scales) { return shifts(scales) || scales == Scales::bytes; }
constexpr Scales singles_of(Scales scales) { return shifts(scales) ? Scales::single_shift : Scales::single; }
constexpr index_t single_bytes(Scales scales) { return kTileColumns * (shifts(scales) ? 8 : 4); }  // of a group

// True if units of integer weights with these codes have these scales: a format has both, or its composed scales were converted
// to fp32. Codes of all formats may have been expanded to bytes.
constexpr bool is_paired(Codes codes, Scales scales) {
  if (scales == Scales::column) return codes == Codes::eight;
  for (const Form& form : kForms) {
    const bool is_other = form.values != Values::integer || (codes != Codes::eight && codes != form.codes);
    if (!is_other && (scales == form.scales || (is_composed(form.scales) && scales == singles_of(form.scales)))) return true;
  }
  return false;
}

// Converts the scales of `groups` groups of a block to fp32, for columns [column, column + columns).
template <Scales kScales>
void make_singles_of(const char* head, index_t groups, index_t column, index_t columns, float over_middle, char* singles) {
  for (index_t g = 0; g < groups; ++g, singles += single_bytes(kScales))
    for (index_t c = column; c < column + columns; c += kLanes) {
      f32v scale, shift;
      scales_of(kScales, head, g, c, over_middle, scale, shift);
      store((float*)singles + c, scale);
      if constexpr (shifts(kScales)) store((float*)singles + kTileColumns + c, shift);
    }
}

using MakeSingles = void (*)(const char*, index_t, index_t, index_t, float, char*);
QT_INLINE MakeSingles singles_maker_of(Scales composed) {
  switch (composed) {
    case Scales::half_zero: return make_singles_of<Scales::half_zero>;
    case Scales::half_minimum: return make_singles_of<Scales::half_minimum>;
    case Scales::bytes: return make_singles_of<Scales::bytes>;
    case Scales::bytes_minimum: return make_singles_of<Scales::bytes_minimum>;
    case Scales::single_zero: return make_singles_of<Scales::single_zero>;
    default: return make_singles_of<Scales::nibbles>;
  }
}

template <class Element>
QT_INLINE float widened(const Element* from) {
  Element lanes[kLanes] = {};
  lanes[0] = *from;
  return load(lanes)[0];
}

// Scale of one lane: a weight is (stored - zero) scale + minimum.
struct ScalesOfLane {
  float scale, zero, minimum;
};

QT_INLINE ScalesOfLane scales_of_lane(const Weight& weight, const char* head, index_t group, index_t lane) {
  const float middle = float(middle_of(weight.codes));
  const fp16* const halves = (const fp16*)head + lane;
  const unsigned char* const bytes = (const unsigned char*)head + lane;
  switch (weight.scales) {
    case Scales::half_zero: return {widened(halves), float(bytes[kHalves]), 0.0f};
    case Scales::half_minimum: return {widened(halves), 0.0f, widened(halves + kTileColumns)};
    case Scales::single_zero: return {((const float*)head)[lane], ((const float*)head)[kTileColumns + lane], 0.0f};
    case Scales::bytes_minimum: {
      const unsigned char* const of_group = bytes + 2 * kHalves + group * 2 * kTileColumns;
      return {widened(halves) * float(of_group[0]), 0.0f, -(widened(halves + kTileColumns) * float(of_group[kTileColumns]))};
    }
    case Scales::nibbles: {
      const int both = bytes[2 * kHalves + group * kTileColumns];
      return {widened(halves) * float(both & 15), 0.0f, -(widened(halves + kTileColumns) * float(both >> 4))};
    }
    default: {
      f32v scale{}, shift{};
      const index_t first = lane / kLanes * kLanes;
      scales_of(weight.scales, head, group, first, 1.0f / middle, scale, shift);
      return {scale[lane - first], middle, 0.0f};
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
