// Row access for packing: maps rows to lanes of a tile, reads them and transposes them.
#pragma once

#include "linear.hpp"
#include "linear_scales.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kVectors = kTileColumns / kLanes;

// The column of a lane of a tile, or -1 for padding.
index_t column_of(const Weight& weight, index_t tile, index_t lane) {
  if (!weight.paired) {
    const index_t column = tile * kTileColumns + lane;
    return column < weight.columns ? column : -1;
  }
  const index_t half = weight.columns / 2, column = tile * kPairedColumns + lane % kPairedColumns;
  return column >= half ? -1 : lane < kPairedColumns ? column : half + column;
}

// The source rows of the lanes of a tile; null for lanes that are not filled.
struct Rows {
  const char* of[kTileColumns];
  bool any[kVectors], all[kVectors];
};

Rows rows_of(const PackCall& call, index_t tile) {
  const index_t size = call.source_dtype == Dtype::fp32 ? 4 : call.source_dtype == Dtype::int8 ? 1 : 2;
  Rows rows;
  for (index_t v = 0; v < kVectors; ++v) {
    rows.any[v] = false, rows.all[v] = true;
    for (index_t i = 0; i < kLanes; ++i) {
      const index_t column = column_of(*call.weight, tile, v * kLanes + i) - call.first;
      const bool filled = column >= 0 && column < call.count;
      rows.of[v * kLanes + i] = filled ? (const char*)call.source + column * call.source_stride * size : nullptr;
      rows.any[v] |= filled, rows.all[v] &= filled;
    }
  }
  return rows;
}

// Writes a vector of 32-bit words to the filled lanes of [v * kLanes, ...) in a row of 64.
QT_INLINE void put(char* row, const Rows& rows, index_t v, i32v words) {
  char* to = row + v * kLanes * 4;
  if (rows.all[v]) {
    std::memcpy(to, &words, sizeof words);
    return;
  }
  for (int i = 0; i < kLanes; ++i)
    if (rows.of[v * kLanes + i]) {
      const std::int32_t word = words[i];
      std::memcpy(to + i * 4, &word, 4);
    }
}

QT_INLINE void put(char* row, const Rows& rows, index_t v, f32v values, fp16*) {
  fp16* to = (fp16*)row + v * kLanes;
  if (rows.all[v]) return store(to, values);
  fp16 lanes[kLanes];
  store(lanes, values);
  for (int i = 0; i < kLanes; ++i)
    if (rows.of[v * kLanes + i]) to[i] = lanes[i];
}

// The same for the low bytes of `values` and a row of 64 bytes.
QT_INLINE void put_bytes(char* row, const Rows& rows, index_t v, i32v values) {
  for (int i = 0; i < kLanes; ++i)
    if (rows.of[v * kLanes + i]) row[v * kLanes + i] = char(values[i]);
}

// Loads kLanes words at offset `byte` of each row of vector v, transposed: one vector for each word. Zeros past the end of a row
// and for null rows.
QT_INLINE void load_words(const Rows& rows, index_t v, index_t byte, index_t bytes_left, i32v (&words)[kLanes]) {
  const char* const* const of = rows.of + v * kLanes;
  if (rows.all[v] && bytes_left >= index_t(sizeof(i32v))) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) words[i] = load_bits(of[i] + byte);
  } else {
    const index_t bytes = bytes_left < index_t(sizeof(i32v)) ? bytes_left : sizeof(i32v);
    for (int i = 0; i < kLanes; ++i) {
      words[i] = i32v{};
      if (of[i] && bytes > 0) std::memcpy(&words[i], of[i] + byte, bytes);
    }
  }
  transpose(words);
}

template <class Element>
QT_INLINE f32v load_from(const char* row, index_t k, index_t count) {
  return load((const Element*)row + k, count);
}

// k [begin, begin + depth) of the rows as fp32 [depth rounded up to kLanes][64]; zeros for missing values.
template <class Element>
void load_block(const Rows& rows, index_t begin, index_t depth, float* block) {
  for (index_t k = 0; k < depth; k += kLanes)
    for (index_t v = 0; v < kVectors; ++v) {
      i32v words[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const char* row = rows.of[v * kLanes + i];
        words[i] = row ? as_bits(load_from<Element>(row, begin + k, depth - k)) : i32v{};
      }
      transpose(words);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(block + (k + i) * kTileColumns + v * kLanes, as_float(words[i]));
    }
}

using LoadBlock = void (*)(const Rows&, index_t, index_t, float*);
LoadBlock loader_of(Dtype source) {
  return source == Dtype::bf16 ? load_block<bf16> : source == Dtype::fp16 ? load_block<fp16> : load_block<float>;
}

inline constexpr index_t kBlock = 128;  // k at a time; a whole number of groups

}  // namespace
}  // namespace qt::QT_ISA
