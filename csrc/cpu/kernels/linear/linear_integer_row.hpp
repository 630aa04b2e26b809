// One row of x by all 64 columns of a tile, for weights in groups of 16 or 32: single-request decode of GGUF models.
//
// A group has few steps, so its fixed cost matters. The number of steps and the kind of scales are template parameters, and
// results stay in registers between groups. Reduction order: that of multiply().
//
// Micro-operations of Golden Cove on ports 0 and 5, for 32 k of 64 columns: 112 for Q4_0, 64 for Q8_0, 172 for Q5_0. Those of
// Q4_0 are 64 dot products, 16 shifts and 32 masks. Sums, scales and results take another 28. Limiter: memory, at two
// micro-operations a cycle. Memory stalls and computation overlap only partly, so both affect the time.
//
// kAsks: software prefetch in two stages, far ahead into the L2 cache (see Fetch), then into the L1 cache. It is off if the
// hardware prefetcher follows: it would be a tenth of a group's instructions.
#pragma once

#include "linear_integer_unit.hpp"

namespace qt::QT_ISA {
namespace {

using MultiplyUnit = void (*)(const Unit&, index_t rows, index_t columns);

// L1 prefetch distance.
inline constexpr index_t kSoonBytes = 1024;

template <class Dot, Codes kCodes, Scales kScales, index_t kGroup, bool kAsks>
void multiply_row(const Unit& unit, index_t, index_t) {
  constexpr int V = kTileColumns / kLanes;
  constexpr CodeStep kStep = step_of(kCodes);
  constexpr int kSteps = kGroup / kStep.k, kLines = kStep.bytes / 64;
  constexpr index_t x_step = Dot::x_bytes * fours_of(kCodes);
  static_assert(kGroup % kStep.k == 0 && kStep.bytes % 64 == 0);
  const index_t apart = unit.fetch.apart;
  const float over_middle = unit.over_middle;
  const char *x = unit.x, *block = unit.weight, *head = unit.heads;
  const char* ahead = unit.fetch.at != nullptr ? unit.fetch.at : unit.weight;  // without a next piece: the current weights
  alignas(64) float widened[2 * kTileColumns];
  i32v table{};
  if constexpr (kCodes == Codes::table) table = table_of(*unit.table);
  f32v out[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) out[v] = load(unit.sums + v * kLanes);
  for (index_t begin = 0; begin < unit.groups; begin += unit.in_block, block += unit.weight_stride, head += unit.head_stride) {
    for (index_t i = 0; kAsks && i < unit.fetch.at_head; ++i, ahead += apart) __builtin_prefetch(ahead, 0, 2);
    begin_block(unit, head, widened);
    const char* weight = block;
    const index_t groups = unit.groups - begin < unit.in_block ? unit.groups - begin : unit.in_block;
    for (index_t i = 0; i < groups; ++i, weight += kSteps * kStep.bytes, x += kSteps * x_step) {
      const index_t g = begin + i;
      const std::int32_t stored = unit.x_offsets[g];
      i32v sums[1][V][Dot::kSums];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums[0][v][0] = i32v{};
        sums[0][v][Dot::kSums - 1] = all(kDotBias ? stored * unit.biased : stored);
      }
#pragma GCC unroll 8
      for (int s = 0; s < kSteps; ++s) {
        const char* const at = weight + s * kStep.bytes;
#pragma GCC unroll 20
        for (int line = 0; kAsks && line < kLines; ++line, ahead += apart) {
          __builtin_prefetch(ahead, 0, 2);
          __builtin_prefetch(at + kSoonBytes + line * 64, 0, 3);
        }
        const Rows<1> row = {x};
        step<Dot, kCodes, 1, V>(sums, row, 0, s * x_step, at, table, 0);
      }
      asm volatile("" ::: "memory");  // otherwise scales would be read between lines of codes, not after them
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        f32v scale, shift;
        if constexpr (share_halves(kScales))
          scales_of(kScales, widened + v * kLanes, head, i, v * kLanes, over_middle, scale, shift);
        else
          scales_of(kScales, head, i, v * kLanes, over_middle, scale, shift);
        out[v] = fma(to_float(Dot::total(sums[0][v])), scale * all(unit.x_scales[g]), out[v]);
        if constexpr (shifts(kScales)) out[v] = fma(shift, all(unit.x_shares[g]), out[v]);
      }
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) store(unit.sums + v * kLanes, out[v]);
  if (unit.ends) end_slice<1, V>(unit);
}

template <class Dot, bool kAsks>
MultiplyUnit row_multiplier_as(Codes codes, Scales scales, index_t group) {
  if (group == 32) {
    if (scales == Scales::half) {
      if (codes == Codes::eight) return multiply_row<Dot, Codes::eight, Scales::half, 32, kAsks>;
      if (codes == Codes::four) return multiply_row<Dot, Codes::four, Scales::half, 32, kAsks>;
      if (codes == Codes::five) return multiply_row<Dot, Codes::five, Scales::half, 32, kAsks>;
      if (codes == Codes::table) return multiply_row<Dot, Codes::table, Scales::half, 32, kAsks>;
    }
    if (scales == Scales::half_minimum) {
      if (codes == Codes::four) return multiply_row<Dot, Codes::four, Scales::half_minimum, 32, kAsks>;
      if (codes == Codes::five) return multiply_row<Dot, Codes::five, Scales::half_minimum, 32, kAsks>;
    }
    if (scales == Scales::bytes_minimum) {
      if (codes == Codes::four) return multiply_row<Dot, Codes::four, Scales::bytes_minimum, 32, kAsks>;
      if (codes == Codes::five) return multiply_row<Dot, Codes::five, Scales::bytes_minimum, 32, kAsks>;
    }
    if (codes == Codes::table) {
      if (scales == Scales::exponent) return multiply_row<Dot, Codes::table, Scales::exponent, 32, kAsks>;
      if (scales == Scales::bytes) return multiply_row<Dot, Codes::table, Scales::bytes, 32, kAsks>;
    }
  }
  if (group == 16) {
    if (codes == Codes::two && scales == Scales::nibbles) return multiply_row<Dot, Codes::two, Scales::nibbles, 16, kAsks>;
    if (codes == Codes::three && scales == Scales::bytes) return multiply_row<Dot, Codes::three, Scales::bytes, 16, kAsks>;
    if (codes == Codes::six && scales == Scales::bytes) return multiply_row<Dot, Codes::six, Scales::bytes, 16, kAsks>;
  }
  return nullptr;
}

// Kernel of a GGUF format; null for others.
template <class Dot>
MultiplyUnit row_multiplier(Codes codes, Scales scales, index_t group, bool asks) {
  return asks ? row_multiplier_as<Dot, true>(codes, scales, group) : row_multiplier_as<Dot, false>(codes, scales, group);
}

}  // namespace
}  // namespace qt::QT_ISA
