// Layout of table weights (Values::tables): one table per column, and lines with the codes of 128 k of a column.
//
//   a line      a cache line of 16 words; word i has the codes of k = i, 16 + i, 32 + i ... 112 + i, the first in the lowest bits
//   a block     128 k: the lines of a tile's 64 columns
//
// Adjacent k are adjacent lanes, and a line is shifted seven times.
#pragma once

#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kTableSize = 16, kTableBlock = 128, kTableLine = 64, kWordsOfLine = 16;
static_assert(kOutlierDepth % kTableBlock == 0);

// The table of a tile's column, and its line of a block.
QT_INLINE const float* table_at(const char* tile, index_t column) {
  return (const float*)(tile + kTileColumns * 4) + column * kTableSize;
}
QT_INLINE const char* line_at(const Weight& weight, const char* tile, index_t block, index_t column) {
  return tile + weight.tile_head + block * weight.block_bytes + column * kTableLine;
}

// Word of a line that has k, and its shift in bits.
constexpr index_t word_of(index_t k) { return k % kWordsOfLine; }
constexpr int shift_of(index_t k) { return int(k % kTableBlock / kWordsOfLine * 4); }

}  // namespace
}  // namespace qt::QT_ISA
