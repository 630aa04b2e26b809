// Units of integer products on AMX: division of a call, and scaling of the integer sums of some rows by blocks of 16 columns.
// Shared by many rows (linear_matrix_integer.cpp) and few rows (linear_matrix_few.hpp).
#pragma once

#include "linear_integer_piece.hpp"
#include "linear_matrix.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(QT_AMX)
constexpr index_t kPiece = 256;             // k at a time, whole groups
constexpr index_t kWholePiece = 2048, kWholeStreamPiece = 512;  // all of k is one group; with only one unit
constexpr index_t kHighestPanel = 576;
static_assert(kPiece % kXGroup == 0 && kHighestPanel % kLargeUnitRows == 0);

// Buffers of a thread.
struct alignas(64) Buffers {
  float sums[kHighestPanel * kTileColumns];                // of a slice
  float total[kTreeHeight][kHighestPanel * kTileColumns];  // of the slices so far; several for leaves only
  std::int32_t integers[2][kUnitRows * kTileColumns];      // a unit's sums of a group, for each plane of each row
  char bytes[kPiece * kTileColumns];                // expanded weights
  char last[kAmxRows * kLineBytes];                 // the last k, zero-padded
};

// Scales of a group in 16 columns, and its index among the groups of Unit::x_scales.
struct GroupScales {
  const char* head;
  index_t head_group, column, g;
};

// Scales the integers of a group, of `rows` rows and 16 columns, and adds them to the results. integers: planes, `stride`
// integers apart. The operations of an element are those of add_group_as.
template <int kPlanes, Scales kScales>
void add_rows_as(const std::int32_t* integers, index_t stride, index_t rows, const Unit& unit, const GroupScales& of) {
  f32v scale, shift;
  scales_of(kScales, of.head, of.head_group, of.column, unit.over_middle, scale, shift);
  const char *x_scale = (const char*)(unit.x_scales + of.g), *x_offset = (const char*)(unit.x_offsets + of.g);
  const char* x_share = (const char*)(unit.x_shares + of.g);
  const index_t x_stride = unit.x_stride;
  float* out = unit.sums + of.column;
  for (index_t r = 0; r < rows; ++r) {
    i32v sum = load_bits(integers);
    if constexpr (kPlanes == 2) sum = (sum << 8) + load_bits(integers + stride);
    sum += spread_word(x_offset);
    f32v added = fma(to_float(sum), scale * all(*(const float*)x_scale), load(out));
    if constexpr (shifts(kScales)) added = fma(shift, all(*(const float*)x_share), added);
    store(out, added);
    integers += kPlanes * stride, out += kTileColumns;
    x_scale += x_stride, x_offset += x_stride, x_share += x_stride;
  }
}

using AddRows = void (*)(const std::int32_t* integers, index_t stride, index_t rows, const Unit&, const GroupScales&);

template <int kPlanes>
AddRows adder_of(Scales scales) {
  switch (scales) {
    case Scales::column: return add_rows_as<kPlanes, Scales::column>;
    case Scales::half: return add_rows_as<kPlanes, Scales::half>;
    case Scales::half_zero: return add_rows_as<kPlanes, Scales::half_zero>;
    case Scales::half_minimum: return add_rows_as<kPlanes, Scales::half_minimum>;
    case Scales::bytes: return add_rows_as<kPlanes, Scales::bytes>;
    case Scales::bytes_minimum: return add_rows_as<kPlanes, Scales::bytes_minimum>;
    case Scales::nibbles: return add_rows_as<kPlanes, Scales::nibbles>;
    case Scales::exponent: return add_rows_as<kPlanes, Scales::exponent>;
    case Scales::eighth: return add_rows_as<kPlanes, Scales::eighth>;
    case Scales::single: return add_rows_as<kPlanes, Scales::single>;
    case Scales::single_zero: return add_rows_as<kPlanes, Scales::single_zero>;
    default: return add_rows_as<kPlanes, Scales::single_shift>;
  }
}

// Division of a call.
struct Plan : Cutting {
  index_t planes;             // of a row of x: 2 in 16 bits. Each is a row of the product
  index_t plane_stride;       // bytes from a plane to the next
  index_t in_group, in_step;  // k; a piece if `whole`
  index_t unit_rows;          // of x
  AddRows add_rows;

  explicit Plan(const LinearCall& call) {
    const bool eight = are_eight_bits(call.inputs);
    grouped = call.weight->group != kWholeDepth, whole = eight && !grouped;
    planes = planes_of(eight), plane_stride = call.prepared_stride / planes;
    add_rows = eight ? adder_of<1>(call.weight->scales) : adder_of<2>(call.weight->scales);
    piece = !whole ? kPiece : call.rows <= kUnitRows ? kWholeStreamPiece : kWholePiece;
    in_group = whole ? piece : grouped ? call.weight->group : call.x_group;
    in_step = in_group < kAmxFours ? in_group : kAmxFours;
    unit_rows = whole ? kLargeUnitRows : kUnitRows / planes;
  }
};

// Fields of a unit that all rows and pieces of an item share.
Unit unit_of(const LinearCall& call, const LinearItem& item, const Plan& plan) {
  const Weight& weight = *call.weight;
  Unit unit{};
  unit.scales = weight.scales;
  unit.column_scales = weight.memory + item.tile * weight.tile_bytes;
  unit.x_stride = call.prepared_stride;
  unit.over_middle = 1.0f / float(middle_of(weight.codes));
  unit.whole = plan.whole;
  unit.head_stride = weight.block_bytes, unit.in_block = plan.grouped ? weight.block / weight.group : 1;
  return unit;
}

// Finishes the single group of `rows` rows: converts integers to results. A slice of it keeps the integers, plus the offset if
// it is the first.
void end_single_group(const index_t* columns, index_t blocks, index_t rows, const Unit& unit) {
  for (index_t block = 0; block < blocks; ++block) {
    const index_t column = columns[block];
    const f32v scale = load((const float*)unit.column_scales + column);
    for (index_t r = 0; r < rows; ++r) {
      float* const out = unit.sums + r * kTileColumns + column;
      i32v sum = load_bits(out);
      if (unit.first) sum += all(*row_of(unit.x_offsets, r, unit.x_stride));
      store(out, unit.last ? to_float(sum) * all(*row_of(unit.x_scales, r, unit.x_stride)) * scale : as_float(sum));
    }
  }
}

// Adds the sums of a slice to the total, unless it is the first. Scales them if it is the last.
void end_slice_rows(const index_t* columns, index_t blocks, index_t rows, const Unit& unit) {
  if (!unit.last && !unit.total) return;
  for (index_t block = 0; block < blocks; ++block) {
    const index_t column = columns[block];
    const f32v scale = unit.last ? load((const float*)unit.column_scales + column) : all(1.0f);
    for (index_t r = 0; r < rows; ++r) {
      const index_t at = r * kTileColumns + column;
      const f32v sums = load(unit.sums + at);
      store((unit.total ? unit.total : unit.sums) + at, (unit.total ? load(unit.total + at) + sums : sums) * scale);
    }
  }
}
#endif

}  // namespace
}  // namespace qt::QT_ISA
