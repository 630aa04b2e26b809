// Linear layers on packed weights: y = act(x · Wᵀ + bias), or x · Wᵀ + bias + residual. Arguments of the kernels.
//
// A packed weight is a sequence of tiles of 64 columns (outputs). Each tile is contiguous and read sequentially:
//
//   bf16         [ceil(depth / 2)][64][2]                          two adjacent k of a column side by side
//   fp16, fp32   [depth][64]
//   integers     float column_scale[64]
//                then, for each scale block of k: its head with the scales (Scales), and its codes (Codes)
//   tables       float column_scale[64], all 1; float table[64][16], the lookup table of each column
//                then the codes, in scale blocks of 128 k: see kernels/linear/linear_tables.hpp
//
// 8-bit and 4-bit codes are stored in lines of bytes [64][4]: four bytes for each column. A line of 8-bit codes holds 4 k. A
// line of 4-bit codes holds 8 k: k 0..3 in the low halves of the four bytes, k 4..7 in the high halves. Codes of other widths
// are stored in steps of several lines. Each bit above the fourth, or the second, has its own bit plane: see
// kernels/linear/linear_codes.hpp. Codes are unsigned: value + middle, where middle is half of the number of codes, or value +
// zero point.
// A scale block is one group, or eight or sixteen groups in 256 k. A weight is ((stored - zero) * scale + minimum) *
// column_scale. The last group may be shorter; its k is padded to a full step.
//
// Paired weights (gates and ups of a gated layer) have gate columns [32 t, 32 t + 32) in the first half of tile t and the
// corresponding ups in the second half.
//
// If a weight has few columns, K is cut into slices to occupy all threads. The sum of a slice starts at zero; an output is
// ((slice 0 + slice 1) + slice 2) + ... The slices depend on the shape of the weight only (weight.cpp), so the bits depend
// neither on rows nor on threads. Integer sums over all of k are exact in any order.
//
// K may be divided into two, four or eight equal leaves. Each leaf is packed, rounded and sliced by itself, with its own scales
// of x. The sums of leaves are added as a tree, (0 + 1) + (2 + 3): a rank with half of the leaves has half of the sum
// (docs/parallel.md).
#pragma once

#include "dispatch.hpp"
#include "weight_formats.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kTileColumns = 64;
inline constexpr index_t kPairedColumns = kTileColumns / 2;
inline constexpr index_t kWholeDepth = 0;  // a weight's `group`: one scale for each column
inline constexpr index_t kMostLeaves = 8;
inline constexpr index_t kTreeHeight = 4;  // most pending sums of leaves in the tree: log2(kMostLeaves) + 1
static_assert(1 << (kTreeHeight - 1) == kMostLeaves);

// Format of x for integer weights (kernels/linear/linear_quantize.hpp); `quintet.executor.backends.cpu.ops.host_linear.Inputs`.
// eight_bits_in_groups: one scale for each group of the weight, or for each row if the weight has no groups.
enum class Inputs : int { sixteen_bits, eight_bits, eight_bits_in_groups };
inline constexpr int kInputs = 3;
constexpr bool are_eight_bits(Inputs inputs) { return inputs != Inputs::sixteen_bits; }

// k that are unpacked together, and their bytes in a tile.
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
// The code of zero where groups have no zero points. A power of two.
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
// True if a group's numbers are not just scale times (stored - middle).
constexpr bool shifts(Scales scales) {
  return scales == Scales::half_zero || scales == Scales::half_minimum || scales == Scales::bytes_minimum ||
         scales == Scales::nibbles || scales == Scales::single_zero || scales == Scales::single_shift;
}

// A number added to the table value of one weight element.
struct Outlier {
  std::uint16_t k, lane;  // k within a run; lane within a tile
  float number;
};

// Runs of outliers. A run covers kOutlierDepth k and kOutlierColumns adjacent lanes of one tile; see outlier_run. They lie
// after the tiles in memory; the offsets of the runs come first.
inline constexpr index_t kOutlierDepth = 256, kOutlierColumns = 16;
struct Outliers {
  std::uint32_t* begins;  // offset of each run, and the end; null: no outliers
  Outlier* numbers;
  index_t most, bytes;
};

// A packed weight. A weight in leaves is an array of leaves. The fields that describe the whole weight are equal in all leaves.
struct Weight {
  Dtype format;  // int8 for all coded formats
  index_t columns, depth;
  index_t group;  // k with one scale, or kWholeDepth
  bool paired;
  bool dot;  // bf16: use the processor's dot product of pairs, if this instruction set has one
  bool follows;        // hardware prefetchers detect the sequential read
  index_t asked_rows;  // up to this many rows, a pass over a tile of integers prefetches in software nevertheless
  char* memory;
  index_t tiles, tile_bytes;
  // integers only:
  Codes codes;
  Scales scales;
  index_t block;        // k of a scale block; all k if there are no groups
  index_t blocks;       // number of scale blocks
  index_t block_bytes;  // from one scale block to the next
  index_t tile_head;    // bytes of a tile before the scale blocks
  index_t head_bytes;   // bytes of a scale block before its codes
  unsigned char table[16];
  Values values;
  Outliers outliers;  // tables only
  // Slice i is k [i * slice_depth, (i + 1) * slice_depth); the last one may be shorter. slice_depth is a multiple of 256, hence
  // of every group.
  index_t slices, slice_depth;
  index_t leaves;  // `depth`, `slices` and all other fields except these three describe one leaf
  index_t whole_depth, whole_slices;
};

// Computes the tile and the lane of a column.
void tile_and_lane(const Weight& weight, index_t column, index_t& tile, index_t& lane);

// Index of the run with the outliers of a lane at k. The runs of the next lanes follow.
constexpr index_t outlier_run(const Weight& weight, index_t tile, index_t k, index_t lane) {
  const index_t pieces = (weight.depth + kOutlierDepth - 1) / kOutlierDepth;
  return (tile * pieces + k / kOutlierDepth) * (kTileColumns / kOutlierColumns) + lane / kOutlierColumns;
}

// One matrix product. Items in order: `width` columns of a tile (fastest), then panels of `panel_rows` rows, then slices of k,
// or all k at once. See item_of.
struct LinearCall {
  const Weight* weight;
  Dtype dtype;    // of x, bias, residual
  Dtype y_dtype;  // equal to dtype; or fp32: unrounded sums plus bias, without residual or activation (ranks.hpp; logits)
  const void* x;
  index_t x_stride, rows;
  const void* bias;      // [columns] or null
  const void* residual;  // layout of y, may be y; or null
  void* y;
  index_t y_stride;
  Activation activation;  // of the gates of paired weights (required); of the results of other weights, or none; never with a
                          // residual
  float gate_factor, gate_limit;  // clamped_swiglu only
  Inputs inputs;
  // x in the kernel's format, written by LinearKernels::prepare; x itself if it needs no preparation
  bool is_prepared;
  void* prepared;
  index_t prepared_stride;  // bytes from one row to the next
  index_t prepared_leaf;   // bytes from one leaf of k to the next
  index_t x_group;          // k with one scale of x (integers only)
  // cut of the product
  index_t panel_rows, panels, width, parts, items, threads;
  // true: each slice of each leaf is an item. It stores its sums in `partials`; the thread that completes an output's last
  // slice adds the slices and finishes the output. false: an item computes all slices in turn.
  bool sliced;
  float* partials;         // [leaves][slices][tiles][rows][64]
  std::uint32_t* pending;  // [panels][parts]: number of completed slices; zero before and after the product
};

// Columns, rows and k of one item. Columns [from, to) of the tile. spans = 2 (narrow items of paired weights): also the ups of
// these gates, [from + 32, to + 32).
struct LinearItem {
  index_t tile, from, to, spans;
  index_t row, rows;    // of x and y
  index_t leaf, slice;  // of a sliced call; the slice index counts the slices of all leaves
  index_t k, k_end;     // within a leaf
  index_t output;       // index in `pending`
};

LinearItem item_of(const LinearCall& call, index_t item);
// The call of one leaf of k, up to its sums.
LinearCall leaf_of(const LinearCall& call, index_t leaf);

struct Preparation {
  index_t from_rows;  // fewer rows need no preparation
  index_t row_bytes, x_group;
  index_t panel_rows = 0;  // rows of prepared x that stay in a cache during a pass over the weights; 0: no limit
  index_t panel_step = 12;  // rows of a full unit; a panel has full units, at least two
  index_t together = 1;     // items of many rows that a thread should take together: they share a slice of x
};

inline constexpr index_t kNever = 1 << 30;  // rows

struct LinearKernels {
  Preparation (*preparation)(const Weight& weight, Dtype dtype, Inputs inputs);  // preparation that x needs
  index_t (*prepare_items)(const LinearCall& call);  // number of items of `prepare` for one leaf of k
  void (*prepare)(const void* call, index_t begin, index_t end);   // work over these items
  void (*multiply)(const void* call, index_t begin, index_t end);  // work over the items of the call
};

// Packing of columns [first, first + count) of a weight from rows of a row-major matrix, or the reverse. Work over the tiles of
// the weight.
struct PackCall {
  const Weight* weight;
  const void* source;
  Dtype source_dtype;
  index_t source_stride;  // in elements
  index_t first, count;
  index_t first_tile;
  float* out;  // of `read`: [count][depth], rows `out_stride` apart
  index_t out_stride;
};

// Packing of the same columns from codes and their scales. `codes.source` are bytes. Work over the tiles of the weight.
struct CodesCall {
  PackCall codes;
  bool is_signed;
  const void* scales;  // [count][ceil(depth / scale_group)]
  Dtype scale_dtype;
  index_t scale_stride, scale_group;  // in elements; in k
  const float* factors;               // [count]; fp4 only, or null
  const void* zeros;                  // layout of scales, or null: bytes, or fp32 for single_zero
  index_t zero_stride;                // in elements
  std::uint32_t* problems;  // bit set of Problem, updated by all threads
};

// Embedding: rows of y from columns of a packed weight. Work over tokens.
struct PackedEmbeddingCall {
  const Weight* weight;
  const std::int32_t* token_ids;
  void* y;
  index_t y_stride;
  Dtype dtype;
};

// Packing of the same columns from codes (bytes) and one table per column. Work over the tiles of the weight.
struct TablesCall {
  PackCall codes;
  const float* tables;  // [count][16]
  std::uint32_t* problems;  // see CodesCall
};

struct PackKernels {
  void (*fill)(const void* pack_call, index_t begin, index_t end);
  void (*fill_codes)(const void* codes_call, index_t begin, index_t end);
  void (*fill_tables)(const void* tables_call, index_t begin, index_t end);
  void (*fill_blocks)(const void* pack_call, index_t begin, index_t end);  // source: bytes of a GGUF file
  void (*read)(const void* pack_call, index_t begin, index_t end);  // work over columns
  void (*embed)(const void* embedding_call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(LinearKernels, float_linear)
QT_DECLARE_KERNELS(LinearKernels, integer_linear)
QT_DECLARE_KERNELS(LinearKernels, tables_linear)
QT_DECLARE_KERNELS(PackKernels, pack)

}  // namespace qt
