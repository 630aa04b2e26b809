// What a group's integers are multiplied with, from its block's head (Scales).
#pragma once

#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kHalves = kTileColumns * 2;  // bytes of an fp16 for each column

QT_INLINE f32v floats_of(const char* unsigned_bytes) { return to_float(load_bytes(unsigned_bytes)); }
QT_INLINE f32v signed_floats_of(const char* bytes) { return to_float(load_bytes(bytes) << 24 >> 24); }

// Powers of two from their exponents; 2^-127 for 0.
QT_INLINE f32v powers_of(const char* exponents) {
  const i32v bits = load_bytes(exponents);
  return as_float(bits << 23 | ((bits == 0) & 0x00400000));
}

// fp8, e4m3, without NaN: its exponent's bias changed by a multiplication, which also makes denormals normal.
QT_INLINE f32v eighths_of(i32v bits) {
  const f32v magnitude = as_float((bits & 0x7F) << 20) * all(1.329227995784916e36f);  // 2^120
  return as_float(as_bits(magnitude) | (bits & 0x80) << 24);
}

// Of group `group` of a block and one vector of columns from `column` on: the scale; and where the format has zero points or
// minima (shifts), what is multiplied with `middle` times the sum of x: a weight is (stored - middle) scale + middle shift.
QT_INLINE void scales_of(Scales scales, const char* head, index_t group, index_t column, float middle, f32v& scale, f32v& shift) {
  const fp16* const halves = (const fp16*)head + column;
  switch (scales) {
    case Scales::column: scale = all(1.0f); return;
    case Scales::half: scale = load(halves); return;
    case Scales::half_zero:
      scale = load(halves);
      shift = scale * (1.0f - floats_of(head + kHalves + column) * (1.0f / middle));
      return;
    case Scales::half_minimum:
      scale = load(halves);
      shift = fma(load(halves + kTileColumns), all(1.0f / middle), scale);
      return;
    case Scales::bytes:
      scale = load(halves) * signed_floats_of(head + kHalves + group * kTileColumns + column);
      return;
    case Scales::bytes_minimum: {
      const char* const bytes = head + 2 * kHalves + group * 2 * kTileColumns + column;
      scale = load(halves) * floats_of(bytes);
      shift = fma(load(halves + kTileColumns) * floats_of(bytes + kTileColumns), all(-1.0f / middle), scale);
      return;
    }
    case Scales::nibbles: {
      const i32v bytes = load_bytes(head + 2 * kHalves + group * kTileColumns + column);
      scale = load(halves) * to_float(bytes & 15);
      shift = fma(load(halves + kTileColumns) * to_float(bytes >> 4), all(-1.0f / middle), scale);
      return;
    }
    case Scales::exponent: scale = powers_of(head + column); return;
    case Scales::eighth: scale = eighths_of(load_bytes(head + column)); return;
    case Scales::single: scale = load((const float*)head + column); return;
  }
}

template <class Element>
QT_INLINE float widened(const Element* from) {
  Element lanes[kLanes] = {};
  lanes[0] = *from;
  return load(lanes)[0];
}

// The same of one lane: a weight is (stored - zero) scale + minimum.
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
      scales_of(weight.scales, head, group, first, middle, scale, shift);
      return {scale[lane - first], middle, 0.0f};
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
