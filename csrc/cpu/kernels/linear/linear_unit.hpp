// Inner loops of floating-point products: one unit's sums of one block of columns over one piece of k. Terms: see
// linear_float.cpp.
#pragma once

#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kUnitRows = 12;
constexpr index_t kOwnRows = 4;  // an item of at most this many rows widens its own x
constexpr int block_vectors(index_t rows) { return rows <= 6 ? 4 : 2; }
#else
constexpr int kUnitRows = 6;
constexpr index_t kOwnRows = 2;
constexpr int block_vectors(index_t rows) { return rows == 1 ? 8 : rows == 2 ? 4 : 2; }  // 16 registers
#endif
constexpr index_t kPiece = 256;      // k at a time: 32 KiB of a block's weights in fp32
constexpr index_t kLine = 64;
static_assert(kPiece % 2 == 0);
static_assert((kUnitRows + 1) / 2 > kOwnRows);  // of several units, none has so few rows

// A unit's share of one piece, for one block of columns.
struct Unit {
  const void* x;      // first row and k
  index_t x_stride;   // from a row to the next in x; unused with x as [k][row]
  const char* weight;
  index_t steps;
  bool odd;      // pairs: one single k follows the steps
  float* sums;   // [rows][64]
  bool first;    // sums begin at zero
  float* total;  // [rows][64]: accumulates the finished sums of a slice; null: they stay in `sums`
  // Prefetch address: each step takes a group of `ahead_lines` (1, 2 or 4) adjacent lines, `ahead_groups` in all
  const char* ahead;
  index_t ahead_groups, ahead_lines, ahead_stride;  // contiguous groups, or, of 1 or 2 lines, with a stride in bytes
};

// True if x is [k][row] for R rows; otherwise rows have a stride.
template <int R>
inline constexpr bool kInterleaved = R > kOwnRows;

template <int R>
QT_INLINE f32v spread(const float* x, index_t x_stride, int r, int i) {
  return all(kInterleaved<R> ? x[i * R + r] : x[r * x_stride + i]);
}

// kDotsPairs: two adjacent k of bf16 per step; x is read in place.
struct NativePairs {
  using X = bf16;
  static constexpr index_t k = 2;
  template <int R>
  static constexpr index_t x_step = 2;
  template <int V>
  static constexpr index_t bytes = kTileColumns * 4;

  template <int R, int V>
  QT_INLINE void step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    i32v w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load_bits(weight + v * kLanes * 4);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const i32v a = spread_word(x + r * x_stride);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = dot_pairs(sums[r][v], a, w[v]);
    }
  }

  template <int R, int V>
  QT_INLINE void odd_step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        sums[r][v] = dot_pairs(sums[r][v], all(std::int32_t(x[r * x_stride].bits)), load_bits(weight + v * kLanes * 4));
  }
};

template <int R, int V>
QT_INLINE void multiply_one(f32v (&sums)[R][V], const float* x, index_t x_stride, int i, const f32v (&w)[V]) {
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const f32v a = spread<R>(x, x_stride, r, i);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = fma(a, w[v], sums[r][v]);
  }
}

constexpr std::int32_t kUpper = std::int32_t(0xFFFF0000);
alignas(32) constexpr std::int32_t kUpperHalves[8] = {kUpper, kUpper, kUpper, kUpper, kUpper, kUpper, kUpper, kUpper};

// Mask of a step's upper k. With 16 registers, a full unit's sums leave none for it: a reload costs a load, a register would cost
// a sum.
template <int R>
QT_INLINE i32v upper_halves() {
  if constexpr (kRegisters > 16 || R < kUnitRows) return all(kUpper);
  const std::int32_t* from = kUpperHalves;
  asm volatile("" : "+r"(from));  // prevents the compiler from keeping it
  return load_bits(from);
}

// Two adjacent k of bf16 per step, x in fp32; the lower k first.
struct WidePairs {
  using X = float;
  static constexpr index_t k = 2;
  template <int R>
  static constexpr index_t x_step = kInterleaved<R> ? 2 * R : 2;
  template <int V>
  static constexpr index_t bytes = kTileColumns * 4;

  template <int R, int V>
  QT_INLINE void step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    f32v w[V];
    lower(weight, w);
    multiply_one(sums, x, x_stride, 0, w);
    const i32v upper = upper_halves<R>();
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = as_float(load_bits(weight + v * kLanes * 4) & upper);
    multiply_one(sums, x, x_stride, 1, w);
  }

  template <int R, int V>
  QT_INLINE void odd_step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    f32v w[V];
    lower(weight, w);
    multiply_one(sums, x, x_stride, 0, w);
  }

  template <int V>
  QT_INLINE void lower(const char* weight, f32v (&w)[V]) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = as_float(load_bits(weight + v * kLanes * 4) << 16);
  }
};

// One k per step, x in fp32. Rows of weights are those of a tile, or (Widened) of a contiguous block.
template <class Element, bool kBlock>
struct Single {
  using X = float;
  static constexpr index_t k = 1;
  template <int R>
  static constexpr index_t x_step = kInterleaved<R> ? R : 1;
  template <int V>
  static constexpr index_t bytes = (kBlock ? V * kLanes : kTileColumns) * index_t(sizeof(Element));

  template <int R, int V>
  QT_INLINE void step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    f32v w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load((const Element*)weight + v * kLanes);
    multiply_one(sums, x, x_stride, 0, w);
  }

  template <int R, int V>
  QT_INLINE void odd_step(f32v (&)[R][V], const X*, index_t, const char*) {}
};
using Widened = Single<float, true>;

// `steps` steps, each of which prefetches kLines lines. A burst would fill the line fill buffers and stall the loads of the
// multiplications.
template <class Step, int R, int V, int kLines>
QT_INLINE void multiply_steps(f32v (&sums)[R][V], const typename Step::X*& x, index_t x_stride, const char*& weight,
                              const char*& fetch, index_t steps) {
  for (index_t s = 0; s < steps; ++s) {
#pragma GCC unroll 4
    for (int line = 0; line < kLines; ++line) __builtin_prefetch(fetch + line * kLine, 0, 2);
    Step::template step<R, V>(sums, x, x_stride, weight);
    x += Step::template x_step<R>;
    weight += Step::template bytes<V>;
    fetch += kLines * kLine;
  }
}

// The same with the lines at `fetch` and `fetch + second` (which may be equal), `stride` bytes from step to step.
template <class Step, int R, int V>
QT_INLINE void multiply_steps_apart(f32v (&sums)[R][V], const typename Step::X*& x, index_t x_stride, const char*& weight,
                                    const char* fetch, index_t second, index_t stride, index_t steps) {
  for (index_t s = 0; s < steps; ++s) {
    __builtin_prefetch(fetch, 0, 2);
    __builtin_prefetch(fetch + second, 0, 2);
    Step::template step<R, V>(sums, x, x_stride, weight);
    x += Step::template x_step<R>;
    weight += Step::template bytes<V>;
    fetch += stride;
  }
}

template <class Step, int R, int V>
void multiply(const Unit& unit) {
  const typename Step::X* x = (const typename Step::X*)unit.x;
  const index_t x_stride = unit.x_stride, stride = unit.ahead_stride, lines = unit.ahead_lines;
  const index_t steps = unit.steps, fetching = unit.ahead_groups < steps ? unit.ahead_groups : steps;
  const char *weight = unit.weight, *fetch = unit.ahead;
  f32v sums[R][V] = {};
  if (!unit.first) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = load(unit.sums + r * kTileColumns + v * kLanes);
  }
  if (stride != lines * kLine)
    multiply_steps_apart<Step, R, V>(sums, x, x_stride, weight, fetch, (lines - 1) * kLine, stride, fetching);
  else if (lines == 1)
    multiply_steps<Step, R, V, 1>(sums, x, x_stride, weight, fetch, fetching);
  else if (lines == 2)
    multiply_steps<Step, R, V, 2>(sums, x, x_stride, weight, fetch, fetching);
  else
    multiply_steps<Step, R, V, 4>(sums, x, x_stride, weight, fetch, fetching);
  multiply_steps<Step, R, V, 0>(sums, x, x_stride, weight, fetch, steps - fetching);
  if (unit.odd) Step::template odd_step<R, V>(sums, x, x_stride, weight);
  if (unit.total) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        float* const total = unit.total + r * kTileColumns + v * kLanes;
        store(total, load(total) + sums[r][v]);
      }
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(unit.sums + r * kTileColumns + v * kLanes, sums[r][v]);
}

using Multiply = void (*)(const Unit&);

// Kernel for units of `rows` rows by `vectors` vectors, of a block or of a narrower item.
template <class Step, int R = 1>
Multiply multiply_for(index_t rows, index_t vectors) {
  if constexpr (R <= kUnitRows) {
    if (rows != R) return multiply_for<Step, R + 1>(rows, vectors);
    constexpr int kMost = block_vectors(R);
    if constexpr (kMost >= 8)
      if (vectors == 8) return multiply<Step, R, 8>;
    if constexpr (kMost >= 4)
      if (vectors == 4) return multiply<Step, R, 4>;
    if (vectors == 2) return multiply<Step, R, 2>;
    if constexpr (kLanes == 16)
      if (vectors == 1) return multiply<Step, R, 1>;
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace qt::QT_ISA
