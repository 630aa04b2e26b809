// y[M, N] = x[M, K] · W[N, K]ᵀ + bias in bf16, accumulated in fp32.
//
// Packed weight: tiles of 64 columns, zero-padded, each [ceil(K / 2)][64][2]: the layout VDPBF16PS multiplies (two
// neighbouring k of one column side by side), so that a tile is read front to back.
//
// A thread owns a tile of columns for a panel of up to 192 rows. It holds 6 rows x 64 columns of sums in 24 registers;
// per pair of k it loads 4 registers of weights, broadcasts 6 pairs of x and multiplies 24 times (64 FLOPs each). K goes
// in pieces of 2 048, so that a tile's piece (256 KiB) stays in the second-level cache while the panel's rows pass; sums
// wait in between as fp32 on the stack. Bytes moved per panel: the weight once, x once per tile out of cache, y once.
// Limiter: the weight's bandwidth up to some 20 rows, then the multiply rate.
//
// Reduction order: one fp32 sum per output, k ascending in pairs, then the bias, then one rounding. It depends on neither
// M nor the place of a row or a column in its tile: a row has the same bits in every batch.
#include "host.hpp"

#if defined(__x86_64__)

#include <cstring>

namespace {

constexpr index_t kColumns = 64;
constexpr index_t kVectors = kColumns / kLanes;
constexpr index_t kRows = 6;
constexpr index_t kPanelRows = 192;
constexpr index_t kPiecePairs = 1024;
static_assert(kColumns % kLanes == 0);
static_assert(kPanelRows % kRows == 0);
static_assert(kRows * kVectors + kVectors + 1 <= 32, "sums, weights and one broadcast fill the registers");

struct Problem {
  const bf16* x;
  index_t x_stride;
  index_t rows, columns, depth;
  const bf16* packed;
  const bf16* bias;  // or null
  bf16* y;
};

// One tile's share of K for some rows.
struct Piece {
  const bf16* x;
  index_t x_stride;
  const bf16* weight;
  index_t pairs;
  bool odd;    // one single k follows the pairs
  bool first;  // sums begin at zero, else where `sums` left them
  bool last;   // sums go to y, else back to `sums`
  float* sums;  // [rows][64]
  const bf16* bias;
  bf16* y;
  index_t y_stride;
  index_t columns;  // of this tile: 64 or, in the last, less
};

QT_INLINE __m512bh pair_of(const bf16* from) {
  std::int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// Adds the bias to R x 64 sums and rounds them to y.
template <int R>
QT_INLINE void finish(const Piece& piece, const __m512 (&sums)[R][kVectors]) {
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    const index_t at = v * kLanes;
    if (at >= piece.columns) return;
    const __mmask16 lanes = lanes_left(at, piece.columns);
    const __m512 bias = piece.bias ? load(piece.bias + at, lanes) : _mm512_setzero_ps();
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) store(piece.y + r * piece.y_stride + at, _mm512_add_ps(sums[r][v], bias), lanes);
  }
}

template <int R>
QT_KERNEL void multiply(const Piece& piece) {
  const bf16* x = piece.x;
  const bf16* weight = piece.weight;
  const index_t x_stride = piece.x_stride, pairs = piece.pairs;
  if (piece.last) {
    // Rows of y are far apart: without this every line of it is waited for.
    for (int r = 0; r < R; ++r) {
      __builtin_prefetch(piece.y + r * piece.y_stride, 1);
      __builtin_prefetch(piece.y + r * piece.y_stride + kColumns / 2, 1);
    }
  }
  __m512 acc[R][kVectors];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v)
      acc[r][v] = piece.first ? _mm512_setzero_ps() : _mm512_loadu_ps(piece.sums + r * kColumns + v * kLanes);
  for (index_t p = 0; p < pairs; ++p) {
    __m512bh w[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) w[v] = (__m512bh)_mm512_loadu_si512(weight + (p * kColumns + v * kLanes) * 2);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh a = pair_of(x + r * x_stride + 2 * p);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) acc[r][v] = _mm512_dpbf16_ps(acc[r][v], a, w[v]);
    }
  }
  if (piece.odd) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const __m512bh a = (__m512bh)_mm512_set1_epi32(x[r * x_stride + 2 * pairs]);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const __m512bh w = (__m512bh)_mm512_loadu_si512(weight + (pairs * kColumns + v * kLanes) * 2);
        acc[r][v] = _mm512_dpbf16_ps(acc[r][v], a, w);
      }
    }
  }
  if (piece.last) {
    finish<R>(piece, acc);
    return;
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) _mm512_storeu_ps(piece.sums + r * kColumns + v * kLanes, acc[r][v]);
}

using Multiply = void (*)(const Piece&);
constexpr Multiply kMultiply[kRows] = {multiply<1>, multiply<2>, multiply<3>, multiply<4>, multiply<5>, multiply<6>};

void panel_by_tile(const Problem& problem, index_t panel, index_t tile) {
  alignas(64) float sums[kPanelRows * kColumns];
  const index_t all_pairs = problem.depth / 2, stored_pairs = (problem.depth + 1) / 2;
  const index_t begin = panel * kPanelRows, column = tile * kColumns;
  const index_t end = begin + kPanelRows < problem.rows ? begin + kPanelRows : problem.rows;
  const index_t columns = problem.columns - column < kColumns ? problem.columns - column : kColumns;
  const bf16* weight = problem.packed + tile * stored_pairs * kColumns * 2;
  for (index_t pair = 0; pair < stored_pairs; pair += kPiecePairs) {
    const bool last = pair + kPiecePairs >= stored_pairs;
    for (index_t row = begin; row < end; row += kRows) {
      const index_t rows = end - row < kRows ? end - row : kRows;
      kMultiply[rows - 1](Piece{
          .x = problem.x + row * problem.x_stride + 2 * pair,
          .x_stride = problem.x_stride,
          .weight = weight + pair * kColumns * 2,
          .pairs = last ? all_pairs - pair : kPiecePairs,
          .odd = last && problem.depth % 2,
          .first = pair == 0,
          .last = last,
          .sums = sums + (row - begin) * kColumns,
          .bias = problem.bias ? problem.bias + column : nullptr,
          .y = problem.y + row * problem.columns + column,
          .y_stride = problem.columns,
          .columns = columns,
      });
    }
  }
}

}  // namespace

// Number of bf16 in the packed form of weight [columns, depth].
QT_EXPORT index_t qt_linear_packed_size(index_t columns, index_t depth) {
  return (columns + kColumns - 1) / kColumns * kColumns * ((depth + 1) / 2) * 2;
}

QT_EXPORT void qt_linear_pack(const bf16* weight, index_t stride, index_t columns, index_t depth, bf16* packed) {
  const index_t stored_pairs = (depth + 1) / 2;
  for (index_t tile = 0; tile * kColumns < columns; ++tile)
    for (index_t pair = 0; pair < stored_pairs; ++pair)
      for (index_t lane = 0; lane < kColumns; ++lane)
        for (index_t half = 0; half < 2; ++half) {
          const index_t column = tile * kColumns + lane, k = 2 * pair + half;
          const bool inside = column < columns && k < depth;
          *packed++ = inside ? weight[column * stride + k] : bf16(0);
        }
}

// x: rows x_stride apart, each contiguous; y: contiguous; bias: [columns] or null.
QT_EXPORT void qt_linear(const bf16* x, index_t x_stride, index_t rows, index_t columns, index_t depth,
                         const bf16* packed, const bf16* bias, bf16* y, int threads) {
  const Problem problem{x, x_stride, rows, columns, depth, packed, bias, y};
  const index_t tiles = (columns + kColumns - 1) / kColumns, panels = (rows + kPanelRows - 1) / kPanelRows;
  divide(tiles * panels, 1, threads, [&](index_t item) { panel_by_tile(problem, item % panels, item / panels); });
}

#endif
