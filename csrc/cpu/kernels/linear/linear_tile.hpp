// Shared parts of the linear kernels: rows and columns of an item, finish of the sums, reduction of leaves and slices.
#pragma once

#include <bit>

#include "activations.hpp"
#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kMaxPanelRows = 192;
inline constexpr index_t kLineBytes = kTileColumns * 4;  // of a tile: a pair of bf16, 4 k of 8 bits or 8 k of 4 bits

// Rows [row, row + rows) of y by columns [from, to) of a tile. Paired weights: these gate columns and their up columns.
struct Finish {
  const LinearCall& call;
  index_t tile, from, to;
};

template <class Element>
QT_INLINE f32v load_or_zero(const Element* from, index_t count) {
  return from ? load(from, count) : f32v{};
}

// act(gate) * up, rounded to Element like the reference: the activation, then the product.
template <class Element>
QT_INLINE f32v activated(const LinearCall& call, f32v gate, f32v up) {
  if (call.activation == Activation::clamped_swiglu) {
    const f32v limit = all(call.gate_limit);
    gate = gate > limit ? limit : gate;  // NaN stays NaN
    up = up > limit ? limit : up < -limit ? -limit : up;
    const f32v glu = gate / (exponential(gate * all(-call.gate_factor)) + 1.0f);
    return rounded_to<Element>(glu) * rounded_to<Element>(up + 1.0f);
  }
  return rounded_to<Element>(activate(call.activation, gate)) * up;
}

// Writes sums [rows][64] of a tile to y as Element, after the bias and the fused operations. Bias: the call's dtype.
template <class Element, class Bias = Element>
void finish(const Finish& f, const float* sums, index_t row, index_t rows) {
  const LinearCall& call = f.call;
  const Bias* bias = (const Bias*)call.bias;
  Element* y = (Element*)call.y;
  const Element* residual = (const Element*)call.residual;
  if (call.weight->paired) {
    const index_t half = call.weight->columns / 2;
    for (index_t c = f.from; c < f.to && c < kPairedColumns; c += kLanes) {
      const index_t column = f.tile * kPairedColumns + c, count = half - column;
      if (count <= 0) return;
      const f32v gate_bias = load_or_zero(bias ? bias + column : nullptr, count);
      const f32v up_bias = load_or_zero(bias ? bias + half + column : nullptr, count);
      for (index_t r = 0; r < rows; ++r) {
        const float* sum = sums + r * kTileColumns + c;
        const f32v gate = rounded_to<Element>(load(sum) + gate_bias);
        const f32v up = rounded_to<Element>(load(sum + kPairedColumns) + up_bias);
        store(y + (row + r) * call.y_stride + column, activated<Element>(call, gate, up), count);
      }
    }
    return;
  }
  for (index_t c = f.from; c < f.to; c += kLanes) {
    const index_t column = f.tile * kTileColumns + c, count = call.weight->columns - column;
    if (count <= 0) return;
    const f32v added = load_or_zero(bias ? bias + column : nullptr, count);
    for (index_t r = 0; r < rows; ++r) {
      const index_t at = (row + r) * call.y_stride + column;
      f32v value = load(sums + r * kTileColumns + c) + added;
      if (residual) value = rounded_to<Element>(value) + load(residual + at, count);
      if (call.activation != Activation::none) value = activate(call.activation, rounded_to<Element>(value));
      store(y + at, value, count);
    }
  }
}

using FinishRows = void (*)(const Finish&, const float*, index_t, index_t);
QT_INLINE FinishRows finish_for(const LinearCall& call) {
  if (call.y_dtype != call.dtype) return call.dtype == Dtype::bf16 ? finish<float, bf16> : finish<float, fp16>;
  return call.dtype == Dtype::bf16 ? finish<bf16> : call.dtype == Dtype::fp16 ? finish<fp16> : finish<float>;
}

// Rows of y are far apart: without prefetch, every line of y is a cache miss.
QT_INLINE void prefetch_outputs(const Finish& f, index_t row, index_t rows) {
  const LinearCall& call = f.call;
  const index_t size = call.y_dtype == Dtype::fp32 ? 4 : 2;
  const bool paired = call.weight->paired;
  const index_t column = f.tile * (paired ? kPairedColumns : kTileColumns) + f.from;
  const index_t bytes = ((paired && f.to > kPairedColumns ? kPairedColumns : f.to) - f.from) * size;
  for (index_t r = 0; r < rows; ++r) {
    const char* y = (const char*)call.y + ((row + r) * call.y_stride + column) * size;
    for (index_t at = 0; at < bytes; at += 64) __builtin_prefetch(y + at, 1);
  }
}

// Finishes a few rows at a time. Their lines of y stay in the L1 cache for all columns, and are prefetched during earlier rows.
QT_INLINE void finish_by_blocks(const Finish& f, const float* sums, index_t row, index_t rows) {
  constexpr index_t kBlock = 16;
  const FinishRows finish_rows = finish_for(f.call);
  prefetch_outputs(f, row, rows < kBlock ? rows : kBlock);
  for (index_t done = 0; done < rows; done += kBlock) {
    const index_t left = rows - done, next = left - kBlock;
    if (next > 0) prefetch_outputs(f, row + done + kBlock, next < kBlock ? next : kBlock);
    finish_rows(f, sums + done * kTileColumns, row + done, left < kBlock ? left : kBlock);
  }
}

// Prefetches the start of a thread's first tile, which no earlier item prefetched.
QT_INLINE void prefetch_begin(const char* from, const char* end) {
  constexpr index_t kBytes = 16 << 10;
  for (const char* line = from; line < end && line < from + kBytes; line += 64) __builtin_prefetch(line, 0, 2);
}

// The tile column at index `place` of an item's columns.
QT_INLINE index_t column_of(const LinearItem& item, index_t place) {
  const index_t in_span = item.to - item.from;
  return item.from + (place < in_span ? place : place - in_span + kPairedColumns);
}

// --- leaves of k ---

// Adds leaves as a tree in sequence: `take(leaf, place)` computes a leaf's sum into a place, `add(from, to)` adds one place to
// another. Place 0 receives the total.
template <class Take, class Add>
QT_INLINE void add_as_tree(index_t leaves, const Take& take, const Add& add) {
  for (index_t leaf = 0; leaf < leaves; ++leaf) {
    index_t place = std::popcount(std::size_t(leaf));
    take(leaf, place);
    for (index_t done = leaf; done & 1; done >>= 1, --place) add(place, place - 1);
  }
}

// Adds sums [rows][64] of an item's columns to others.
QT_INLINE void add_sums(const LinearItem& item, index_t rows, const float* sums, float* to) {
  for (index_t r = 0; r < rows; ++r)
    for (index_t place = 0; place < (item.to - item.from) * item.spans; place += kLanes) {
      const index_t at = r * kTileColumns + column_of(item, place);
      store(to + at, load(to + at) + load(sums + at));
    }
}

// --- slices as separate items ---

// Sums of an item's rows and columns over a slice: [rows][64].
QT_INLINE float* partials_of(const LinearCall& call, const LinearItem& item, index_t slice) {
  return call.partials + ((slice * call.weight->tiles + item.tile) * call.rows + item.row) * kTileColumns;
}

// Marks an item's sums as stored. Returns true to exactly one item: the one that completes all slices of its outputs.
QT_INLINE bool brings_last_slice(const LinearCall& call, const LinearItem& item) {
  std::uint32_t* pending = call.pending + item.output;
  if (index_t(__atomic_add_fetch(pending, 1, __ATOMIC_ACQ_REL)) != call.weight->whole_slices) return false;
  __atomic_store_n(pending, 0, __ATOMIC_RELAXED);  // for the next step
  return true;
}

// Sum of a leaf's slices, ascending; Vector: f32v, or i32v for integers. first: sums of the first slice of the first leaf.
template <class Vector>
QT_INLINE Vector total_of_slices(const LinearCall& call, const float* first, index_t leaf) {
  const index_t stride = call.weight->tiles * call.rows * kTileColumns;
  first += leaf * call.weight->slices * stride;
  Vector total;
  std::memcpy(&total, first, sizeof total);
  for (index_t slice = 1; slice < call.weight->slices; ++slice) {
    Vector sums;
    std::memcpy(&sums, first + slice * stride, sizeof sums);
    total += sums;
  }
  return total;
}

// An output's total over leaves, where `of_leaf` returns the total of a leaf.
template <class OfLeaf>
QT_INLINE f32v total_of_leaves(index_t leaves, const OfLeaf& of_leaf) {
  f32v sums[kTreeHeight];
  add_as_tree(
      leaves, [&](index_t leaf, index_t place) { sums[place] = of_leaf(leaf); },
      [&](index_t from, index_t to) { sums[to] += sums[from]; });
  return sums[0];
}

// Totals of an item's outputs, after all slices are complete: [rows][64].
QT_INLINE void add_slices(const LinearCall& call, const LinearItem& item, float* total) {
  const float* const first = partials_of(call, item, 0);
  for (index_t r = 0; r < item.rows; ++r)
    for (index_t place = 0; place < (item.to - item.from) * item.spans; place += kLanes) {
      const index_t at = r * kTileColumns + column_of(item, place);
      const auto of_leaf = [&](index_t leaf) { return total_of_slices<f32v>(call, first + at, leaf); };
      store(total + at, total_of_leaves(call.weight->leaves, of_leaf));
    }
}

}  // namespace
}  // namespace qt::QT_ISA
