// Linear layers on packed weights: y = act(x · Wᵀ + bias), or x · Wᵀ + bias + residual. The arguments that the compiled-once half
// passes.
//
// A packed weight is a row of tiles of 64 columns (outputs), each contiguous and read front to back:
//
//   bf16         [ceil(depth / 2)][64][2]                          two adjacent k of a column side by side
//   fp16, fp32   [depth][64]
//   integers     float column_scale[64]
//                then for each block of k: its head, which has the scales (Scales), and its codes (Codes)
//   tables       float column_scale[64], all 1; float table[64][16], which the codes of a column choose from
//                then the codes, in blocks of 128 k: see linear_tables.hpp
//
// Codes of 8 and 4 bits are in lines [64][4] of bytes, one for 4 or 8 k: of a column's four bytes k 0..3 are all, or the low
// halves, 4..7 the high ones. Others are in steps of several lines, for each bit of a code above the fourth, or second, planes of
// their own: see linear_codes.hpp. They are stored unsigned: value + middle, half of as many as there are, or value + zero. A
// block is one group of k that share a scale, or eight or sixteen groups in 256 k. A weight is
// ((stored - zero) * scale + minimum) * column_scale. The last group may be shorter; k is padded to a whole step there.
//
// Paired weights (gates and ups of a gated layer) have gate columns [32 t, 32 t + 32) in the first half of tile t and
// the ups that go with them in the second.
//
// Where columns are few, K is cut into slices, so that many threads find work: the sum over a slice begins at zero, and an
// output's total is ((slice 0 + slice 1) + slice 2) + ... A weight's slices follow from its shape alone (weight.cpp), so the
// bits depend on neither rows nor threads. Exact sums of integers over all of k have no order, and need no care for it.
//
// K may be in leaves, two, four or eight alike: each packed, rounded and sliced for itself, with scales of x of its own. Their sums
// are added as a tree, (0 + 1) + (2 + 3): a rank with half of the leaves has half of the sum (docs/parallel.md).
#pragma once

#include "dispatch.hpp"
#include "weight_formats.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kTileColumns = 64;
inline constexpr index_t kPairedColumns = kTileColumns / 2;
inline constexpr index_t kWholeDepth = 0;  // a weight's `group`: one scale for each column
inline constexpr index_t kMostLeaves = 8;
inline constexpr index_t kTreeHeight = 4;  // places for sums of leaves that are not added yet, at most: log2(kMostLeaves) + 1
static_assert(1 << (kTreeHeight - 1) == kMostLeaves);

// What x becomes where weights are integers (kernels/linear_quantize.hpp); `quintet.executor.backends.cpu.ops.host_linear.Inputs`. In groups: of
// the weight's, or by row where it has none.
enum class Inputs : int { sixteen_bits, eight_bits, eight_bits_in_groups };
inline constexpr int kInputs = 3;
constexpr bool are_eight_bits(Inputs inputs) { return inputs != Inputs::sixteen_bits; }

// k that are unpacked together, and the bytes of a tile that they are.
struct CodeStep {
  index_t k, bytes;
};
constexpr CodeStep step_of(Codes codes) {
  constexpr index_t line = kTileColumns * 4;
  switch (codes) {
    case Codes::eight: return {4, line};
    case Codes::four:
    case Codes::table: return {8, line};
    case Codes::six: return {16, 3 * line};
    case Codes::five: return {32, 5 * line};
    case Codes::three: return {16, line + line / 2};
    default: return {16, line};
  }
}
// The stored integer that means zero where groups have no zero points of their own. A power of two.
constexpr std::int32_t middle_of(Codes codes) {
  switch (codes) {
    case Codes::four: return 8;
    case Codes::six: return 32;
    case Codes::five: return 16;
    case Codes::three: return 4;
    case Codes::two: return 2;
    default: return 128;
  }
}
// Whether a group's numbers are not scale times (stored - middle) alone.
constexpr bool shifts(Scales scales) {
  return scales == Scales::half_zero || scales == Scales::half_minimum || scales == Scales::bytes_minimum ||
         scales == Scales::nibbles || scales == Scales::single_zero || scales == Scales::single_shift;
}

// What is added to a number that its column's table has.
struct Outlier {
  std::uint16_t k, lane;  // of a run; of a tile
  float number;
};

// Runs of them: those of one tile, of kOutlierDepth k and kOutlierColumns lanes, side by side; see outlier_run. Behind the tiles
// in memory, runs' begins first.
inline constexpr index_t kOutlierDepth = 256, kOutlierColumns = 16;
struct Outliers {
  std::uint32_t* begins;  // of all runs, and the end; null: there are no outliers
  Outlier* numbers;
  index_t most, bytes;
};

// Of a weight in leaves the first; the others follow in memory, and say of themselves what this one says.
struct Weight {
  Dtype format;  // int8 for integers of all kinds
  index_t columns, depth;
  index_t group;  // of k that share a scale, or kWholeDepth
  bool paired;
  bool dot;  // bf16: multiplied with the processor's dot product of pairs, if this instruction set has it
  bool follows;        // the processor finds out by itself what is read front to back
  index_t asked_rows;  // up to so many, a pass over a tile of integers asks nevertheless for what it reads
  char* memory;
  index_t tiles, tile_bytes;
  // integers only:
  Codes codes;
  Scales scales;
  index_t block;        // k of a head; all of them without groups
  index_t blocks;       // how many
  index_t block_bytes;  // from one to the next
  index_t tile_head;    // bytes of a tile before them
  index_t head_bytes;   // of these before the codes
  unsigned char table[16];
  Values values;
  Outliers outliers;  // of tables alone
  // k [i * slice_depth, (i + 1) * slice_depth) are slice i; the last may be shorter. A multiple of 256, and so of whole groups
  index_t slices, slice_depth;
  index_t leaves;  // `depth`, `slices`, and all else but these, is of one
  index_t whole_depth, whole_slices;
};

// The tile of a column, and where it lies there.
void tile_and_lane(const Weight& weight, index_t column, index_t& tile, index_t& lane);

// Which run of outliers a lane of a tile has at k. Those of its next lanes follow.
constexpr index_t outlier_run(const Weight& weight, index_t tile, index_t k, index_t lane) {
  const index_t pieces = (weight.depth + kOutlierDepth - 1) / kOutlierDepth;
  return (tile * pieces + k / kOutlierDepth) * (kTileColumns / kOutlierColumns) + lane / kOutlierColumns;
}

// One multiplication. Its work's items are slices of panels of parts: the first of k, or all of it, for rows
// [panel * panel_rows, ...) by `width` columns of one tile, then other columns, other rows, the next slice. See item_of.
struct LinearCall {
  const Weight* weight;
  Dtype dtype;    // of x, bias, residual
  Dtype y_dtype;  // the same; or fp32: sums as they are, plus the bias, without residual or activation (ranks.hpp; logits)
  const void* x;
  index_t x_stride, rows;
  const void* bias;      // [columns] or null
  const void* residual;  // laid out like y, may be y; or null
  void* y;
  index_t y_stride;
  Activation activation;  // of the gates of paired weights, which have one; of others' results, or none; never with a residual
  float gate_factor, gate_limit;  // of clamped_swiglu alone
  Inputs inputs;
  // x as the kernel multiplies it, written by LinearKernels::prepare, or x itself where there is nothing to prepare
  bool is_prepared;
  void* prepared;
  index_t prepared_stride;  // bytes from a row to the next
  index_t prepared_leaf;   // bytes from a leaf of k to the next
  index_t x_group;          // of k that share a scale of x (integers only)
  // how it is split
  index_t panel_rows, panels, width, parts, items, threads;
  // Whether each slice of each leaf is an item of its own. It puts its sums in `partials`; the thread with an output's last one
  // adds them up and finishes. Otherwise an item has all slices in turn.
  bool sliced;
  float* partials;         // [leaves][slices][tiles][rows][64]
  std::uint32_t* pending;  // [panels][parts]: slices that are there; zeros before and after
};

// The columns of one item, its rows, and its k. Columns [from, to) of the tile; of `spans` = 2 (narrow items of paired weights)
// the ups that go with these gates as well: [from + 32, to + 32).
struct LinearItem {
  index_t tile, from, to, spans;
  index_t row, rows;    // of x and y
  index_t leaf, slice;  // of a sliced call; slices of all leaves are counted through
  index_t k, k_end;     // of a leaf
  index_t output;       // which of `pending`
};

LinearItem item_of(const LinearCall& call, index_t item);
// The call of one leaf of k, as far as its sums.
LinearCall leaf_of(const LinearCall& call, index_t leaf);

struct Preparation {
  index_t from_rows;  // fewer rows need none
  index_t row_bytes, x_group;
  index_t panel_rows = 0;  // rows of prepared x that stay in a cache while weights pass; 0: it does not matter
  index_t panel_step = 12;  // rows of whole units; a panel has whole ones, and at least two
  index_t together = 1;     // items of many rows that a thread had better take at a time: they share a slice of x
};

inline constexpr index_t kNever = 1 << 30;  // rows

struct LinearKernels {
  Preparation (*preparation)(const Weight& weight, Dtype dtype, Inputs inputs);  // how x must be rewritten
  index_t (*prepare_items)(const LinearCall& call);  // how many items `prepare` has, of one leaf of k
  void (*prepare)(const void* call, index_t begin, index_t end);   // work over them
  void (*multiply)(const void* call, index_t begin, index_t end);  // work over its items
};

// Columns [first, first + count) of a weight, from or to rows of a row-major matrix. Work over the weight's tiles.
struct PackCall {
  const Weight* weight;
  const void* source;
  Dtype source_dtype;
  index_t source_stride;  // elements
  index_t first, count;
  index_t first_tile;
  float* out;  // of `read`: [count][depth], rows `out_stride` apart
  index_t out_stride;
};

// The same columns from integers and what they are multiplied with. `codes.source` are bytes. Work over the weight's tiles.
struct CodesCall {
  PackCall codes;
  bool is_signed;
  const void* scales;  // [count][ceil(depth / scale_group)]
  Dtype scale_dtype;
  index_t scale_stride, scale_group;  // elements; k
  const float* factors;               // [count]; of fp4 alone, or null
  const void* zeros;                  // laid out like scales, or null: bytes, or fp32 of single_zero
  index_t zero_stride;                // elements
  std::uint32_t* problems;  // a sum of Problem's, added to by all threads
};

// Rows of y from columns of a packed weight. Work over tokens.
struct PackedEmbeddingCall {
  const Weight* weight;
  const std::int32_t* token_ids;
  void* y;
  index_t y_stride;
  Dtype dtype;
};

// The same columns from codes, bytes as well, and a table for each. Work over the weight's tiles.
struct TablesCall {
  PackCall codes;
  const float* tables;  // [count][16]
  std::uint32_t* problems;  // as of a CodesCall
};

struct PackKernels {
  void (*fill)(const void* pack_call, index_t begin, index_t end);
  void (*fill_codes)(const void* codes_call, index_t begin, index_t end);
  void (*fill_tables)(const void* tables_call, index_t begin, index_t end);
  void (*fill_blocks)(const void* pack_call, index_t begin, index_t end);  // source: bytes, as files of GGUF have them
  void (*read)(const void* pack_call, index_t begin, index_t end);  // work over columns
  void (*embed)(const void* embedding_call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(LinearKernels, float_linear)
QT_DECLARE_KERNELS(LinearKernels, integer_linear)
QT_DECLARE_KERNELS(LinearKernels, tables_linear)
QT_DECLARE_KERNELS(PackKernels, pack)

}  // namespace qt
