// Linear layers on packed weights: y = act(x · Wᵀ + bias), or x · Wᵀ + bias + residual. What the compiled-once half tells the kernels.
//
// A packed weight is a row of tiles of 64 columns (outputs), each contiguous and read front to back:
//
//   bf16         [ceil(depth / 2)][64][2]                          two neighbouring k of a column side by side
//   fp16, fp32   [depth][64]
//   int8, int4   float column_scale[64]
//                then for each group of k:  fp16 scale[64]         only if the weight has groups
//                                           uint8 zero[64]         only with zero points
//                                           [k / 4][64][4] bytes (int8) or [k / 8][64][4] bytes (int4)
//
// Integers are stored unsigned: int8 as value + 128, int4 as value + 8, or either as value + zero; k of a column
// 0..3 in the low and 4..7 in the high halves of its four bytes. A weight is (stored - zero) * scale * column_scale.
// The last group may be shorter; k is padded to 4 or 8 there.
//
// Paired weights (gates and ups of a gated layer) have gate columns [32 t, 32 t + 32) in the first half of tile t and
// the ups that go with them in the second.
//
// Where columns are few, K is cut into slices, so that many threads find work: the sum over a slice begins at zero, and an
// output's total is ((slice 0 + slice 1) + slice 2) + ... A weight's slices follow from its shape alone (weight.cpp), so the
// bits depend on neither rows nor threads. Exact sums of integers over all of k have no order, and need no care for it.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kTileColumns = 64;
inline constexpr index_t kPairedColumns = kTileColumns / 2;
inline constexpr index_t kWholeDepth = 0;  // a weight's `group`: one scale for each column

struct Weight {
  Dtype format;
  index_t columns, depth;
  index_t group;  // of k that share a scale, or kWholeDepth
  bool paired, zeros;
  bool dot;  // bf16: multiplied with the processor's dot product of pairs, if this instruction set has it
  bool fetches;  // one pass over a tile asks far ahead for what it reads front to back, or the processor does by itself
  char* memory;
  index_t tiles, tile_bytes;
  // integers only:
  index_t groups;       // how many; 1 without
  index_t group_bytes;  // from a group to the next
  index_t head_bytes;   // of a group, before its integers
  // k [i * slice_depth, (i + 1) * slice_depth) are slice i; the last may be shorter. A multiple of 256, and so of whole groups
  index_t slices, slice_depth;
};

// One multiplication. Its work's items are slices of panels of parts: the first of k, or all of it, for rows
// [panel * panel_rows, ...) by `width` columns of one tile, then other columns, other rows, the next slice. See item_of.
struct LinearCall {
  const Weight* weight;
  Dtype dtype;  // of x, bias, residual, y
  const void* x;
  index_t x_stride, rows;
  const void* bias;      // [columns] or null
  const void* residual;  // laid out like y, may be y; or null
  void* y;
  index_t y_stride;
  Activation activation;  // of the gates of paired weights, which have one; of others' results, or none; never with a residual
  float gate_factor, gate_limit;  // of clamped_swiglu alone
  bool int8_activations;
  // x as the kernel multiplies it, written by LinearKernels::prepare, or x itself where there is nothing to prepare
  bool is_prepared;
  void* prepared;
  index_t prepared_stride;  // bytes from a row to the next
  index_t x_group;          // of k that share a scale of x (integers only)
  // how it is split
  index_t panel_rows, panels, width, parts, items, threads;
  // Whether each slice is an item of its own. It leaves its sums in `partials`; who brings an output's last one adds them up
  // and finishes. Otherwise an item has all slices in turn.
  bool sliced;
  float* partials;         // [slices][tiles][rows][64]
  std::uint32_t* pending;  // [panels][parts]: slices that are there; zeros before and after
};

// The columns of one item, its rows, and its k. Columns [from, to) of the tile; of `spans` = 2 (narrow items of paired weights)
// the ups that go with these gates as well: [from + 32, to + 32).
struct LinearItem {
  index_t tile, from, to, spans;
  index_t row, rows;  // of x and y
  index_t slice;      // of a sliced call
  index_t k, k_end;
  index_t output;     // which of `pending`
};

LinearItem item_of(const LinearCall& call, index_t item);

struct Preparation {
  index_t from_rows;  // fewer rows need none
  index_t row_bytes, x_group;
  index_t panel_rows = 0;  // rows whose prepared x stays in a cache while weights pass; 0: it does not matter
  index_t panel_step = 12;  // rows of whole units; a panel has whole ones, and at least two
  index_t together = 1;     // items of many rows that a thread had better take at a time: they share a slice of x
};

inline constexpr index_t kNever = 1 << 30;  // rows

struct LinearKernels {
  Preparation (*preparation)(const Weight& weight, Dtype dtype, bool int8_activations);  // how x must be rewritten
  index_t (*prepare_items)(const LinearCall& call);  // how many items `prepare` has
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
  float* out;  // of `read`: [count][depth]
};

// What the numbers of a checkpoint are that the packed form does not hold; see qt_weight_fill_codes.
enum class Problem : std::uint32_t { code = 1, scale = 2 };

// The same columns from integers and what they are multiplied with. `codes.source` are bytes. Work over the weight's tiles.
struct CodesCall {
  PackCall codes;
  bool is_signed;
  const void* scales;  // [count][ceil(depth / scale_group)]
  Dtype scale_dtype;
  index_t scale_stride, scale_group;  // elements; k
  const unsigned char* zeros;         // laid out like scales, or null
  index_t zero_stride;
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

struct PackKernels {
  void (*fill)(const void* pack_call, index_t begin, index_t end);
  void (*fill_codes)(const void* codes_call, index_t begin, index_t end);
  void (*read)(const void* pack_call, index_t begin, index_t end);  // work over columns
  void (*embed)(const void* embedding_call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(LinearKernels, float_linear)
QT_DECLARE_KERNELS(LinearKernels, integer_linear)
QT_DECLARE_KERNELS(PackKernels, pack)

}  // namespace qt
