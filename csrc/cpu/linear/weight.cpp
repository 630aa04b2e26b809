// Packed weights: their geometry, and the work of filling and reading them. See linear.hpp for the layout.
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
static_assert(std::all_of(std::begin(kForms), std::end(kForms), is_counted_by_shifts));  // linear_integer_piece.hpp
static_assert(std::all_of(std::begin(kForms), std::end(kForms), [](const Form& form) { return form.block <= 256; }));  // linear_pack_blocks.hpp

// Slices of k (linear.hpp): so many that the narrowest items are at least this many, where depth allows. 64 threads then have
// four or five each, and a thread with one more than others is not much slower.
constexpr index_t kFewestItems = 288;
constexpr index_t kSliceStep = 256;  // of k; whole groups of scales, of weights as of x
// That such an item reads: less is not worth a piece of work. Twice as many of integers, which pay for a slice's end with a
// pass over sums that are in memory anyway, floats with registers.
constexpr index_t kFewestSliceBytes = 8 << 10, kFewestIntegerBytes = 16 << 10;
constexpr index_t kNarrowest = 16;   // columns of an item; of gates and of ups

index_t rounded_up(index_t value, index_t multiple) { return (value + multiple - 1) / multiple * multiple; }

index_t tiles_of(index_t columns, bool paired) {
  return paired ? rounded_up(columns / 2, kPairedColumns) / kPairedColumns : rounded_up(columns, kTileColumns) / kTileColumns;
}

// columns: that are multiplied at once, those of other processes among them.
void cut_depth(Weight& weight, index_t columns) {
  const index_t items = tiles_of(columns, weight.paired) * (weight.paired ? kPairedColumns : kTileColumns) / kNarrowest;
  const index_t wanted = (kFewestItems + items - 1) / items, depth = weight.depth / wanted / kSliceStep * kSliceStep;
  const CodeStep step = step_of(weight.codes);
  const index_t bits = weight.format == Dtype::int8 ? step.bytes * 8 / kTileColumns / step.k : 16;  // of a number
  const index_t fewest = rounded_up((bits == 16 ? kFewestSliceBytes : kFewestIntegerBytes) * 8 / bits / kNarrowest, kSliceStep);
  weight.slice_depth = wanted == 1 || weight.depth <= fewest ? weight.depth : depth < fewest ? fewest : depth;
  weight.slices = (weight.depth + weight.slice_depth - 1) / weight.slice_depth;
}

// A block's head, for 64 columns.
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
    if (form.codes != Codes::eight || form.scales != Scales::half) return false;  // int8 alone
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

// Everything but the memory. False where the arguments describe no weight.
bool describe(int format, index_t columns, index_t depth, index_t group, bool paired, Weight& weight) {
  weight = {};
  if (format < 0 || format >= kFirstForm + kFormCount || columns < 1 || depth < 1 || (paired && columns % 2)) return false;
  weight.format = format < kFirstForm ? Dtype(format) : Dtype::int8;
  weight.columns = columns, weight.depth = depth, weight.paired = paired, weight.leaves = 1;
  weight.tiles = tiles_of(columns, paired);
  return format < kFirstForm ? describe_floats(group, weight) : describe_integers(kForms[format - kFirstForm], group, weight);
}

// VDPBF16PS does four multiplications where an fp32 FMA does two, but at a quarter of its rate on Intel's cores. ARM's
// BFDOT has FMLA's rate (Arm Neoverse V1 and N2 Software Optimization Guides, ASIMD instructions).
bool dot_is_fast() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return true;
#endif
}

// A tile that is read front to back AMD's processors find out to be so, and then have more lines on their way than instructions
// could ask for: those wait in the few buffers of the first cache. On Intel's, and wherever it was not measured, we ask.
bool follows_reads() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return __builtin_cpu_is("amd");
#else
  return false;
#endif
}

// Zen 5 (family 26) follows what one instruction after the other reads, less well what few rows unpack between two reads; its
// predecessors are slower when they are asked (bench/notes/003-zen5-prefetch-two-distances.md).
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

// Has all tiles that hold some of the call's columns filled.
void fill_tiles(PackCall& call, void (*fill)(const void*, index_t, index_t), const void* described) {
  const Weight& weight = *call.weight;
  const index_t half = weight.columns / 2, end = call.first + call.count;
  const index_t in_tile = weight.paired ? kPairedColumns : kTileColumns;
  index_t begin_place = call.first, end_place = end;  // where columns lie along the tiles
  if (weight.paired && end > half) {                  // ups lie in the tiles of their gates
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

// Bytes of a packed weight [columns, depth], or of one of its leaves, without outliers (weight_outliers.cpp); 0 where there is no such format. group: of k that share a
// scale (16, 32, 64, 128), 0 for one scale per column (int8), for floating-point formats and those that have their own. format: a Dtype of
// floats, or kFirstForm and on: kForms.
QT_EXPORT index_t qt_weight_bytes(int format, index_t columns, index_t depth, index_t group, int paired) {
  qt::Weight weight;
  return qt::describe(format, columns, depth, group, paired != 0, weight) ? weight.tiles * weight.tile_bytes : 0;
}

// depth: of a leaf; there are 1, 2, 4 or 8. cut_columns: for so many outputs, of other processes and of all leaves too, slices are
// cut; the weight's own, if it is all there is. memory: qt_weight_bytes of each leaf, 64-byte aligned, the caller's; zeros before
// anything is filled, or packed before.
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

// Whether a bf16 weight is multiplied with the processor's dot product of pairs, where there is one, or in fp32: chosen
// when the weight is made by what this processor does faster. Results differ in their last bits; for tests and
// benchmarks.
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

// Packs integers as they are into columns [first, first + count), of an integer weight in one leaf: codes [count, depth] of one
// byte each, rows `stride` apart, signed or as they are stored (linear.hpp), times scales [count, ceil(depth / scale_group)]. scale_group: a
// multiple of the weight's group, or at least depth: one scale for each column. Of MXFP4 and NVFP4 scales are bytes (int8), and
// `factors` [count] in fp32 what each column is multiplied with besides, or null: 1; otherwise null. zeros: bytes, or fp32 where the
// weight has such, laid out like the scales, or null: 8 (int4) or 128; of a weight with zero points. Returns the sum of the Problem's found, 0 if all numbers are packed exactly.
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

// Packs codes [count, depth] of one byte each, rows `stride` apart, which choose from tables [count][16], into columns
// [first, first + count), of a weight of tables. Returns the sum of the Problem's found, 0 if all numbers are packed exactly.
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

// Packs rows of a GGUF file into columns [first, first + count), of a weight in one leaf: blocks, rows `stride` bytes apart. Their
// type is the weight's: Q8_0 in int8 and Q4_0 in int4, both in groups of 32, others in the formats that are named like them.
QT_EXPORT void qt_weight_fill_blocks(qt::Weight* weight, const void* blocks, index_t stride, index_t first, index_t count) {
  QT_REQUIRE(weight->leaves == 1, "blocks of a weight in %lld leaves", (long long)weight->leaves);
  qt::PackCall call = qt::pack_call(*weight, first, count);
  call.source = blocks, call.source_dtype = qt::Dtype::int8, call.source_stride = stride;
  qt::fill_tiles(call, QT_CHOOSE(pack).fill_blocks, &call);
}

// The numbers of columns [first, first + count) as they are multiplied: out [count, depth of all leaves].
QT_EXPORT void qt_weight_read(const qt::Weight* weight, index_t first, index_t count, float* out) {
  for (index_t leaf = 0; leaf < weight->leaves; ++leaf) {
    qt::PackCall call = qt::pack_call(weight[leaf], first, count);
    call.out = out + leaf * weight->depth, call.out_stride = weight->whole_depth;
    const qt::Work work{count, 16, QT_CHOOSE(pack).read, &call};
    qt::pool().run(&work, 1);
  }
}
