// Pieces of k of a tile of integer weights: addresses and sums of slices. Shared by the vector kernels (linear_integer.cpp) and
// AMX (linear_matrix_integer.cpp).
#pragma once

#include <bit>

#include "linear_integer_unit.hpp"

namespace qt::QT_ISA {
namespace {

// Division of k.
struct Cutting {
  bool grouped;  // weights have groups
  bool whole;    // all of k is one group: sums stay integers
  index_t piece;  // k at a time
};

// Some k of a tile, from the first block's head; without groups, from the first integer.
struct Piece {
  index_t depth;
  const char* memory;
  index_t bytes;
};

// Whole groups, blocks or steps of `each` k, a power of two: those before k, and those that hold k numbers. Shifts replace
// divisions, which take measurable time in items of few rows.
static_assert(std::has_single_bit(std::size_t(kXGroup)));
QT_INLINE index_t parts_before(index_t k, index_t each) { return k >> std::countr_zero(std::size_t(each)); }
QT_INLINE index_t parts_of(index_t k, index_t each) { return parts_before(k + each - 1, each); }

// True if k is an inner slice boundary, neither the first nor the last k of an item.
QT_INLINE bool is_between_slices(const Weight& weight, index_t k) { return weight.slices > 1 && k % weight.slice_depth == 0; }

// The item's next piece from `begin` on. It ends at the slice boundary, except if all of k is one group.
Piece piece_at(const Weight& weight, const Cutting& cutting, const LinearItem& item, index_t begin) {
  index_t left = item.k_end - begin;
  if (weight.slices > 1 && !cutting.whole) {
    const index_t in_slice = weight.slice_depth - begin % weight.slice_depth;
    left = left < in_slice ? left : in_slice;
  }
  const index_t depth = left < cutting.piece ? left : cutting.piece;
  const char* memory = weight.memory + item.tile * weight.tile_bytes + kTileColumns * 4;
  if (!cutting.grouped) return {depth, memory + begin * kTileColumns, depth * kTileColumns};
  const index_t before = parts_before(begin, weight.block);
  return {depth, memory + before * weight.block_bytes, parts_of(depth, weight.block) * weight.block_bytes};
}

void clear(float* sums, const LinearItem& item) {
  for (index_t r = 0; r < item.rows; ++r)
    for (index_t place = 0; place < (item.to - item.from) * item.spans; place += kLanes)
      store(sums + r * kTileColumns + column_of(item, place), f32v{});
}

// Totals of outputs with complete slices, scaled by column; if all of k is one group, also by row.
void add_integer_slices(const LinearCall& call, const LinearItem& item, float* total) {
  const bool whole = are_eight_bits(call.inputs) && call.weight->group == kWholeDepth;
  const float* const first = partials_of(call, item, 0);
  const char* x_scales = (const char*)call.prepared + item.row * call.prepared_stride + quantized_x(call).scales_at;
  for (index_t r = 0; r < item.rows; ++r, x_scales += call.prepared_stride)
    for (index_t place = 0; place < (item.to - item.from) * item.spans; place += kLanes) {
      const index_t column = column_of(item, place), at = r * kTileColumns + column;
      const auto of_leaf = [&](index_t leaf) {
        const Weight& weight = call.weight[leaf];
        const f32v scale = load((const float*)(weight.memory + item.tile * weight.tile_bytes) + column);
        if (!whole) return total_of_slices<f32v>(call, first + at, leaf) * scale;
        const f32v x_scale = all(*(const float*)(x_scales + leaf * call.prepared_leaf));
        return to_float(total_of_slices<i32v>(call, first + at, leaf)) * x_scale * scale;
      };
      store(total + at, total_of_leaves(call.weight->leaves, of_leaf));
    }
}

}  // namespace
}  // namespace qt::QT_ISA
