// Some rows of x by some columns of a tile of integer weights: what is multiplied while its sums stay in registers.
//
// Shape, with 32 registers, 24 of them sums: up to 6 rows (3 for 16-bit x) by four vectors of columns (with AVX-512 all
// 64), so that a few rows pass over the weights once; more, up to 12 (6), by two, for 14 loads and 6 unpackings of 4-bit
// weights per 24 multiplications; not where the processor follows what is read front to back (linear_integer.cpp). With 16 registers, 12 of them sums: one sum a column by eight vectors, two by four,
// more, up to 6 rows (3), by two. Limiter: VPDPBUSD, two a cycle.
#pragma once

#include "linear_integer_dots.hpp"
#include "linear_quantize.hpp"
#include "linear_scales.hpp"
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

// Lines to fetch while a unit is multiplied: one for each vector of a line of weights, `apart` bytes from one another, and `at_head`
// when a block begins, since heads are memory that no line of weights stands for. Less than a line apart, a line is asked for more
// than once, which costs next to nothing; more, and some would be left out, for which a unit waits each time; a burst of
// lines would fill the buffers that the loads need. `at` null: nothing, the processor finds out by itself what is read front to back
// (Weight::follows).
struct Fetch {
  const char* at;
  index_t apart, at_head;
  const char* end;  // of the piece that units read where it lies, which continues `further` bytes after it; or null
  index_t further;
};

// A unit of all columns asks for what it reads so many bytes later a second time, into the first-level cache. Multiplications that wait for
// their weights fill the processor's window, in which there are then too few loads to keep the memory busy, as long as each
// of them waits for the second-level cache.
inline constexpr index_t kNearBytes = 4096;
QT_INLINE const char* near_of(const Fetch& fetch, const char* weight) {
  const char* const near = weight + kNearBytes;
  return near < fetch.end ? near : near + fetch.further;
}

// What a unit asks for: nothing, what comes next, or also, once more, what it is about to read.
enum class Asking { nothing, next, near_too };

// A unit's share of one piece of k: some groups, or a part of the only one.
struct Unit {
  const char* x;                  // of its first row, from the piece's first k on
  const float* x_scales;          // of the piece's first group
  const std::int32_t* x_offsets;  // likewise
  const float* x_shares;          // likewise, where the format shifts
  index_t x_stride;               // bytes from a row to the next, of all four
  const char* weight;             // codes of the first group and column
  index_t line;                   // bytes to the next step
  index_t group_stride, weight_stride;  // to the next group in a block, to the next block
  const char* heads;                    // the first block's, so many bytes; `head_stride` bytes to the next
  index_t head_bytes;
  index_t head_stride;
  const char* column_scales;  // of the tile; fp32
  index_t column;             // of the tile: the unit's first
  index_t groups, steps, last_steps;  // steps in a group and in the last one
  index_t in_block;                   // groups of a block
  const unsigned char (*table)[16];   // Codes::table
  float over_middle;                  // 1 / the stored integer that means zero
  const char* head;                   // the matrix unit's: of the block of the added sums,
  index_t head_group;                 // and which of its groups it is
  std::int32_t biased;                // times its offset: what a group's sums of dot_bytes begin with
  Scales scales;
  float* sums;                // [rows][64], from the first column on; int32 while the only group is not complete
  float* total;               // what the finished sums of a slice are added to, and left in; or null: they stay in `sums`
  bool whole;                 // there is only one group, over several pieces
  bool first;                 // the piece begins the only group
  bool ends;                  // the piece completes a slice
  bool last;                  // the piece completes the outputs' sums: they are scaled by column
  Fetch fetch;
};

// All of a group, or of a part of the only one. Its integer sums are exact.
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

template <class Dot, Scales kScales, int R, int V>
QT_INLINE void add_group_as(const i32v (&sums)[R][V][Dot::kSums], const Unit& unit, const char* head, const float* widened,
                            index_t in_block, index_t g) {
  const index_t x_stride = unit.x_stride;
  const float *const x_scales = unit.x_scales + g, *const x_shares = unit.x_shares + g;
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    float* const out = unit.sums + v * kLanes;
    f32v scale, shift;
    const index_t column = unit.column + v * kLanes;
    if constexpr (V * kLanes == kTileColumns && share_halves(kScales))
      scales_of(kScales, widened + column, head, in_block, column, unit.over_middle, scale, shift);
    else
      scales_of(kScales, head, in_block, column, unit.over_middle, scale, shift);
#pragma GCC unroll 12
    for (int r = 0; r < R; ++r) {
      const f32v x_scale = all(*row_of(x_scales, r, x_stride)), sum = load(out + r * kTileColumns);
      f32v added = fma(to_float(Dot::total(sums[r][v])), scale * x_scale, sum);
      if constexpr (shifts(kScales)) added = fma(shift, all(*row_of(x_shares, r, x_stride)), added);
      store(out + r * kTileColumns, added);
    }
  }
}

// Adds a group's sums, scaled, to the results; then what its zero points or minima make of the sum of x. g: among the piece's
// groups, `in_block` among those of its block, which begins with `head`; widened: what begin_block made of it. Compiled for each kind of
// scales: a choice for every vector is felt.
template <class Dot, int R, int V>
QT_INLINE void add_group(const i32v (&sums)[R][V][Dot::kSums], const Unit& unit, const char* head, const float* widened,
                         index_t in_block, index_t g) {
  switch (unit.scales) {
    case Scales::column: return add_group_as<Dot, Scales::column>(sums, unit, head, widened, in_block, g);
    case Scales::half: return add_group_as<Dot, Scales::half>(sums, unit, head, widened, in_block, g);
    case Scales::half_zero: return add_group_as<Dot, Scales::half_zero>(sums, unit, head, widened, in_block, g);
    case Scales::half_minimum: return add_group_as<Dot, Scales::half_minimum>(sums, unit, head, widened, in_block, g);
    case Scales::bytes: return add_group_as<Dot, Scales::bytes>(sums, unit, head, widened, in_block, g);
    case Scales::bytes_minimum: return add_group_as<Dot, Scales::bytes_minimum>(sums, unit, head, widened, in_block, g);
    case Scales::nibbles: return add_group_as<Dot, Scales::nibbles>(sums, unit, head, widened, in_block, g);
    case Scales::exponent: return add_group_as<Dot, Scales::exponent>(sums, unit, head, widened, in_block, g);
    case Scales::eighth: return add_group_as<Dot, Scales::eighth>(sums, unit, head, widened, in_block, g);
    case Scales::single: return add_group_as<Dot, Scales::single>(sums, unit, head, widened, in_block, g);
    case Scales::single_zero: return add_group_as<Dot, Scales::single_zero>(sums, unit, head, widened, in_block, g);
    case Scales::single_shift: return add_group_as<Dot, Scales::single_shift>(sums, unit, head, widened, in_block, g);
  }
}

// What the sums of group g begin with: its offsets, or what the piece before left of the only group.
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

// Keeps the integers of a part of the only group where the results will be; makes results of them after the last part.
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

// Adds the results of a slice to the total, if it is not the first, and scales them by column if it is the last.
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

// Reads a block's head before its codes, all of it and in order: read when its groups are added up it would lie after what is read
// then, and the processor would not see that memory is read front to back. Widens the halves that all of its groups need.
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
    asm volatile("" ::: "memory");  // or scales would be read between lines of codes, not after them
    if (Dot::kSums == 1 && unit.whole)
      end_part<Dot, R, V>(sums, unit);
    else
      add_group<Dot, R, V>(sums, unit, head, widened, in_block, g);
    x += steps * (Dot::x_bytes * fours_of(kCodes));
    if (++in_block == unit.in_block) in_block = 0, block += unit.weight_stride, head += unit.head_stride;
  }
  if (!unit.whole && unit.ends) end_slice<R, V>(unit);
}

// `columns` of a unit, which may be less than its registers have room for.
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

// Rows of a unit. Codes that take longer to unpack become bytes first where there are more, and so need no larger ones.
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
