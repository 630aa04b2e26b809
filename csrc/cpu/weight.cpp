// Packed weights: their geometry, and the work of filling and reading them. See linear.hpp for the layout.
#include <new>

#include "linear.hpp"
#include "pool.hpp"

namespace qt {
namespace {

// Format codes of the C functions beside those of Dtype: integers whose groups have zero points.
constexpr int kInt4WithZeros = 5, kInt8WithZeros = 6;

// Slices of k (linear.hpp): so many that the narrowest items are at least this many, where depth allows. 64 threads then have
// four or five each, and who has one more than others is not much behind.
constexpr index_t kFewestItems = 288;
constexpr index_t kSliceStep = 256;  // of k; whole groups of scales, of weights as of x
// That such an item reads: less is not worth a piece of work. Twice as many of integers, which pay for a slice's end with a
// pass over sums that are in memory anyway, floats with registers.
constexpr index_t kFewestSliceBytes = 8 << 10, kFewestIntegerBytes = 16 << 10;
constexpr index_t kNarrowest = 16;   // columns of an item; of gates and of ups

index_t rounded_up(index_t value, index_t multiple) { return (value + multiple - 1) / multiple * multiple; }

void cut_depth(Weight& weight) {
  const index_t items = weight.tiles * (weight.paired ? kPairedColumns : kTileColumns) / kNarrowest;
  const index_t wanted = (kFewestItems + items - 1) / items, depth = weight.depth / wanted / kSliceStep * kSliceStep;
  const index_t bits = weight.format == Dtype::int4 ? 4 : weight.format == Dtype::int8 ? 8 : 16;  // of a number
  const index_t fewest = (bits == 16 ? kFewestSliceBytes : kFewestIntegerBytes) * 8 / bits / kNarrowest;
  weight.slice_depth = wanted == 1 || weight.depth <= fewest ? weight.depth : depth < fewest ? fewest : depth;
  weight.slices = (weight.depth + weight.slice_depth - 1) / weight.slice_depth;
}

// Everything but the memory. False where the arguments describe no weight.
bool describe(int format, index_t columns, index_t depth, index_t group, bool paired, Weight& weight) {
  weight = {};
  weight.zeros = format == kInt4WithZeros || format == kInt8WithZeros;
  weight.format = format == kInt4WithZeros ? Dtype::int4 : weight.zeros ? Dtype::int8 : Dtype(format);
  weight.columns = columns, weight.depth = depth, weight.group = group, weight.paired = paired;
  if (format < 0 || format > kInt8WithZeros || columns < 1 || depth < 1 || (paired && columns % 2)) return false;
  weight.tiles = paired ? rounded_up(columns / 2, kPairedColumns) / kPairedColumns
                        : rounded_up(columns, kTileColumns) / kTileColumns;
  cut_depth(weight);
  weight.groups = 1;
  switch (weight.format) {
    case Dtype::bf16: weight.tile_bytes = rounded_up(depth, 2) * kTileColumns * 2; return group == kWholeDepth;
    case Dtype::fp16: weight.tile_bytes = depth * kTileColumns * 2; return group == kWholeDepth;
    case Dtype::fp32: weight.tile_bytes = depth * kTileColumns * 4; return group == kWholeDepth;
    default: break;
  }
  const bool grouped = group != kWholeDepth;
  if (grouped ? group != 32 && group != 64 && group != 128 : weight.zeros || weight.format == Dtype::int4) return false;
  const index_t integers = weight.format == Dtype::int8 ? 4 : 8;  // of k in a column's four bytes
  const index_t in_group = grouped ? group : depth;
  weight.groups = (depth + in_group - 1) / in_group;
  weight.head_bytes = grouped ? kTileColumns * (weight.zeros ? 3 : 2) : 0;
  weight.group_bytes = weight.head_bytes + rounded_up(in_group, integers) / integers * kTileColumns * 4;
  const index_t in_last = depth - (weight.groups - 1) * in_group;
  weight.tile_bytes = kTileColumns * 4 + (weight.groups - 1) * weight.group_bytes + weight.head_bytes +
                      rounded_up(in_last, integers) / integers * kTileColumns * 4;
  return true;
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
bool fetches_help() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  return !__builtin_cpu_is("amd");
#else
  return true;
#endif
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
}  // namespace qt

// Bytes of a packed weight [columns, depth]; 0 where there is no such format. group: of k that share a scale (32, 64,
// 128), 0 for one scale per column (int8) and for floating-point formats. format: a Dtype, or with zero points 5: int4, 6: int8.
QT_EXPORT index_t qt_weight_bytes(int format, index_t columns, index_t depth, index_t group, int paired) {
  qt::Weight weight;
  return qt::describe(format, columns, depth, group, paired != 0, weight) ? weight.tiles * weight.tile_bytes : 0;
}

// memory: qt_weight_bytes, 64-byte aligned, the caller's; zeros before anything is filled, or packed before.
QT_EXPORT qt::Weight* qt_weight_new(int format, index_t columns, index_t depth, index_t group, int paired,
                                    void* memory) {
  qt::Weight weight;
  if (!qt::describe(format, columns, depth, group, paired != 0, weight)) return nullptr;
  weight.memory = static_cast<char*>(memory);
  weight.dot = qt::dot_is_fast(), weight.fetches = qt::fetches_help();
  return new (std::nothrow) qt::Weight(weight);
}

QT_EXPORT void qt_weight_delete(qt::Weight* weight) { delete weight; }

// Whether a bf16 weight is multiplied with the processor's dot product of pairs, where there is one, or in fp32: chosen
// when the weight is made by what this processor does faster. Results differ in their last bits; for tests and
// benchmarks.
QT_EXPORT void qt_weight_set_dot(qt::Weight* weight, int dot) { weight->dot = dot != 0; }

// Packs source [count, depth], rows `stride` elements apart, into columns [first, first + count).
QT_EXPORT void qt_weight_fill(qt::Weight* weight, const void* source, int source_dtype, index_t stride, index_t first,
                              index_t count) {
  qt::PackCall call = qt::pack_call(*weight, first, count);
  call.source = source, call.source_dtype = qt::Dtype(source_dtype), call.source_stride = stride;
  qt::fill_tiles(call, QT_CHOOSE(pack).fill, &call);
}

// Packs integers as they are into columns [first, first + count), of an integer weight: codes [count, depth] of one byte each, rows
// `stride` apart, signed or as they are stored (linear.hpp), times scales [count, ceil(depth / scale_group)]. scale_group: a
// multiple of the weight's group, or at least depth: one scale for each column. zeros: bytes laid out like the scales, or null:
// 8 (int4) or 128; of a weight with zero points. Returns the sum of the Problem's found, 0 if all numbers are packed exactly.
QT_EXPORT int qt_weight_fill_codes(qt::Weight* weight, const void* codes, int is_signed, index_t stride, const void* scales,
                                   int scale_dtype, index_t scale_stride, index_t scale_group, const void* zeros,
                                   index_t zero_stride, index_t first, index_t count) {
  std::uint32_t problems = 0;
  qt::CodesCall call{};
  call.codes = qt::pack_call(*weight, first, count);
  call.codes.source = codes, call.codes.source_dtype = qt::Dtype::int8, call.codes.source_stride = stride;
  call.is_signed = is_signed != 0;
  call.scales = scales, call.scale_dtype = qt::Dtype(scale_dtype);
  call.scale_stride = scale_stride, call.scale_group = scale_group;
  call.zeros = static_cast<const unsigned char*>(zeros), call.zero_stride = zero_stride;
  call.problems = &problems;
  qt::fill_tiles(call.codes, QT_CHOOSE(pack).fill_codes, &call);
  return int(problems);
}

// The numbers of columns [first, first + count) as they are multiplied: out [count, depth].
QT_EXPORT void qt_weight_read(const qt::Weight* weight, index_t first, index_t count, float* out) {
  qt::PackCall call = qt::pack_call(*weight, first, count);
  call.out = out;
  const qt::Work work{count, 16, QT_CHOOSE(pack).read, &call};
  qt::pool().run(&work, 1);
}
