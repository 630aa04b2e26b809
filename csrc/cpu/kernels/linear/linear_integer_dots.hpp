// Dot products of some rows of x with some columns of integer weights, by instruction set.
//
// With byte dot products (kDotsBytes: VPDPBUSD, USDOT, SDOT), a register of weights (AVX-512: 16 columns x 4 k) is multiplied
// with four bytes of x. 16-bit x is two signed bytes, high * 256 + low, with a sum each. Without byte dot products, weights are
// widened to 16 bits in registers and multiplied in pairs (PMADDWD). 4-bit weights are expanded to bytes in registers.
#pragma once

#include "linear_codes.hpp"

namespace qt::QT_ISA {
namespace {

// Pointers to every third row of x; the address mode adds one or two strides.
template <int R>
using Rows = const char* [(R + 2) / 3];

// kDotsBytes. 16-bit x: separate sums of high and low bytes.
struct BytesDot16 {
  static constexpr int kSums = 2, kUnitRows = kRegisters == 32 ? 6 : 3;
  static constexpr index_t x_bytes = 8;  // of 4 k
  template <int V>
  QT_INLINE void step(i32v (&sums)[V][kSums], const i32v (&w)[V], const char* x) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v][0] = dot_bytes(sums[v][0], w[v], spread_word(x));
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v][1] = dot_bytes(sums[v][1], w[v], spread_word(x + 4));
  }
  QT_INLINE i32v total(const i32v (&sums)[kSums]) { return (sums[0] << 8) + sums[1]; }
};

// kDotsBytes. 8-bit x.
struct BytesDot8 {
  static constexpr int kSums = 1, kUnitRows = kRegisters == 32 ? 12 : 6;
  static constexpr index_t x_bytes = 4;
  template <int V>
  QT_INLINE void step(i32v (&sums)[V][kSums], const i32v (&w)[V], const char* x) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v][0] = dot_bytes(sums[v][0], w[v], spread_word(x));
  }
  QT_INLINE i32v total(const i32v (&sums)[kSums]) { return sums[0]; }
};

// x as 16-bit numbers in the order k, k + 2, k + 1, k + 3, for both precisions. It matches the 16-bit lanes of weights after the
// mask to eight or four bits.
struct WideDot {
  static constexpr int kSums = 1, kUnitRows = 4;
  static constexpr index_t x_bytes = 8;
  // The weights that match word `word` of x, of the 16 / kBits words of a line.
  template <int kBits>
  QT_INLINE i32v weights(i32v w, int word) {
    const int shift = kBits == 8 ? 8 * word : word / 2 * 4 + word % 2 * 8;
    const i32v shifted = (i32v)((u16v)w >> shift);
    return shift == 16 - kBits ? shifted : shifted & all(kBits == 8 ? 0x00FF00FF : 0x000F000F);
  }
  template <int V>
  QT_INLINE void step(i32v (&sums)[V][kSums], const i32v (&w)[V], const char* x) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 2
      for (int n = 0; n < 2; ++n) sums[v][0] = multiply_pairs(sums[v][0], weights<8>(w[v], n), spread_word(x + 4 * n));
  }
  QT_INLINE i32v total(const i32v (&sums)[kSums]) { return sums[0]; }
};

using Dot16 = std::conditional_t<kDotsBytes, BytesDot16, WideDot>;
using Dot8 = std::conditional_t<kDotsBytes, BytesDot8, WideDot>;

template <class Dot>
constexpr int vectors_of(int rows) {
  const int sums = rows * Dot::kSums;
  if (kRegisters == 32) return !kDotsBytes || sums <= 6 ? 4 : 2;
  return sums == 1 ? 8 : sums == 2 ? 4 : 2;
}

// One line of weights, V registers of 4 k (8 bits) or 8 k (4 bits), by R rows of x at offset `at`.
template <class Dot, int kBits, int R, int V>
QT_INLINE void step_of_bytes(i32v (&sums)[R][V][Dot::kSums], const Rows<R>& x, index_t x_stride, index_t at,
                             const char* weight) {
  i32v w[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) w[v] = load_bits(weight + v * kLanes * 4);
  if constexpr (kBits == 8) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], w, x[r / 3] + r % 3 * x_stride + at);
  } else {
    const i32v nibbles = all(std::int32_t(0x0F0F0F0F));
    i32v half[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) half[v] = w[v] & nibbles;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], half, x[r / 3] + r % 3 * x_stride + at);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) half[v] = (i32v)((u32v)w[v] >> 4) & nibbles;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], half, x[r / 3] + r % 3 * x_stride + at + Dot::x_bytes);
  }
}

// The same for WideDot. One row: its words of x stay in registers while the registers of weights are unpacked in turn. More rows:
// the unpacked weights of a word stay in registers for all rows.
template <int kBits, int R, int V>
QT_INLINE void step_of_words(i32v (&sums)[R][V][1], const Rows<R>& x, index_t x_stride, index_t at, const char* weight) {
  constexpr int kWords = 16 / kBits;
  if constexpr (R == 1) {
    i32v words[kWords];
#pragma GCC unroll 4
    for (int n = 0; n < kWords; ++n) words[n] = spread_word(x[0] + at + 4 * n);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const i32v w = load_bits(weight + v * kLanes * 4);
#pragma GCC unroll 4
      for (int n = 0; n < kWords; ++n)
        sums[0][v][0] = multiply_pairs(sums[0][v][0], WideDot::weights<kBits>(w, n), words[n]);
    }
  } else {
#pragma GCC unroll 4
    for (int n = 0; n < kWords; ++n) {
      i32v w[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) w[v] = WideDot::weights<kBits>(load_bits(weight + v * kLanes * 4), n);
#pragma GCC unroll 12
      for (int r = 0; r < R; ++r) {
        const i32v word = spread_word(x[r / 3] + r % 3 * x_stride + at + 4 * n);
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v][0] = multiply_pairs(sums[r][v][0], w[v], word);
      }
    }
  }
}

// A step of any codes, one four of k after another. Lines are loaded as late as memory order allows. column: first column in the
// tile.
template <class Dot, Codes kCodes, int R, int V>
QT_INLINE void step_of_fours(i32v (&sums)[R][V][Dot::kSums], const Rows<R>& x, index_t x_stride, index_t at, const char* weight,
                             i32v table, index_t column) {
  constexpr int kLines = lines_of(kCodes), kFours = fours_of(kCodes);
  i32v lines[V][kLines], halves[V];
  const auto load_line = [&](int n) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) lines[v][n] = load_in_order(weight + n * kCodeLine + v * kLanes * 4);
  };
  load_line(0);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const char* const behind = weight + kCodeLine - column * 2 + v * kLanes * 2;  // its columns are half as wide
    halves[v] = kCodes == Codes::three ? spread_bits(behind) : i32v{};
  }
#pragma GCC unroll 8
  for (int q = 0; q < kFours; ++q) {
    if (kLines > 1 && q % 2 == 0) load_line(1 + q / 2);
    i32v w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = four_of<kCodes>(lines[v], halves[v], q, table);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], w, x[r / 3] + r % 3 * x_stride + at + q * Dot::x_bytes);
  }
}

template <class Dot, Codes kCodes, int R, int V>
QT_INLINE void step(i32v (&sums)[R][V][Dot::kSums], const Rows<R>& x, index_t x_stride, index_t at, const char* weight,
                    i32v table, index_t column) {
  constexpr int kBits = kCodes == Codes::eight ? 8 : 4;
  if constexpr (kCodes != Codes::eight && kCodes != Codes::four)
    step_of_fours<Dot, kCodes, R, V>(sums, x, x_stride, at, weight, table, column);
  else if constexpr (std::is_same_v<Dot, WideDot>)
    step_of_words<kBits, R, V>(sums, x, x_stride, at, weight);
  else
    step_of_bytes<Dot, kBits, R, V>(sums, x, x_stride, at, weight);
}

}  // namespace
}  // namespace qt::QT_ISA
