// y[M, N] = x[M, K] · W[N, K]ᵀ with 4-bit indices into a table per column, plus sparse outliers, in fp32.
//
// A thread owns 64 columns (a tile; 32 or 16 if tiles are few) for a panel of up to 192 rows. It computes all slices of k, or
// one. K is divided into pieces, a piece into units of rows, a unit into blocks of columns. Lanes are k. A register of one
// column's codes is shifted and indexes the column's table, which is in a register (AVX-512: one permutation for 16 numbers). The
// result is multiplied with a register of each row's x. No broadcast or transpose is needed. Up to 12 rows share a lookup; other
// units repeat it. Each output has 16 sums, which are added once a piece. Then come the piece's outliers, stored in runs beside
// the codes (linear.hpp): outlier * x is added to the column's sum.
//
// x is first widened to fp32 and zero-padded to whole blocks, because padding codes also select table entries.
//
// Bytes per panel: the weight once, each line prefetched; x once per tile from cache. Limiter for one row: permutations, one for
// 16 numbers, about as slow as the memory read of their 8 bytes. For more rows: the multiply rate.
//
// Reduction order of an output: a piece's k ascending in 16 sums, k modulo 16. These by halves, 8 apart, 4, 2, 1. Then + earlier
// pieces, the piece's outliers with k ascending, and the slices ascending. Independent of rows and columns, and of the
// instruction set if it has fused multiply-add.
#include "linear_tables.hpp"

#include "linear_tile.hpp"
#include "thread_memory.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kPiece = kOutlierDepth;
constexpr index_t kAhead = kPiece * kTileColumns / 2;  // bytes: a piece
constexpr int kVectors = int(kWordsOfLine) / kLanes;   // of a line
#if defined(__AVX512F__)
constexpr int kUnitRows = 12;
constexpr int columns_of(int rows) { return rows == 1 ? 8 : rows <= 4 ? 4 : 2; }
#else
constexpr int kUnitRows = 3;
constexpr int columns_of(int rows) { return rows == 1 ? 4 : 2; }
#endif
static_assert(kOutlierColumns % columns_of(1) == 0 && kWordsOfLine % kLanes == 0);

// Buffers of a thread.
struct alignas(64) Buffers {
  float total[kMaxPanelRows * kTileColumns];
  float sums[kMaxPanelRows * kTileColumns];  // of a slice
};

// A unit's share of a piece, for some columns.
struct Unit {
  const float* x;
  index_t x_stride;
  const float* tables;
  const char* codes;  // of the first column
  index_t blocks;
  float* sums;  // [rows][64], from the first column on
  bool first;   // sums begin at zero
};

QT_INLINE f32v shuffled(f32v a, f32v b, i32v lanes) {
#if defined(__clang__)
  f32v chosen;
  for (int i = 0; i < kLanes; ++i) chosen[i] = lanes[i] < kLanes ? a[lanes[i]] : b[lanes[i] - kLanes];
  return chosen;
#else
  return __builtin_shuffle(a, b, lanes);
#endif
}

// For vectors with groups of `Width` lanes: adds the two halves of each group, groups of `a` first.
template <int Width>
QT_INLINE f32v added_halves(f32v a, f32v b) {
  i32v low, high;
  for (int i = 0; i < kLanes; ++i) {
    const int group = i / (Width / 2), in_group = i % (Width / 2);
    low[i] = group * Width + in_group;  // groups of b follow those of a
    high[i] = low[i] + Width / 2;
  }
  return shuffled(a, b, low) + shuffled(a, b, high);
}

// Rotates lanes by `Apart`.
template <int Apart>
QT_INLINE f32v turned(f32v value) {
  i32v lanes;
  for (int i = 0; i < kLanes; ++i) lanes[i] = (i + Apart) % kLanes;
  return shuffled(value, value, lanes);
}

// Codes in the lowest bits; a permutation of a 16-entry table ignores the other bits.
QT_INLINE i32v low_nibbles(i32v words) { return kLanes == kTableSize ? words : words & 15; }

// Sums of the lanes of C vectors, in lanes 0, kLanes / C, ...
template <int C, int Width = kLanes>
QT_INLINE f32v folded(const f32v (&vectors)[C]) {
  if constexpr (C == 1 && Width == 1) {
    return vectors[0];
  } else if constexpr (C == 1) {
    const f32v halves[1] = {vectors[0] + turned<Width / 2>(vectors[0])};
    return folded<1, Width / 2>(halves);
  } else {
    f32v halves[C / 2];
#pragma GCC unroll 4
    for (int i = 0; i < C / 2; ++i) halves[i] = added_halves<Width>(vectors[2 * i], vectors[2 * i + 1]);
    return folded<C / 2, Width / 2>(halves);
  }
}

template <int R>
void multiply_unit(const Unit& unit) {
  constexpr int C = columns_of(R);
  f32v sums[R][C][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][c][v] = f32v{};
  const float* x = unit.x;
  const char* codes = unit.codes;
  for (index_t block = 0; block < unit.blocks; ++block, codes += kTableLine * kTileColumns) {
    i32v words[C][kVectors];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      __builtin_prefetch(codes + kAhead + c * kTableLine, 0, 3);
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) words[c][v] = load_bits(codes + c * kTableLine + v * kLanes * 4);
    }
    for (index_t turn = 0; turn < kTableBlock / kWordsOfLine; ++turn, x += kWordsOfLine)
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        f32v w[C];
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
          w[c] = look_up(unit.tables + c * kTableSize, low_nibbles(words[c][v]));
          words[c][v] = (i32v)((u32v)words[c][v] >> 4);
        }
#pragma GCC unroll 12
        for (int r = 0; r < R; ++r) {
          const f32v its = as_float(load_in_order(x + r * unit.x_stride + v * kLanes));  // loaded once for all columns
#pragma GCC unroll 8
          for (int c = 0; c < C; ++c) sums[r][c][v] = fma(w[c], its, sums[r][c][v]);
        }
      }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; ++r) {
    f32v whole[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) {
      if constexpr (kVectors == 4) whole[c] = (sums[r][c][0] + sums[r][c][2]) + (sums[r][c][1] + sums[r][c][3]);
      if constexpr (kVectors == 2) whole[c] = sums[r][c][0] + sums[r][c][1];
      if constexpr (kVectors == 1) whole[c] = sums[r][c][0];
    }
    float lanes[kLanes];
    store(lanes, folded<C>(whole));
    float* const to = unit.sums + r * kTileColumns;
    for (int c = 0; c < C; ++c) to[c] = unit.first ? lanes[c * (kLanes / C)] : to[c] + lanes[c * (kLanes / C)];
  }
}

using Multiply = void (*)(const Unit&);
struct Way {
  Multiply multiply;
  index_t columns;
};
template <int R = kUnitRows>
Way way_for(index_t rows) {
  if constexpr (R > 1)
    if (rows < R) return way_for<R - 1>(rows);
  return {multiply_unit<R>, columns_of(R)};
}

QT_INLINE float fused(float a, float b, float c) {
#if defined(__FP_FAST_FMAF) || defined(__FMA__) || defined(__aarch64__)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// Adds the outliers of `columns` columns from `column` on, of the piece at k, to some rows.
void add_outliers(const Weight& weight, index_t tile, index_t k, index_t column, index_t columns, const float* x, index_t x_stride,
                  index_t rows, float* sums) {
  const std::uint32_t* const runs = weight.outliers.begins + outlier_run(weight, tile, k, column);
  const Outlier* const end = weight.outliers.numbers + runs[columns / kOutlierColumns];
  for (const Outlier* its = weight.outliers.numbers + runs[0]; its < end; ++its) {
    const float* from = x + its->k;
    float* to = sums + its->lane;
    for (index_t r = 0; r < rows; ++r, from += x_stride, to += kTileColumns) *to = fused(its->number, *from, *to);
  }
}

// Computes all slices of an item. The first slice accumulates in `first_sums`, which receives the total.
void multiply_slices(const LinearCall& call, const LinearItem& item, float* first_sums, Buffers& buffers) {
  const Weight& weight = *call.weight;
  const char* const tile = weight.memory + item.tile * weight.tile_bytes;
  const index_t count = (item.rows + kUnitRows - 1) / kUnitRows, span = item.to - item.from;
  Unit unit;
  unit.x_stride = call.prepared_stride / index_t(sizeof(float));
  for (index_t begin = item.k, end; begin < item.k_end; begin = end) {
    end = item.k_end - begin < kPiece ? item.k_end : begin + kPiece;
    float* const sums = begin < item.k + weight.slice_depth ? first_sums : buffers.sums;
    unit.blocks = (end - begin + kTableBlock - 1) / kTableBlock;
    unit.first = begin % weight.slice_depth == 0;
    for (index_t u = 0, row = 0, rows; u < count; ++u, row += rows) {
      rows = item.rows / count + (u < item.rows % count);
      const Way way = way_for(rows);
      unit.x = (const float*)((const char*)call.prepared + (item.row + row) * call.prepared_stride) + begin;
      float* const mine = sums + row * kTileColumns;
      for (index_t place = 0; place < span * item.spans; place += way.columns) {
        const index_t column = column_of(item, place);
        unit.tables = table_at(tile, column), unit.codes = line_at(weight, tile, begin / kTableBlock, column);
        unit.sums = mine + column;
        way.multiply(unit);
      }
      for (index_t place = 0; weight.outliers.begins && place < span * item.spans; place += span)
        add_outliers(weight, item.tile, begin, column_of(item, place), span, unit.x, unit.x_stride, rows, mine);
    }
    if (sums != first_sums && (end == item.k_end || end % weight.slice_depth == 0)) add_sums(item, item.rows, sums, first_sums);
  }
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  Buffers& buffers = *(Buffers*)thread_memory(sizeof(Buffers));
  for (index_t i = begin; i < end; ++i) {
    const LinearItem item = item_of(call, i);
    multiply_slices(call, item, call.sliced ? partials_of(call, item, item.slice) : buffers.total, buffers);
    if (call.sliced) {
      if (!brings_last_slice(call, item)) continue;
      add_slices(call, item, buffers.total);
    }
    finish_for(call)({call, item.tile, item.from, item.to}, buffers.total, item.row, item.rows);
  }
}

// Sets of an L1 cache. The row stride spreads a unit's pieces, 16 lines each, over as many sets as possible.
constexpr index_t kSets = 64, kLinesApart = 17;

index_t padded(index_t depth) { return (depth + kTableBlock - 1) / kTableBlock * kTableBlock; }

Preparation preparation(const Weight& weight, Dtype, Inputs) {
  const index_t lines = padded(weight.depth) * index_t(sizeof(float)) / 64;
  return {1, (lines + (kLinesApart - lines % kSets + kSets) % kSets) * 64, 0};
}

index_t prepare_items(const LinearCall& call) { return call.rows; }

template <class Element>
void widen_row(const Element* x, index_t depth, float* out) {
  index_t k = 0;
  for (; k < depth; k += kLanes) store(out + k, load(x + k, depth - k));
  for (; k < padded(depth); k += kLanes) store(out + k, f32v{});
}

void prepare(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  const index_t depth = call.weight->depth;
  for (index_t row = begin; row < end; ++row) {
    float* const out = (float*)((char*)call.prepared + row * call.prepared_stride);
    const index_t at = row * call.x_stride;
    if (call.dtype == Dtype::bf16)
      widen_row((const bf16*)call.x + at, depth, out);
    else if (call.dtype == Dtype::fp16)
      widen_row((const fp16*)call.x + at, depth, out);
    else
      widen_row((const float*)call.x + at, depth, out);
  }
}

}  // namespace

const LinearKernels tables_linear = {preparation, prepare_items, prepare, multiply_items};

}  // namespace qt::QT_ISA
