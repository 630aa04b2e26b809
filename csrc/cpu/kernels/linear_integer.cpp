// y[M, N] = x[M, K] · W[N, K]ᵀ with 8- and 4-bit weights, multiplied as integers: nothing is dequantized.
//
// x is quantized first (kernels/linear_quantize.hpp), per row and group of k to 16 bits, or per row to 8. 16-bit x goes
// as two signed bytes, high * 256 + low; with VNNI a register of weights (16 columns x 4 k) is multiplied with each by
// one VPDPBUSD. Without VNNI, weights are widened to 16 bits in registers and multiplied in pairs (PMADDWD). 4-bit
// weights become bytes in registers, or, where many rows share them, once into a buffer.
//
// A thread owns a tile of columns for a panel of rows, as in linear_float.cpp; a unit is 3 rows x 64 columns x 2 sums
// (16-bit x) or 6 rows x 64 columns. Bytes per panel: the weight once (1 or 1/2 byte a number, scales beside it), x
// once per tile out of the cache. Limiter: the weight's bandwidth up to some 20 rows, then the multiply rate, half of
// it for 16-bit x.
//
// Reduction order: the sum over a group of k is an integer and exact: the same on every processor, in any order. Then,
// groups ascending, fma(float(sum), scale of w * scale of x, result), and once at the end the column's scale.
#include "linear_quantize.hpp"
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kPiece = 512;                   // k at a time; whole groups
constexpr index_t kExpandFrom = 12;               // rows in a panel from which 4-bit weights are expanded once
constexpr index_t kLineBytes = kTileColumns * 4;  // 4 k (8 bits) or 8 k (4 bits) of a tile

#if defined(__AVX512VNNI__)
QT_INLINE i32v dot(i32v sum, i32v weights, std::int32_t x) {
  return (i32v)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)weights, _mm512_set1_epi32(x));
}

QT_INLINE std::int32_t word_at(const char* from) {
  std::int32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
}

// 16-bit x: two sums, of high and of low bytes.
struct Dot16 {
  static constexpr int kSums = 2, kUnitRows = 3;
  static constexpr index_t x_bytes = 8;  // for 4 k
  template <int V>
  QT_INLINE void step(i32v (&sums)[V][kSums], const i32v (&w)[V], const char* x) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v][0] = dot(sums[v][0], w[v], word_at(x));
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v][1] = dot(sums[v][1], w[v], word_at(x + 4));
  }
  QT_INLINE i32v total(const i32v (&sums)[kSums]) { return (sums[0] << 8) + sums[1]; }
};

// 8-bit x.
struct Dot8 {
  static constexpr int kSums = 1, kUnitRows = 6;
  static constexpr index_t x_bytes = 4;
  template <int V>
  QT_INLINE void step(i32v (&sums)[V][kSums], const i32v (&w)[V], const char* x) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[v][0] = dot(sums[v][0], w[v], word_at(x));
  }
  QT_INLINE i32v total(const i32v (&sums)[kSums]) { return sums[0]; }
};
#else
// x as 16-bit numbers in the order k, k + 2, k + 1, k + 3, whichever its precision.
struct Dot16 {
  static constexpr int kSums = 1, kUnitRows = 4;
  static constexpr index_t x_bytes = 8;
  template <int V>
  QT_INLINE void step(i32v (&sums)[V][kSums], const i32v (&w)[V], const char* x) {
    const i32v even_x = spread_word(x), odd_x = spread_word(x + 4), bytes = all(std::int32_t(0x00FF00FF));
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      sums[v][0] = multiply_pairs(sums[v][0], w[v] & bytes, even_x);
      sums[v][0] = multiply_pairs(sums[v][0], (i32v)((u32v)w[v] >> 8) & bytes, odd_x);
    }
  }
  QT_INLINE i32v total(const i32v (&sums)[kSums]) { return sums[0]; }
};
using Dot8 = Dot16;
#endif

// How a unit's weights are scaled: by column at the very end, or also by group; with zero points or without.
enum class Scales { column, group, group_and_zero };

// A unit's share of one piece of k: some groups, or a part of the only one.
struct Unit {
  const char* x;               // of its first row, from the piece's first k on
  const float* x_scales;       // of the piece's first group
  const std::int32_t* x_sums;  // likewise
  index_t x_stride;            // bytes from a row to the next, of all three
  const char* weight;          // integers of the first group; `weight_stride` bytes to the next
  const char* heads;           // scales and zero points of the first group; `head_stride` bytes to the next
  index_t weight_stride, head_stride;
  index_t groups, steps, last_steps;  // steps in a group and in the last one
  std::int32_t zero;                  // the stored integer that means zero
  float* sums;                        // [rows][64]; int32 while the only group is not complete
  bool first, last;                   // the piece begins, completes the depth
  const char* ahead;  // what to prefetch: lines `ahead - weight` beyond those of the first `ahead_steps` steps
  index_t ahead_steps;
  const char* ahead_end;  // but nothing from here on
};

// One line of weights, V registers of 4 k (8 bits) or 8 k (4 bits), by R rows.
template <class Dot, int kBits, int R, int V>
QT_INLINE void step(i32v (&sums)[R][V][Dot::kSums], const char* x, index_t x_stride, const char* weight) {
  i32v w[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) w[v] = load_bits(weight + v * kLanes * 4);
  if constexpr (kBits == 8) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], w, x + r * x_stride);
  } else {
    const i32v nibbles = all(std::int32_t(0x0F0F0F0F));
    i32v half[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) half[v] = w[v] & nibbles;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], half, x + r * x_stride);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) half[v] = (i32v)((u32v)w[v] >> 4) & nibbles;
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) Dot::template step<V>(sums[r], half, x + r * x_stride + Dot::x_bytes);
  }
}

QT_INLINE f32v zero_points(const char* from) {
#if defined(__AVX512F__)
  return to_float((i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from)));
#else
  f32v values;
  for (int i = 0; i < kLanes; ++i) values[i] = float((unsigned char)from[i]);
  return values;
#endif
}

template <class Number>
QT_INLINE const Number* row_of(const Number* from, index_t row, index_t stride_bytes) {
  return (const Number*)((const char*)from + row * stride_bytes);
}

// All of a group, whose integer sums are exact.
template <class Dot, int kBits, int R, int V>
QT_INLINE void sum_group(i32v (&sums)[R][V][Dot::kSums], const Unit& unit, const char* x, const char* weight,
                         index_t steps) {
  constexpr index_t x_step = Dot::x_bytes * (8 / kBits);
  const index_t x_stride = unit.x_stride, ahead = unit.ahead - unit.weight;
  const index_t left = (unit.ahead_end - (weight + ahead) + kLineBytes - 1) / kLineBytes;
  index_t ahead_steps = unit.ahead_steps < steps ? unit.ahead_steps : steps;
  if (left < ahead_steps) ahead_steps = left;  // may be negative: none
  index_t s = 0;
  for (; s < ahead_steps; ++s, x += x_step, weight += kLineBytes) {
#pragma GCC unroll 8
    for (int byte = 0; byte < V * kLanes * 4; byte += 64) __builtin_prefetch(weight + ahead + byte, 0, 2);
    step<Dot, kBits>(sums, x, x_stride, weight);
  }
  for (; s < steps; ++s, x += x_step, weight += kLineBytes) step<Dot, kBits>(sums, x, x_stride, weight);
}

template <class Dot, int kBits, Scales kScales, int R, int V>
void multiply(const Unit& unit, index_t column) {
  const index_t x_stride = unit.x_stride;
  const char* x = unit.x;
  for (index_t g = 0; g < unit.groups; ++g) {
    const index_t steps = g + 1 == unit.groups ? unit.last_steps : unit.steps;
    i32v sums[R][V][Dot::kSums];
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const i32v offset = all(-unit.zero * row_of(unit.x_sums, r, x_stride)[g]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        sums[r][v][0] = i32v{};
        sums[r][v][Dot::kSums - 1] = offset;
      }
    }
    sum_group<Dot, kBits>(sums, unit, x, unit.weight + g * unit.weight_stride + column * 4, steps);
    const char* head = unit.heads + g * unit.head_stride;
    const bool begins = unit.first && g == 0;
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      f32v scale = all(1.0f), zero = f32v{};
      const index_t at = column + v * kLanes;
      if constexpr (kScales != Scales::column) scale = load((const fp16*)head + at);
      if constexpr (kScales == Scales::group_and_zero)
        zero = scale * (all(float(unit.zero)) - zero_points(head + kTileColumns * 2 + at));
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r) {
        float* out = unit.sums + r * kTileColumns + at;
        const f32v x_scale = all(row_of(unit.x_scales, r, x_stride)[g]);
        f32v sum = begins ? f32v{} : load(out);
        sum = fma(to_float(Dot::total(sums[r][v])), kScales == Scales::column ? x_scale : scale * x_scale, sum);
        if constexpr (kScales == Scales::group_and_zero)
          sum = fma(zero, x_scale * float(row_of(unit.x_sums, r, x_stride)[g]), sum);
        store(out, sum);
      }
    }
    x += steps * (Dot::x_bytes * (8 / kBits));
  }
}

// A part of the only group: the integer sums wait where the results will be.
template <class Dot, int R, int V>
void multiply_part(const Unit& unit, index_t column) {
  i32v sums[R][V][Dot::kSums];
  static_assert(Dot::kSums == 1);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
      sums[r][v][0] = unit.first ? all(-unit.zero * row_of(unit.x_sums, r, unit.x_stride)[0])
                                 : load_bits(unit.sums + r * kTileColumns + column + v * kLanes);
  sum_group<Dot, 8>(sums, unit, unit.x, unit.weight + column * 4, unit.steps);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
    const f32v x_scale = all(row_of(unit.x_scales, r, unit.x_stride)[0]);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      const f32v sum = unit.last ? to_float(sums[r][v][0]) * x_scale : as_float(sums[r][v][0]);
      store(unit.sums + r * kTileColumns + column + v * kLanes, sum);
    }
  }
}

// Ways to multiply a unit; `run` is the same for all of its columns.
template <class Dot, int kBits, Scales kScales>
struct Grouped {
  using Sum = Dot;
  template <int R, int V>
  QT_INLINE void run(const Unit& unit, index_t column) {
    multiply<Dot, kBits, kScales, R, V>(unit, column);
  }
};

template <class Dot>
struct Whole {
  using Sum = Dot;
  template <int R, int V>
  QT_INLINE void run(const Unit& unit, index_t column) {
    multiply_part<Dot, R, V>(unit, column);
  }
};

template <class Way, int R>
void multiply_columns(const Unit& unit, index_t from, index_t to) {
  constexpr int V = vectors_for(R);
  for (index_t column = from; column < to;) {
    if (to - column >= V * kLanes) {
      Way::template run<R, V>(unit, column);
      column += V * kLanes;
    } else if (V > 2 && to - column >= 2 * kLanes) {
      Way::template run<R, 2>(unit, column);
      column += 2 * kLanes;
    } else {
      Way::template run<R, 1>(unit, column);
      column += kLanes;
    }
  }
}

template <class Way>
void multiply_rows(const Unit& unit, index_t rows, index_t from, index_t to) {
  constexpr int most = Way::Sum::kUnitRows;
  switch (rows) {
    case 1: return multiply_columns<Way, 1>(unit, from, to);
    case 2: return multiply_columns<Way, 2>(unit, from, to);
    case 3: return multiply_columns<Way, 3>(unit, from, to);
    default: break;
  }
  if constexpr (most > 3) {
    if (rows == 4) return multiply_columns<Way, 4>(unit, from, to);
  }
  if constexpr (most > 4) {
    if (rows == 5) return multiply_columns<Way, 5>(unit, from, to);
    return multiply_columns<Way, 6>(unit, from, to);
  }
}

using MultiplyRows = void (*)(const Unit&, index_t rows, index_t from, index_t to);

template <class Dot>
MultiplyRows way_of(const Weight& weight, bool expanded, bool whole) {
  if (whole) {
    if constexpr (Dot::kSums == 1) return multiply_rows<Whole<Dot>>;
  }
  const bool grouped = weight.group != kWholeDepth;
  if (weight.format == Dtype::int4 && !expanded)
    return weight.zeros ? multiply_rows<Grouped<Dot, 4, Scales::group_and_zero>>
                        : multiply_rows<Grouped<Dot, 4, Scales::group>>;
  if (!grouped) return multiply_rows<Grouped<Dot, 8, Scales::column>>;
  return weight.zeros ? multiply_rows<Grouped<Dot, 8, Scales::group_and_zero>>
                      : multiply_rows<Grouped<Dot, 8, Scales::group>>;
}

// `steps` lines of 4-bit weights as twice as many lines of bytes.
void expand(const char* weight, index_t steps, char* out) {
  const i32v nibbles = all(std::int32_t(0x0F0F0F0F));
  for (index_t s = 0; s < steps; ++s, weight += kLineBytes, out += 2 * kLineBytes)
    for (index_t byte = 0; byte < kLineBytes; byte += kLanes * 4) {
      const i32v w = load_bits(weight + byte), low = w & nibbles, high = (i32v)((u32v)w >> 4) & nibbles;
      std::memcpy(out + byte, &low, sizeof low);
      std::memcpy(out + kLineBytes + byte, &high, sizeof high);
    }
}

// The results' last factor.
void scale_columns(const char* tile, float* sums, index_t rows, index_t from, index_t to) {
  for (index_t c = from; c < to; c += kLanes) {
    const f32v scale = load((const float*)tile + c);
    for (index_t r = 0; r < rows; ++r) store(sums + r * kTileColumns + c, load(sums + r * kTileColumns + c) * scale);
  }
}

template <class Dot>
void multiply_item(const LinearCall& call, const Item& item, const char* weight_end) {
  alignas(64) float sums[kMaxPanelRows * kTileColumns];
  alignas(64) char bytes[kPiece * kTileColumns];
  const Weight& weight = *call.weight;
  const FinishRows finish_rows = finish_for(call.dtype);
  const Finish target{call, item.tile, item.from, item.to};
  const bool grouped = weight.group != kWholeDepth, whole = call.int8_activations && !grouped;
  const bool four = weight.format == Dtype::int4, expanded = four && item.rows >= kExpandFrom;
  const MultiplyRows multiply = way_of<Dot>(weight, expanded, whole);
  const QuantizedX x = quantized_x(call);
  const index_t in_step = four && !expanded ? 8 : 4;  // of k, where the units read
  const index_t in_group = whole ? kPiece : call.x_group;
  const char* tile = weight.memory + item.tile * weight.tile_bytes;
  for (index_t begin = 0; begin < weight.depth; begin += kPiece) {
    const bool last = begin + kPiece >= weight.depth;
    const index_t depth = last ? weight.depth - begin : kPiece;
    const index_t first_group = begin / in_group, groups = (depth + in_group - 1) / in_group;
    const index_t in_last = depth - (groups - 1) * in_group;
    // Groups of weights lie group_bytes apart; without groups, integers lie one after another.
    const index_t group_bytes = grouped ? weight.group_bytes : in_group * kTileColumns / (four ? 2 : 1);
    const char* piece = tile + kTileColumns * 4 + first_group * group_bytes;
    const char* integers = piece + weight.head_bytes;
    Unit unit{};
    unit.weight = integers, unit.weight_stride = group_bytes;
    unit.heads = piece, unit.head_stride = group_bytes;
    unit.groups = groups, unit.zero = four ? 8 : 128;
    unit.steps = (whole ? depth + in_step - 1 : in_group) / in_step,
    unit.last_steps = (in_last + in_step - 1) / in_step;
    unit.first = begin == 0, unit.last = last;
    unit.x_stride = call.prepared_stride;
    if (expanded) {
      const index_t lines = in_group / 8;
      for (index_t g = 0; g < groups; ++g)
        expand(integers + g * group_bytes, g + 1 == groups ? (in_last + 7) / 8 : lines,
               bytes + g * in_group * kTileColumns);
      unit.weight = bytes, unit.weight_stride = in_group * kTileColumns;
    }
    // As many bytes one piece on, which may be the next tile's; each unit fetches its share of them.
    const char* next = integers + kPiece / in_group * group_bytes;
    const index_t share = expanded ? 0 : (unit.steps + item.units - 1) / item.units;
    unit.ahead_end = weight_end;
    for (index_t u = 0; u < item.units; ++u) {
      const index_t row = u * item.unit_rows;
      const index_t rows = item.rows - row < item.unit_rows ? item.rows - row : item.unit_rows;
      if (rows <= 0) break;
      if (last) prefetch_outputs(target, item.row + row, rows);
      const char* x_row = (const char*)call.prepared + (item.row + row) * call.prepared_stride;
      unit.x = x_row + begin / 4 * Dot::x_bytes;
      unit.x_scales = (const float*)(x_row + x.scales_at) + (whole ? 0 : first_group);
      unit.x_sums = (const std::int32_t*)(x_row + x.sums_at) + (whole ? 0 : first_group);
      unit.sums = sums + row * kTileColumns;
      unit.ahead = next + u * share * kLineBytes, unit.ahead_steps = share;
      multiply(unit, rows, item.from, item.to);
      if (!last) continue;
      scale_columns(tile, unit.sums, rows, item.from, item.to);
      finish_rows(target, unit.sums, item.row + row, rows);
    }
  }
}

template <class Dot>
void multiply_items_as(const LinearCall& call, index_t begin, index_t end) {
  const Item last = item_of(call, end - 1, Dot::kUnitRows);
  const char* weight_end = call.weight->memory + (last.tile + 1) * call.weight->tile_bytes;
  prefetch_begin(call.weight->memory + item_of(call, begin, Dot::kUnitRows).tile * call.weight->tile_bytes, weight_end);
  for (index_t i = begin; i < end; ++i) multiply_item<Dot>(call, item_of(call, i, Dot::kUnitRows), weight_end);
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  if (call.int8_activations)
    multiply_items_as<Dot8>(call, begin, end);
  else
    multiply_items_as<Dot16>(call, begin, end);
}

index_t prepare_items(const LinearCall& call) { return call.rows; }

}  // namespace

const LinearKernels integer_linear = {preparation, prepare_items, quantize_rows, multiply_items};

}  // namespace qt::QT_ISA
