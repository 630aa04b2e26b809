// y[M, N] = x[M, K] · W[N, K]ᵀ in bf16 on AMX; other formats use the kernels of the parent instruction set.
//
// A thread owns 64 columns (a tile; 32 or 16 if tiles are few) for a panel of up to 576 rows. It computes all slices of k, or
// one. Rows are divided into units of 48, then one of 32, then the rest in registers of fewer rows. k is divided into pieces of
// up to 1024, or 256 if there is only one unit. A piece of the panel's x and of the tile's weights stays in the L2 cache for all
// units. The sums of a unit are in registers (linear_matrix.hpp). x is read in place. A thread with several tiles of a panel
// takes them slice by slice. A slice of the panel's x then stays in the L2 cache, while a deep K would not fit.
//
// Bytes: the weight once per panel, prefetched one piece ahead; y once. x once per panel from memory, then once per 32 columns
// from the L2 cache. Limiter: the weight's bandwidth up to about 200 rows (two bytes for 2 M operations, at 17 GB/s and 4
// TFLOP/s). Then the products with the L2 loads, at 70 % of the products' rate. A panel of 576 rows has 576 operations for each
// byte of weight; with 384 rows a product took a fifth longer.
//
// Reduction order: of a slice of k (linear.hpp), steps of 32 k ascending, with two chains in a step (amx.hpp). Then the slices
// ascending, the leaves as a tree, the bias, and one rounding. A depth that is not a multiple of 32 is padded with zeros.
// Independent of batch size: a row's sums depend only on the row.
#include "amx.hpp"

#if defined(QT_AMX)
#include "linear_matrix.hpp"
#include "thread_memory.hpp"

namespace qt::QT_ISA {
namespace {

constexpr const LinearKernels& kParent = avx512_bf16::float_linear;

constexpr index_t kPiece = 1024, kStreamPiece = 256;  // k at a time; with only one unit
constexpr index_t kHighestPanel = 576, kLowestPanel = 192;
constexpr index_t kTogetherRows = 768;           // rows of items that are multiplied together
constexpr index_t kPanelBytes = 5 << 18;         // of a slice of x: most of a 2 MB L2 cache
static_assert(kStreamPiece % kAmxPairs == 0 && kHighestPanel % kLargeUnitRows == 0 && kTogetherRows % kLowestPanel == 0);

// Buffers of a thread.
struct alignas(64) Buffers {
  float total[kTreeHeight][kTogetherRows * kTileColumns];  // of the slices so far; several for leaves only
  float sums[kHighestPanel * kTileColumns];                // of one slice
  char x[kLargeUnitRows * kAmxRowBytes];      // last k of a unit's rows, zero-padded
  char weight[kAmxRows * kLineBytes];         // last k of a tile, zero-padded
};

const char* memory_at(const Weight& weight, index_t tile, index_t k) {
  return weight.memory + tile * weight.tile_bytes + k / 2 * kLineBytes;
}

const char* x_at(const LinearCall& call, index_t row, index_t k) {
  return (const char*)call.x + (row * call.x_stride + k) * 2;
}

// A slice of an item: rows [row, row + units * unit_rows), all units of equal size.
struct Part {
  index_t row, unit_rows, units;
  index_t k, k_end;
  float* sums;        // of the item: [rows][64]
  float* total;       // accumulates the sums; or null
  const char* fetch;  // weights after the slice; null: no prefetch, not even of the slice itself
};

// The last k of a depth that is not a multiple of a step.
void multiply_rest(Registers& registers, MultiplyShare multiply, Share share, index_t k, Buffers& buffers) {
  std::memset(buffers.x, 0, sizeof buffers.x);
  for (int i = 0; i < kMostBlocks; ++i)
    for (index_t r = 0; r < share.x_rows[i]; ++r)
      std::memcpy(buffers.x + (i * kAmxRows + r) * kAmxRowBytes, share.x[i] + share.steps * kAmxRowBytes + r * share.x_stride,
                  std::size_t(k * 2));
  const char* const weight = share.weight + share.steps * share.weight_step;
  const index_t lines = (k + 1) / 2;
  std::memcpy(buffers.weight, weight, std::size_t(lines * kLineBytes));
  std::memset(buffers.weight + lines * kLineBytes, 0, std::size_t((kAmxRows - lines) * kLineBytes));
  share.first = share.first && share.steps == 0;
  for (int i = 0; i < kMostBlocks; ++i) share.x[i] = buffers.x + i * kAmxRows * kAmxRowBytes;
  share.x_stride = kAmxRowBytes;
  share.weight = buffers.weight;
  share.steps = 1, share.fetch = {};
  multiply(registers.unit, share);
}

void add(const Share& share, index_t blocks, const float* sums, float* total, index_t rows) {
  for (index_t r = 0; r < rows; ++r)
    for (index_t block = 0; block < blocks; ++block)
      for (index_t lane = 0; lane < kAmxColumns; lane += kLanes) {
        const index_t at = r * kTileColumns + share.columns[block] + lane;
        store(total + at, load(total + at) + load(sums + at));
      }
}

void multiply_part(Registers& registers, const LinearCall& call, const LinearItem& item, const Part& part, Buffers& buffers) {
  const Columns columns(item);
  const index_t x_blocks = (part.unit_rows + kAmxRows - 1) / kAmxRows;
  const index_t at_once = x_blocks == 1 || columns.count < 2 ? columns.count : 2;
  const MultiplyShare multiply = multiply_for<Numbers::bf16>(x_blocks, at_once);
  Share share{};
  for (index_t i = 0, left = part.unit_rows; i < x_blocks; ++i, left -= kAmxRows)
    share.x_rows[i] = left < kAmxRows ? left : kAmxRows;
  share.x_stride = call.x_stride * 2, share.x_step = kAmxRowBytes;
  share.weight_step = kAmxRows * kLineBytes;
  registers.shape(share.x_rows[0], share.x_rows[1]);
  const index_t piece = item.rows <= kUnitRows ? kStreamPiece : kPiece;
  for (index_t k = part.k; k < part.k_end; k += piece) {
    const index_t depth = part.k_end - k < piece ? part.k_end - k : piece, rest = depth % kAmxPairs;
    const bool ends = k + depth == part.k_end;
    share.weight = memory_at(*call.weight, item.tile, k);
    share.steps = depth / kAmxPairs;
    share.first = k == part.k;
    const index_t left = part.k_end - k - depth, next_depth = !ends && left < piece ? left : piece;
    const char* const next = ends ? part.fetch : memory_at(*call.weight, item.tile, k + depth);
    share.fetch = NextLines::of(part.fetch == nullptr ? nullptr : next, next_depth / 2, columns,
                            part.units * columns.count * share.steps);
    for (index_t block = 0; block < columns.count; block += at_once) {
      for (index_t i = 0; i < at_once; ++i) share.columns[i] = columns.begin[block + i];
      for (index_t u = 0; u < part.units; ++u) {
        const index_t row = part.row + u * part.unit_rows;
        for (index_t i = 0; i < x_blocks; ++i) {
          share.x[i] = x_at(call, item.row + row + i * kAmxRows, k);
          share.sums[i] = (char*)(part.sums + (row + i * kAmxRows) * kTileColumns);
        }
        if (share.steps != 0) multiply(registers.unit, share);
        if (rest != 0) multiply_rest(registers, multiply, share, rest, buffers);
        if (ends && part.total != nullptr)
          add(share, at_once, part.sums + row * kTileColumns, part.total + row * kTileColumns, part.unit_rows);
      }
    }
  }
}

// One slice of an item. The previous slice prefetched its weights. next: the weights to prefetch.
void multiply_slice(Registers& registers, const LinearCall& call, const LinearItem& item, index_t k, float* sums, float* total,
                    const char* next, Buffers& buffers) {
  const index_t slice_end = k + call.weight->slice_depth, end = slice_end < item.k_end ? slice_end : item.k_end;
  index_t row = 0;
  for (const index_t unit_rows : {kLargeUnitRows, kUnitRows, item.rows % kLargeUnitRows % kUnitRows}) {
    const index_t units = unit_rows == 0 ? 0 : (item.rows - row) / unit_rows;
    if (units == 0) continue;
    multiply_part(registers, call, item, {row, unit_rows, units, k, end, sums, total, row == 0 ? next : nullptr}, buffers);
    row += units * unit_rows;
  }
}

// All slices of one leaf for items [begin, end), slice by slice; the sums begin in `totals`. after: the next weights.
void multiply_slices(Registers& registers, const LinearCall& call, index_t begin, index_t end, const char* after, float* totals,
                     Buffers& buffers) {
  const Weight& weight = *call.weight;
  const LinearItem first = item_of(call, begin);
  for (index_t k = first.k; k < first.k_end; k += weight.slice_depth) {
    for (index_t i = begin; i < end; ++i) {
      const LinearItem item = item_of(call, i);
      const bool in_first = k == first.k;
      float* const mine = totals + (i - begin) * item.rows * kTileColumns;
      float* const total = call.sliced ? partials_of(call, item, item.slice) : mine;
      const bool last = k + weight.slice_depth >= first.k_end;
      const char* fetch = i + 1 < end ? memory_at(weight, item_of(call, i + 1).tile, k)
                          : !last     ? memory_at(weight, first.tile, k + weight.slice_depth)
                                      : after;
      multiply_slice(registers, call, item, k, in_first ? total : buffers.sums, in_first ? nullptr : total, fetch, buffers);
    }
  }
}

// Items [begin, end) of one panel, or of one slice of it; `next`: the thread's probable next item.
void multiply_together(Registers& registers, const LinearCall& call, index_t begin, index_t end, index_t next, Buffers& buffers) {
  const Weight* const weights = call.weight;
  const LinearItem first = item_of(call, begin), next_item = item_of(call, next < call.items ? next : begin);
  const char* const after = memory_at(weights[next_item.leaf], next_item.tile, next_item.k);
  if (call.sliced) {
    multiply_slices(registers, leaf_of(call, first.leaf), begin, end, after, buffers.total[0], buffers);
  } else {
    add_as_tree(
        weights->leaves,
        [&](index_t leaf, index_t place) {
          const char* const then = leaf + 1 < weights->leaves ? memory_at(weights[leaf + 1], first.tile, 0) : after;
          multiply_slices(registers, leaf_of(call, leaf), begin, end, then, buffers.total[place], buffers);
        },
        [&](index_t from, index_t to) {
          for (index_t i = begin, at = 0; i < end; ++i, at += first.rows * kTileColumns)
            add_sums(item_of(call, i), first.rows, buffers.total[from] + at, buffers.total[to] + at);
        });
  }
  for (index_t i = begin; i < end; ++i) {
    const LinearItem item = item_of(call, i);
    float* const total = buffers.total[0] + (i - begin) * item.rows * kTileColumns;
    if (call.sliced) {
      if (!brings_last_slice(call, item)) continue;
      add_slices(call, item, total);
    }
    finish_by_blocks({call, item.tile, item.from, item.to}, total, item.row, item.rows);
  }
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  const Weight& weight = *call.weight;
  if (weight.format != Dtype::bf16) return kParent.multiply(described, begin, end);
  const auto next_of = [&](index_t done) { return done < end ? done : end + (end - begin) * (call.threads - 1); };
  const LinearItem first = item_of(call, begin);
  const Weight& of_first = call.weight[first.leaf];
  prefetch_begin(memory_at(of_first, first.tile, first.k), of_first.memory + weight.tiles * weight.tile_bytes);
  Registers registers;
  Buffers& buffers = *(Buffers*)thread_memory(sizeof(Buffers));
  for (index_t i = begin; i < end;) {
    const index_t panel_end = i + call.parts - i % call.parts;
    const index_t most = i + (item_of(call, i).rows > kUnitRows ? kTogetherRows / call.panel_rows : 1);
    index_t group_end = end < panel_end ? end : panel_end;
    if (group_end > most) group_end = most;
    multiply_together(registers, call, i, group_end, next_of(group_end), buffers);
    i = group_end;
  }
}

Preparation preparation(const Weight& weight, Dtype dtype, Inputs inputs) {
  if (weight.format != Dtype::bf16) return kParent.preparation(weight, dtype, inputs);
  const index_t rows = kPanelBytes / (weight.slice_depth * 2) / kLargeUnitRows * kLargeUnitRows;
  Preparation prepared{kNever, 0, 0};
  // Several slices: lower panels, and more tiles at a time.
  const index_t highest = weight.slices > 1 ? kLowestPanel : kHighestPanel;
  prepared.panel_rows = rows < kLowestPanel ? kLowestPanel : rows < highest ? rows : highest;
  prepared.panel_step = kLargeUnitRows;
  prepared.together = weight.slices > 1 ? kTogetherRows / prepared.panel_rows : 1;
  return prepared;
}

index_t prepare_items(const LinearCall& call) { return kParent.prepare_items(call); }

void prepare(const void* call, index_t begin, index_t end) { kParent.prepare(call, begin, end); }

}  // namespace

const LinearKernels float_linear = {preparation, prepare_items, prepare, multiply_items};

}  // namespace qt::QT_ISA
#endif
