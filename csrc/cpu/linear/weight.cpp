// Packed weights: geometry, packing and unpacking. linear.hpp describes the layout.
#include <algorithm>
#include <bit>
#include <iterator>
#include <new>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "linear.hpp"
#include "pool.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr int kFormCount = int(sizeof kForms / sizeof kForms[0]);
constexpr bool is_counted_by_shifts(const Form& form) {
  return std::has_single_bit(std::size_t(step_of(form.codes).k)) && (form.block == 0 || std::has_single_bit(std::size_t(form.block)));
}
// kernels/linear/linear_integer_piece.hpp
static_assert(std::all_of(std::begin(kForms), std::end(kForms), is_counted_by_shifts));
// kernels/linear/linear_pack_blocks.hpp
static_assert(std::all_of(std::begin(kForms), std::end(kForms), [](const Form& form) { return form.block <= 256; }));

// Slices of k (linear.hpp): K is cut until a product has at least this many of the narrowest items, if depth allows. 64 threads
// then have four or five items each, so one more item delays a thread little.
constexpr index_t kFewestItems = 288;
constexpr index_t kSliceStep = 256;  // of k; a multiple of every group, of weights and of x
// Least bytes that such an item reads; a smaller piece is not worth its overhead. The end of a slice costs integer kernels a
// pass over sums in memory, and floating-point kernels registers; so integers need twice the bytes.
constexpr index_t kFewestSliceBytes = 8 << 10, kFewestIntegerBytes = 16 << 10;
constexpr index_t kNarrowest = 16;   // columns of an item; of gates and of ups

index_t rounded_up(index_t value, index_t multiple) { return (value + multiple - 1) / multiple * multiple; }

index_t tiles_of(index_t columns, bool paired) {
  return paired ? rounded_up(columns / 2, kPairedColumns) / kPairedColumns : rounded_up(columns, kTileColumns) / kTileColumns;
}

// columns: multiplied at the same time, those of other processes included.
void cut_depth(Weight& weight, index_t columns) {
  const index_t items = tiles_of(columns, weight.paired) * (weight.paired ? kPairedColumns : kTileColumns) / kNarrowest;
  const index_t wanted = (kFewestItems + items - 1) / items, depth = weight.depth / wanted / kSliceStep * kSliceStep;
  const CodeStep step = step_of(weight.codes);
  const index_t bits = weight.format == Dtype::int8 ? step.bytes * 8 / kTileColumns / step.k : 16;  // per number
  const index_t fewest = rounded_up((bits == 16 ? kFewestSliceBytes : kFewestIntegerBytes) * 8 / bits / kNarrowest, kSliceStep);
  weight.slice_depth = wanted == 1 || weight.depth <= fewest ? weight.depth : depth < fewest ? fewest : depth;
  weight.slices = (weight.depth + weight.slice_depth - 1) / weight.slice_depth;
}

// Bytes of a scale block's head, for 64 columns.
index_t head_bytes(Scales scales, index_t groups) {
  switch (scales) {
    case Scales::column: return 0;
    case Scales::half: return kTileColumns * 2;
    case Scales::half_zero: return kTileColumns * 3;
    case Scales::single:
    case Scales::half_minimum: return kTileColumns * 4;
    case Scales::bytes: return kTileColumns * (2 + groups);
    case Scales::bytes_minimum: return kTileColumns * (4 + 2 * groups);
    case Scales::nibbles: return kTileColumns * (4 + groups);
    case Scales::single_zero: return kTileColumns * 8;
    default: return kTileColumns;
  }
}

bool describe_floats(index_t group, Weight& weight) {
  const index_t size = weight.format == Dtype::fp32 ? 4 : 2;
  const index_t k = weight.format == Dtype::bf16 ? rounded_up(weight.depth, 2) : weight.depth;
  weight.tile_bytes = k * kTileColumns * size;
  return group == kWholeDepth;
}

bool describe_integers(const Form& form, index_t group, Weight& weight) {
  weight.codes = form.codes, weight.scales = form.scales, weight.values = form.values;
  for (int i = 0; form.table != nullptr && i < 16; ++i) weight.table[i] = (unsigned char)(form.table[i] + middle_of(form.codes));
  weight.group = form.group != 0 ? form.group : group;
  weight.tile_head = kTileColumns * 4 * (form.values == Values::tables ? 17 : 1);
  if (form.group != 0 && (group != 0 || weight.depth % form.block != 0)) return false;
  if (form.values == Values::tables) {
    if (group != 0) return false;
  } else if (weight.group == kWholeDepth) {
    if (form.codes != Codes::eight || form.scales != Scales::half) return false;  // int8 only
    weight.scales = Scales::column;
  } else if (weight.group != 16 && weight.group != 32 && weight.group != 64 && weight.group != 128) {
    return false;
  }
  weight.block = form.block != 0 ? form.block : weight.group != kWholeDepth ? weight.group : weight.depth;
  weight.blocks = (weight.depth + weight.block - 1) / weight.block;
  weight.head_bytes = head_bytes(weight.scales, weight.group != kWholeDepth ? weight.block / weight.group : 1);
  const CodeStep step = step_of(weight.codes);
  const auto codes_bytes = [&](index_t k) { return rounded_up(k, step.k) / step.k * step.bytes; };
  weight.block_bytes = weight.head_bytes + codes_bytes(weight.block);
  const index_t left = weight.depth - (weight.blocks - 1) * weight.block;
  const index_t in_last = form.values == Values::tables ? weight.block : left;
  weight.tile_bytes =
      weight.tile_head + (weight.blocks - 1) * weight.block_bytes + weight.head_bytes + codes_bytes(in_last);
  return true;
}

// Fills all fields except the memory. Returns false if the arguments describe no weight.
bool describe(int format, index_t columns, index_t depth, index_t group, bool paired, Weight& weight) {
  weight = {};
  if (format < 0 || format >= kFirstForm + kFormCount || columns < 1 || depth < 1 || (paired && columns % 2)) return false;
  weight.format = format < kFirstForm ? Dtype(format) : Dtype::int8;
  weight.columns = columns, weight.depth = depth, weight.paired = paired, weight.leaves = 1;
  weight.tiles = tiles_of(columns, paired);
  return format < kFirstForm ? describe_floats(group, weight) : describe_integers(kForms[format - kFirstForm], group, weight);
}

// True if the dot product of bf16 pairs is faster than fp32 FMA. VDPBF16PS does four multiplications where an fp32 FMA does
// two, but at a quarter of its rate on Intel cores. ARM's BFDOT has the rate of FMLA (Arm Neoverse V1 and N2 Software
// Optimization Guides, ASIMD instructions).
bool dot_is_fast() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return true;
#endif
}

// True if kernels rely on hardware prefetchers for sequential reads. AMD processors detect the sequential read of a tile and
// keep more lines in flight than software prefetches, which are limited by the L1 fill buffers. On Intel, and on processors not
// measured, kernels prefetch in software.
bool follows_reads() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Most rows with software prefetches on AMD. The prefetchers of Zen 5 (family 26) follow consecutive reads well, but less well
// the reads of few rows, which unpack codes in between. Earlier Zen cores are slower with software prefetches
// (bench/notes/003-zen5-prefetch-two-distances.md).
index_t asked_rows() {
#if defined(__x86_64__)
  unsigned signature = 0, features[3];
  __get_cpuid(1, &signature, &features[0], &features[1], &features[2]);
  if (follows_reads() && (signature >> 8 & 0xF) + (signature >> 20 & 0xFF) >= 26) return 2;
#endif
  return 0;
}

PackCall pack_call(const Weight& weight, index_t first, index_t count) {
  PackCall call{};
  call.weight = &weight;
  call.first = first, call.count = count;
  return call;
}

// Runs `fill` over all tiles with columns of the call.
void fill_tiles(PackCall& call, void (*fill)(const void*, index_t, index_t), const void* described) {
  const Weight& weight = *call.weight;
  const index_t half = weight.columns / 2, end = call.first + call.count;
  const index_t in_tile = weight.paired ? kPairedColumns : kTileColumns;
  index_t begin_place = call.first, end_place = end;  // column range along the tiles
  if (weight.paired && end > half) {                  // ups are in the tiles of their gates
    begin_place = call.first < half ? 0 : call.first - half;
    end_place = call.first < half ? half : end - half;
  }
  call.first_tile = begin_place / in_tile;
  const index_t tiles = (end_place + in_tile - 1) / in_tile - call.first_tile;
  const Work work{tiles, 1, fill, described};
  pool().run(&work, 1);
}

}  // namespace

void tile_and_lane(const Weight& weight, index_t column, index_t& tile, index_t& lane) {
  if (!weight.paired) {
    tile = column / kTileColumns, lane = column % kTileColumns;
    return;
  }
  const index_t half = weight.columns / 2, place = column < half ? column : column - half;
  tile = place / kPairedColumns, lane = place % kPairedColumns + (column < half ? 0 : kPairedColumns);
}

}  // namespace qt

// Returns the bytes of a packed weight [columns, depth], or of one of its leaves, without outliers (weight_outliers.cpp); 0 if
// the format does not exist.
// format: a floating-point Dtype, or kFirstForm + an index of kForms.
// group: k with one scale (16, 32, 64, 128); 0 for one scale per column (int8), for floating-point formats and for formats with
// a fixed group.
QT_EXPORT index_t qt_weight_bytes(int format, index_t columns, index_t depth, index_t group, int paired) {
  qt::Weight weight;
  return qt::describe(format, columns, depth, group, paired != 0, weight) ? weight.tiles * weight.tile_bytes : 0;
}

// Creates a weight; returns null if the arguments describe none. depth: of a leaf. leaves: 1, 2, 4 or 8.
// cut_columns: number of outputs that determines the slices, those of other processes and leaves included; the weight's own
// columns if there are no others.
// memory: qt_weight_bytes for each leaf, 64-byte aligned, owned by the caller; zeros, or a weight packed earlier.
QT_EXPORT qt::Weight* qt_weight_new(int format, index_t columns, index_t depth, index_t group, int paired, index_t leaves,
                                    index_t cut_columns, void* memory) {
  qt::Weight weight;
  if (!qt::describe(format, columns, depth, group, paired != 0, weight)) return nullptr;
  QT_REQUIRE(leaves >= 1 && leaves <= qt::kMostLeaves && std::has_single_bit(std::size_t(leaves)) && (leaves == 1 || !paired),
             "%lld leaves of a weight that is %spaired", (long long)leaves, paired ? "" : "not ");
  qt::cut_depth(weight, cut_columns);
  weight.leaves = leaves, weight.whole_depth = leaves * weight.depth, weight.whole_slices = leaves * weight.slices;
  weight.memory = static_cast<char*>(memory);
  weight.dot = qt::dot_is_fast(), weight.follows = qt::follows_reads(), weight.asked_rows = qt::asked_rows();
  qt::Weight* const all = new (std::nothrow) qt::Weight[std::size_t(leaves)];
  for (index_t leaf = 0; all && leaf < leaves; ++leaf, weight.memory += weight.tiles * weight.tile_bytes) all[leaf] = weight;
  return all;
}

QT_EXPORT void qt_weight_delete(qt::Weight* weight) { delete[] weight; }

// Selects the dot product of bf16 pairs (if the processor has it) or fp32 for a bf16 weight. The default is the faster one on
// this processor. Results differ in their last bits; for tests and benchmarks.
QT_EXPORT void qt_weight_set_dot(qt::Weight* weight, int dot) {
  for (index_t leaf = 0; leaf < weight->leaves; ++leaf) weight[leaf].dot = dot != 0;
}

// Packs source [count, depth of all leaves], rows `stride` elements apart, into columns [first, first + count).
QT_EXPORT void qt_weight_fill(qt::Weight* weight, const void* source, int source_dtype, index_t stride, index_t first,
                              index_t count) {
  const index_t leaf_bytes = weight->depth * (source_dtype == int(qt::Dtype::fp32) ? 4 : 2);
  for (index_t leaf = 0; leaf < weight->leaves; ++leaf) {
    qt::PackCall call = qt::pack_call(weight[leaf], first, count);
    call.source = static_cast<const char*>(source) + leaf * leaf_bytes;
    call.source_dtype = qt::Dtype(source_dtype), call.source_stride = stride;
    qt::fill_tiles(call, QT_CHOOSE(pack).fill, &call);
  }
}

// Packs codes of a checkpoint without requantization into columns [first, first + count) of an integer weight in one leaf.
// codes: [count, depth], one byte each, rows `stride` apart; signed, or unsigned as stored (linear.hpp).
// scales: [count, ceil(depth / scale_group)]; bytes (int8) for MXFP4 and NVFP4.
// scale_group: a multiple of the weight's group, or at least depth for one scale per column.
// factors: MXFP4 and NVFP4: fp32 [count], an additional factor of each column; null: 1. Null for other formats.
// zeros: for weights with zero points, layout of scales: bytes, or fp32 for formats with fp32 zeros; null: 8 (int4) or 128.
// Returns the sum of the Problem values found; 0 if all numbers are packed exactly.
QT_EXPORT int qt_weight_fill_codes(qt::Weight* weight, const void* codes, int is_signed, index_t stride, const void* scales,
                                   int scale_dtype, index_t scale_stride, index_t scale_group, const float* factors,
                                   const void* zeros, index_t zero_stride, index_t first, index_t count) {
  QT_REQUIRE(weight->leaves == 1, "codes of a weight in %lld leaves", (long long)weight->leaves);
  std::uint32_t problems = 0;
  qt::CodesCall call{};
  call.codes = qt::pack_call(*weight, first, count);
  call.codes.source = codes, call.codes.source_dtype = qt::Dtype::int8, call.codes.source_stride = stride;
  call.is_signed = is_signed != 0;
  call.scales = scales, call.scale_dtype = qt::Dtype(scale_dtype);
  call.scale_stride = scale_stride, call.scale_group = scale_group, call.factors = factors;
  call.zeros = zeros, call.zero_stride = zero_stride;
  call.problems = &problems;
  qt::fill_tiles(call.codes, QT_CHOOSE(pack).fill_codes, &call);
  return int(problems);
}

// Packs codes [count, depth] of one byte each, rows `stride` apart, into columns [first, first + count) of a weight of tables.
// The codes are indices into tables [count][16]. Returns the sum of the Problem values found; 0 if all numbers are packed
// exactly.
QT_EXPORT int qt_weight_fill_tables(qt::Weight* weight, const void* codes, index_t stride, const float* tables, index_t first,
                                    index_t count) {
  QT_REQUIRE(weight->leaves == 1 && weight->values == qt::Values::tables, "tables of a weight %s",
             weight->leaves == 1 ? "that has none" : "in leaves");
  std::uint32_t problems = 0;
  qt::TablesCall call{qt::pack_call(*weight, first, count), tables, &problems};
  call.codes.source = codes, call.codes.source_dtype = qt::Dtype::int8, call.codes.source_stride = stride;
  qt::fill_tiles(call.codes, QT_CHOOSE(pack).fill_tables, &call);
  return int(problems);
}

// Packs rows of a GGUF file into columns [first, first + count) of a weight in one leaf. blocks: GGUF blocks, rows `stride`
// bytes apart. Their type must match the weight: Q8_0 for int8 and Q4_0 for int4, both in groups of 32; other types match the
// format of the same name.
QT_EXPORT void qt_weight_fill_blocks(qt::Weight* weight, const void* blocks, index_t stride, index_t first, index_t count) {
  QT_REQUIRE(weight->leaves == 1, "blocks of a weight in %lld leaves", (long long)weight->leaves);
  qt::PackCall call = qt::pack_call(*weight, first, count);
  call.source = blocks, call.source_dtype = qt::Dtype::int8, call.source_stride = stride;
  qt::fill_tiles(call, QT_CHOOSE(pack).fill_blocks, &call);
}

// Unpacks columns [first, first + count): out [count, depth of all leaves], the numbers that the kernels multiply.
QT_EXPORT void qt_weight_read(const qt::Weight* weight, index_t first, index_t count, float* out) {
  for (index_t leaf = 0; leaf < weight->leaves; ++leaf) {
    qt::PackCall call = qt::pack_call(weight[leaf], first, count);
    call.out = out + leaf * weight->depth, call.out_stride = weight->whole_depth;
    const qt::Work work{count, 16, QT_CHOOSE(pack).read, &call};
    qt::pool().run(&work, 1);
  }
}
