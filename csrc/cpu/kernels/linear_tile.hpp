// What every multiplication kernel shares: the rows and columns of an item, what happens to finished sums.
#pragma once

#include "linear.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kMaxPanelRows = 192;

// Rows [row, row + rows) of y by columns [from, to) of a tile.
struct Finish {
  const LinearCall& call;
  index_t tile, from, to;
};

template <class Element>
QT_INLINE f32v load_or_zero(const Element* from, index_t count) {
  return from ? load(from, count) : f32v{};
}

// act(gate) * up, rounded to Element where the reference rounds: the activation, then the product.
template <class Element>
QT_INLINE f32v activated(Activation activation, f32v gate, f32v up) {
  // x times the logistic function of t; for gelu (its tanh form) t is 2 sqrt(2 / pi) (x + 0.044715 x^3).
  const f32v t = activation == Activation::silu
                     ? gate
                     : gate * fma(gate * gate, all(0.07135481627159536f), all(1.5957691216057308f));
  return rounded_to<Element>(gate / (exponential(-t) + 1.0f)) * up;
}

// Rounds sums [rows][64] of a tile to y, after the bias, with what is fused behind.
template <class Element>
void finish(const Finish& f, const float* sums, index_t row, index_t rows) {
  const LinearCall& call = f.call;
  const Element* bias = (const Element*)call.bias;
  Element* y = (Element*)call.y;
  const Element* residual = (const Element*)call.residual;
  if (call.weight->paired) {
    const index_t half = call.weight->columns / 2;
    for (index_t c = 0; c < kPairedColumns; c += kLanes) {
      const index_t column = f.tile * kPairedColumns + c, count = half - column;
      if (count <= 0) return;
      const f32v gate_bias = load_or_zero(bias ? bias + column : nullptr, count);
      const f32v up_bias = load_or_zero(bias ? bias + half + column : nullptr, count);
      for (index_t r = 0; r < rows; ++r) {
        const float* sum = sums + r * kTileColumns + c;
        const f32v gate = rounded_to<Element>(load(sum) + gate_bias);
        const f32v up = rounded_to<Element>(load(sum + kPairedColumns) + up_bias);
        store(y + (row + r) * call.y_stride + column, activated<Element>(call.activation, gate, up), count);
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
      store(y + at, value, count);
    }
  }
}

using FinishRows = void (*)(const Finish&, const float*, index_t, index_t);
QT_INLINE FinishRows finish_for(Dtype dtype) {
  return dtype == Dtype::bf16 ? finish<bf16> : dtype == Dtype::fp16 ? finish<fp16> : finish<float>;
}

// Rows of y are far apart: without this every line of it is waited for.
QT_INLINE void prefetch_outputs(const Finish& f, index_t row, index_t rows) {
  const LinearCall& call = f.call;
  const index_t size = call.dtype == Dtype::fp32 ? 4 : 2;
  const index_t column = call.weight->paired ? f.tile * kPairedColumns : f.tile * kTileColumns + f.from;
  const index_t bytes = (call.weight->paired ? kPairedColumns : f.to - f.from) * size;
  for (index_t r = 0; r < rows; ++r) {
    const char* y = (const char*)call.y + ((row + r) * call.y_stride + column) * size;
    for (index_t at = 0; at < bytes; at += 64) __builtin_prefetch(y + at, 1);
  }
}

// Fetches what is read before anything was fetched for it: the beginning of the tiles that a thread takes.
QT_INLINE void prefetch_begin(const char* from, const char* end) {
  constexpr index_t kBytes = 16 << 10;
  for (const char* line = from; line < end && line < from + kBytes; line += 64) __builtin_prefetch(line, 0, 2);
}

// The columns of one item, and its rows.
struct Item {
  index_t tile, from, to;  // columns [from, to) of the tile
  index_t row, rows;       // of x and y
};

QT_INLINE Item item_of(const LinearCall& call, index_t item) {
  const index_t panel = item / call.parts, column = item % call.parts * call.width, from = column % kTileColumns;
  const index_t row = panel * call.panel_rows;
  const index_t rows = call.rows - row < call.panel_rows ? call.rows - row : call.panel_rows;
  return {column / kTileColumns, from, from + call.width, row, rows};
}

}  // namespace
}  // namespace qt::QT_ISA
