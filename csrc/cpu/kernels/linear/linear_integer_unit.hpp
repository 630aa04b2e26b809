// Units of integer products: some rows of x by some columns of a tile, with the sums in registers.
//
// Shape with 32 registers, 24 of them sums: up to 6 rows (3 for 16-bit x) by four vectors of columns. With AVX-512 these are all
// 64 columns, so few rows read the weights once. More rows, up to 12 (6), by two vectors: 14 loads and 6 unpackings of 4-bit
// weights for 24 multiplications. Exception: a hardware prefetcher that follows (linear_integer.cpp). Shape with 16 registers, 12
// of them sums: one sum a column by eight vectors, two by four. More rows, up to 6 (3), by two. Limiter: VPDPBUSD, two a cycle.
#pragma once

#include "linear_integer_dots.hpp"
#include "linear_quantize.hpp"
#include "linear_scales.hpp"
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

// Prefetch of a unit: one line for each vector of a line of weights, `apart` bytes from one another. The start of a block adds
// `at_head` lines, since heads have no lines of weights. `apart` may be less than a line: repeated prefetches are almost free,
// but a gap would stall a unit. A burst would fill the line fill buffers that loads need. `at` null: no prefetch, the hardware
// prefetcher follows (Weight::follows).
struct Fetch {
  const char* at;
  index_t apart, at_head;
  const char* end;  // of the piece, which continues `further` bytes later; null: no L1 prefetch
  index_t further;
};

// L1 prefetch distance of a unit of all columns. Multiplications that wait for weights fill the reorder buffer. If each waits for
// the L2 cache, too few loads are in flight to keep the memory busy.
inline constexpr index_t kNearBytes = 4096;
QT_INLINE const char* near_of(const Fetch& fetch, const char* weight) {
  const char* const near = weight + kNearBytes;
  return near < fetch.end ? near : near + fetch.further;
}

// Prefetch mode of a unit: none, the next piece, or also its own piece into the L1 cache.
enum class Asking { nothing, next, near_too };

// A unit's share of one piece of k: some groups, or a part of a single group.
struct Unit {
  const char* x;                  // first row, at the piece's first k
  const float* x_scales;          // at the piece's first group
  const std::int32_t* x_offsets;  // likewise
  const float* x_shares;          // likewise, for formats that shift
  index_t x_stride;               // bytes from a row to the next, of all four
  const char* weight;             // codes of the first group and column
  index_t line;                   // bytes to the next step
  index_t group_stride, weight_stride;  // to the next group in a block, to the next block
  const char* heads;                    // of the first block, head_bytes each; `head_stride` bytes to the next
  index_t head_bytes;
  index_t head_stride;
  const char* column_scales;  // of the tile; fp32
  index_t column;             // first column in the tile
  index_t groups, steps, last_steps;  // steps in a group and in the last one
  index_t in_block;                   // groups of a block
  const unsigned char (*table)[16];   // Codes::table
  float over_middle;                  // 1 / the stored integer that means zero
  std::int32_t biased;                // factor of the offset that starts a group's sums of dot_bytes
  Scales scales;
  float* sums;                // [rows][64], from the first column on; int32 while a single group is incomplete
  float* total;               // accumulates the finished sums of a slice; null: they stay in `sums`
  bool whole;                 // a single group over several pieces
  bool first;                 // the piece begins the single group
  bool ends;                  // the piece completes a slice
  bool last;                  // the piece completes the outputs' sums, which are then scaled by column
  Fetch fetch;
};

// Sums of a group, or of a part of a single group. Integer sums are exact.
template <class Dot, Codes kCodes, Asking kAsking, int R, int V>
QT_INLINE void sum_group(i32v (&sums)[R][V][Dot::kSums], const char* first_row, index_t x_stride, const char* weight,
                         index_t line, index_t steps, i32v table, index_t column, Fetch& fetch) {
  constexpr index_t x_step = Dot::x_bytes * fours_of(kCodes);
  constexpr int kFetches = kAsking != Asking::nothing ? int(V * step_of(kCodes).bytes / kCodeLine) : 0;
  constexpr int kNears = kAsking == Asking::near_too ? int(step_of(kCodes).bytes / 64) : 0;
  constexpr int kPointers = (R + 2) / 3;
  Rows<R> x;
#pragma GCC unroll 4
  for (int i = 0; i < kPointers; ++i) x[i] = first_row + 3 * i * x_stride;
  const index_t apart = fetch.apart;
  const char* ahead = fetch.at;
  index_t s = 0;
  for (; s + 2 <= steps; s += 2) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
#pragma GCC unroll 20
      for (int i = 0; i < kFetches; ++i, ahead += apart) __builtin_prefetch(ahead, 0, 2);
      const char* const near = near_of(fetch, weight);
#pragma GCC unroll 20
      for (int i = 0; i < kNears; ++i) __builtin_prefetch(near + i * 64, 0, 3);
      step<Dot, kCodes, R, V>(sums, x, x_stride, half * x_step, weight, table, column);
      weight += line;
    }
#pragma GCC unroll 4
    for (int i = 0; i < kPointers; ++i) x[i] += 2 * x_step;
  }
  if (s < steps) {
    if constexpr (kCodes != Codes::eight && kCodes != Codes::four) {  // their groups have few steps
#pragma GCC unroll 20
      for (int i = 0; i < kFetches; ++i, ahead += apart) __builtin_prefetch(ahead, 0, 2);
    }
    step<Dot, kCodes, R, V>(sums, x, x_stride, 0, weight, table, column);
  }
  fetch.at = ahead;
}

template <class Number>
QT_INLINE const Number* row_of(const Number* from, index_t row, index_t stride_bytes) {
  return (const Number*)((const char*)from + row * stride_bytes);
}

// Decodes the scales and shifts (linear_scales.hpp) of a group, for a unit's columns. in_block: index in the group's block. head:
// of that block. widened: the output of begin_block. One branch for a group: one for every vector takes measurable time.
template <Codes kCodes, int V>
QT_INLINE void decode_scales(const Unit& unit, const char* head, const float* widened, index_t in_block, f32v (&scale)[V],
                             f32v (&shift)[V]) {
  const auto decode = [&]<Scales kScales>() __attribute__((always_inline)) {
    if constexpr (!is_paired(kCodes, kScales)) __builtin_unreachable();
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const index_t column = unit.column + v * kLanes;
      if constexpr (V * kLanes == kTileColumns && share_halves(kScales))
        scales_of(kScales, widened + column, head, in_block, column, unit.over_middle, scale[v], shift[v]);
      else
        scales_of(kScales, head, in_block, column, unit.over_middle, scale[v], shift[v]);
    }
  };
  switch (unit.scales) {
    case Scales::column: return decode.template operator()<Scales::column>();
    case Scales::half: return decode.template operator()<Scales::half>();
    case Scales::half_zero: return decode.template operator()<Scales::half_zero>();
    case Scales::half_minimum: return decode.template operator()<Scales::half_minimum>();
    case Scales::bytes: return decode.template operator()<Scales::bytes>();
    case Scales::bytes_minimum: return decode.template operator()<Scales::bytes_minimum>();
    case Scales::nibbles: return decode.template operator()<Scales::nibbles>();
    case Scales::exponent: return decode.template operator()<Scales::exponent>();
    case Scales::eighth: return decode.template operator()<Scales::eighth>();
    case Scales::single: return decode.template operator()<Scales::single>();
    case Scales::single_zero: return decode.template operator()<Scales::single_zero>();
    case Scales::single_shift: return decode.template operator()<Scales::single_shift>();
  }
}

// Adds a group's scaled sums to the results, then the contribution of zero points or minima to the sum of x. g: index among the
// piece's groups.
template <class Dot, bool kShifts, int R, int V>
QT_INLINE void add_scaled(const i32v (&sums)[R][V][Dot::kSums], const Unit& unit, index_t g, const f32v (&scale)[V],
                          const f32v (&shift)[V]) {
  const float *const x_scales = unit.x_scales + g, *const x_shares = unit.x_shares + g;
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    float* const out = unit.sums + v * kLanes;
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const f32v x_scale = all(*row_of(x_scales, r, unit.x_stride)), sum = load(out + r * kTileColumns);
      f32v added = fma(to_float(Dot::total(sums[r][v])), scale[v] * x_scale, sum);
      if constexpr (kShifts) added = fma(shift[v], all(*row_of(x_shares, r, unit.x_stride)), added);
      store(out + r * kTileColumns, added);
    }
  }
}

template <class Dot, Codes kCodes, int R, int V>
QT_INLINE void add_group(const i32v (&sums)[R][V][Dot::kSums], const Unit& unit, const char* head, const float* widened,
                         index_t in_block, index_t g) {
  f32v scale[V], shift[V];
  decode_scales<kCodes>(unit, head, widened, in_block, scale, shift);
  if (shifts(unit.scales))
    add_scaled<Dot, true>(sums, unit, g, scale, shift);
  else
    add_scaled<Dot, false>(sums, unit, g, scale, shift);
}

// Initial sums of group g: its offsets, or the sums of earlier pieces of a single group.
template <class Dot, int R, int V>
QT_INLINE void begin_group(i32v (&sums)[R][V][Dot::kSums], const Unit& unit, index_t g) {
  if (Dot::kSums == 1 && unit.whole && !unit.first) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v][0] = load_bits(unit.sums + r * kTileColumns + v * kLanes);
    return;
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    const std::int32_t stored = row_of(unit.x_offsets, r, unit.x_stride)[g];
    const i32v offset = all(kDotBias ? stored * unit.biased : stored);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[r][v][0] = i32v{};
      sums[r][v][Dot::kSums - 1] = offset;
    }
  }
}

// Stores the integer sums of a part of a single group in place of the results; converts them to results after the last part.
template <class Dot, int R, int V>
QT_INLINE void end_part(const i32v (&sums)[R][V][Dot::kSums], const Unit& unit) {
  if (!unit.last) {
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        store(unit.sums + r * kTileColumns + v * kLanes, as_float(Dot::total(sums[r][v])));
    return;
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    const f32v scale = load((const float*)unit.column_scales + unit.column + v * kLanes);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const f32v x_scale = all(*row_of(unit.x_scales, r, unit.x_stride));
      store(unit.sums + r * kTileColumns + v * kLanes, to_float(Dot::total(sums[r][v])) * x_scale * scale);
    }
  }
}

// Adds the results of a slice to the total, unless it is the first, and scales them by column if it is the last.
template <int R, int V>
void end_slice(const Unit& unit) {
  if (!unit.last && !unit.total) return;
  for (int v = 0; v < V; ++v) {
    const f32v scale = unit.last ? load((const float*)unit.column_scales + unit.column + v * kLanes) : all(1.0f);
    for (int r = 0; r < R; ++r) {
      const index_t at = r * kTileColumns + v * kLanes;
      f32v value = load(unit.sums + at);
      if (unit.total) value = load(unit.total + at) + value;
      store((unit.total ? unit.total : unit.sums) + at, value * scale);
    }
  }
}

// Reads the whole head of a block before its codes. A later read would be behind the codes, and the hardware prefetcher would not
// detect the sequential stream. Widens the fp16 numbers that all groups share.
QT_INLINE void begin_block(const Unit& unit, const char* head, float (&widened)[2 * kTileColumns]) {
  constexpr index_t kVectorBytes = kLanes * 4;
  for (index_t at = 0; at + kVectorBytes <= unit.head_bytes; at += kVectorBytes) (void)load_in_order(head + at);
  if (!share_halves(unit.scales)) return;
  const index_t halves = shifts(unit.scales) ? 2 * kTileColumns : kTileColumns;
  for (index_t i = 0; i < halves; i += kLanes) store(widened + i, load((const fp16*)head + i));
}

template <class Dot, Codes kCodes, int R, int V>
void multiply(const Unit& unit) {
  const char *x = unit.x, *block = unit.weight, *head = unit.heads;
  Fetch fetch = unit.fetch;
  alignas(64) float widened[2 * kTileColumns];
  i32v table{};
  if constexpr (kCodes == Codes::table) table = table_of(*unit.table);
  for (index_t g = 0, in_block = 0; g < unit.groups; ++g) {
    const index_t steps = g + 1 == unit.groups ? unit.last_steps : unit.steps;
    const char* weight = block + in_block * unit.group_stride;
    const bool fetches = V * kLanes < kTileColumns || fetch.at != nullptr;
    const bool near_too = V * kLanes == kTileColumns && fetches && fetch.end != nullptr;
    if (in_block == 0 && V * kLanes == kTileColumns) {
      begin_block(unit, head, widened);
      for (index_t at = -unit.head_bytes; near_too && at < 0; at += 64) __builtin_prefetch(near_of(fetch, weight + at), 0, 3);
    }
    if (in_block == 0 && fetches)
      for (index_t i = 0; i < fetch.at_head; ++i, fetch.at += fetch.apart) __builtin_prefetch(fetch.at, 0, 2);
    i32v sums[R][V][Dot::kSums];
    begin_group<Dot, R, V>(sums, unit, g);
    const auto sum = [&]<Asking kAsking>() __attribute__((always_inline)) {
      sum_group<Dot, kCodes, kAsking, R, V>(sums, x, unit.x_stride, weight, unit.line, steps, table, unit.column, fetch);
    };
    if (near_too)
      sum.template operator()<Asking::near_too>();
    else if (fetches)
      sum.template operator()<Asking::next>();
    else
      sum.template operator()<Asking::nothing>();
    asm volatile("" ::: "memory");  // otherwise scales would be read between lines of codes, not after them
    if (Dot::kSums == 1 && unit.whole)
      end_part<Dot, R, V>(sums, unit);
    else
      add_group<Dot, kCodes>(sums, unit, head, widened, in_block, g);
    x += steps * (Dot::x_bytes * fours_of(kCodes));
    if (++in_block == unit.in_block) in_block = 0, block += unit.weight_stride, head += unit.head_stride;
  }
  if (!unit.whole && unit.ends) end_slice<R, V>(unit);
}

// `columns` columns of a unit, which may be fewer than its registers hold.
template <class Dot, Codes kCodes, int R>
void multiply_columns(const Unit& unit, index_t columns) {
  constexpr int V = vectors_of<Dot>(R);
  if (columns == V * kLanes) return multiply<Dot, kCodes, R, V>(unit);
  Unit part = unit;
  for (index_t done = 0; done < columns;) {
    const index_t left = columns - done, vectors = left >= V * kLanes ? V : V > 2 && left >= 2 * kLanes ? 2 : 1;
    if (vectors == V)
      multiply<Dot, kCodes, R, V>(part);
    else if (vectors == 2)
      multiply<Dot, kCodes, R, 2>(part);
    else
      multiply<Dot, kCodes, R, 1>(part);
    const index_t next = vectors * kLanes;
    part.weight += next * 4, part.sums += next, part.column += next;
    if (part.total) part.total += next;
    done += next;
  }
}

// Maximum rows of a unit. Codes with expensive unpacking are expanded to bytes for more rows, so they need no larger units.
inline constexpr int kFewRows = 2;
template <class Dot, Codes kCodes>
constexpr int most_rows() {
  return kCodes == Codes::eight || kCodes == Codes::four || Dot::kUnitRows < kFewRows ? Dot::kUnitRows : kFewRows;
}

template <class Dot, Codes kCodes, int R = 1>
void multiply_rows(const Unit& unit, index_t rows, index_t columns) {
  if constexpr (R < most_rows<Dot, kCodes>()) {
    if (rows > R) return multiply_rows<Dot, kCodes, R + 1>(unit, rows, columns);
  }
  multiply_columns<Dot, kCodes, R>(unit, columns);
}

}  // namespace
}  // namespace qt::QT_ISA
