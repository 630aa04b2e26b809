// y[M, N] = x[M, K] · W[N, K]ᵀ in bf16, fp16 or fp32, or with floating-point codes (fp8, nf4, fp4); accumulated in fp32.
//
// A thread owns 64 columns (a tile; 32 or 16 if tiles are few) for a panel of up to 192 rows. It computes all slices of k, or
// one. K is divided into pieces, a piece into blocks of columns, a block into units of rows. The sums of one unit and block stay
// in registers for a piece (AVX-512: 12 rows x 32 columns, 24 registers). Between pieces they are stored as fp32. Each step of k
// loads the weights of the unit's columns once and multiplies them with a broadcast of x for each row. A block's weights of a
// piece stay in the L1 cache for all units.
//
// x and weights are widened to fp32. Weights: in registers; or, if more than kDirectRows rows share them, once per block and
// piece into a buffer. Codes are always widened to the buffer and scaled there. x: up to kOwnRows rows are widened piece by
// piece. More rows are widened once for all tiles, into the scratch of the operation. The layout is one stream in read order:
// [panel][piece][unit][k][row of the unit]. With fast bf16 dot products (Weight::dot) a step is two k: VDPBF16PS or BFDOT.
// Nothing is widened, and x is read in place.
//
// Bytes per panel: the weight once, x once per tile and block from cache, y once. Each unit prefetches its share of the next
// piece, so that memory streams during computation (exception: Weight::follows). Limiter: the weight's bandwidth up to about 12
// rows, then the multiply rate.
//
// Reduction order: one fp32 sum for each output and slice of k (linear.hpp), k ascending (dot products: in pairs). Then the
// slices ascending, the leaves as a tree, the bias, and one rounding. Independent of M and of the split into units, blocks,
// panels, pieces and items: a row has the same bits in every batch.
#include "linear_unit.hpp"
#include "linear_values.hpp"
#include "thread_memory.hpp"

namespace qt::QT_ISA {
namespace {

static_assert(kPiece % 8 == 0);  // whole lines of codes

constexpr index_t kDirectRows = 36;  // up to this many rows, each unit widens weights in registers

// A panel's rows divided into units of nearly equal size: the first `longer` units have rows + 1.
struct Units {
  index_t count, rows, longer;

  QT_INLINE Units of(index_t panel_rows) {
    const index_t count = (panel_rows + kUnitRows - 1) / kUnitRows;
    return {count, panel_rows / count, panel_rows % count};
  }
  index_t begin(index_t unit) const { return unit * rows + (unit < longer ? unit : longer); }
  index_t rows_of(index_t unit) const { return rows + (unit < longer); }
};

// Multiplication of a step: number of k, and `bytes` of all 64 columns.
struct Way {
  Multiply (*multiply)(index_t rows, index_t vectors);
  index_t k, bytes;
};

template <class Step>
constexpr Way kWay = {multiply_for<Step>, Step::k, Step::template bytes<kTileColumns / kLanes>};

bool is_coded(const Weight& weight) { return weight.format == Dtype::int8; }

bool is_native(const Weight& weight) { return kDotsPairs && weight.format == Dtype::bf16 && weight.dot; }

// Multiplication directly from the tile.
Way way_of(const Weight& weight) {
  if constexpr (kDotsPairs) {
    if (is_native(weight)) return kWay<NativePairs>;
  }
  return weight.format == Dtype::bf16   ? kWay<WidePairs>
         : weight.format == Dtype::fp16 ? kWay<Single<fp16, false>>
                                        : kWay<Single<float, false>>;
}

// Storage granularity of weights: blocks of codes, or steps.
struct Stored {
  index_t k, bytes;
};
Stored stored_of(const Weight& weight) {
  const Way way = way_of(weight);
  return is_coded(weight) ? Stored{weight.block, weight.block_bytes} : Stored{way.k, way.bytes};
}

template <class Element>
void widen_row(const Element* x, index_t depth, float* out) {
  for (index_t k = 0; k < depth; k += kLanes) store(out + k, load(x + k, depth - k));
}

void widen_row(Dtype dtype, const void* x, index_t at, index_t depth, float* out) {
  if (dtype == Dtype::bf16)
    widen_row((const bf16*)x + at, depth, out);
  else if (dtype == Dtype::fp16)
    widen_row((const fp16*)x + at, depth, out);
  else
    widen_row((const float*)x + at, depth, out);
}

template <class Element>
void widen_singles(const Element* weight, index_t depth, index_t block, float* out) {
  for (index_t k = 0; k < depth; ++k, weight += kTileColumns, out += block)
    for (index_t c = 0; c < block; c += kLanes) store(out + c, load(weight + c));
}

// Widens `depth` k of `block` columns of a tile to fp32 [k][block].
void widen_block(const Weight& of, const char* weight, index_t depth, index_t column, index_t block, float* out) {
  if (is_coded(of)) return widen_codes(of, weight, depth, column, block, out);
  if (of.format == Dtype::fp16) return widen_singles((const fp16*)weight + column, depth, block, out);
  if (of.format == Dtype::fp32) return widen_singles((const float*)weight + column, depth, block, out);
  weight += column * 4;
  for (index_t k = 0; k < depth; k += 2, weight += kTileColumns * 4, out += 2 * block)
    for (index_t c = 0; c < block; c += kLanes) {
      const i32v pair = load_bits(weight + c * 4);
      store(out + c, as_float(pair << 16));
      if (k + 1 < depth) store(out + block + c, as_float(pair & all(std::int32_t(0xFFFF0000))));
    }
}

// Buffers of a thread for one item.
struct alignas(64) Buffers {
  float sums[kMaxPanelRows * kTileColumns];                // of a slice
  float total[kTreeHeight][kMaxPanelRows * kTileColumns];  // of the slices so far; several for leaves only
  float weights[kPiece * kTileColumns / 2];
  float x[kOwnRows * kPiece];
};

// Prefetch of the next piece, divided among the units of a block.
struct Ahead {
  const char* next;
  index_t left, share;  // groups of lines
  index_t lines, stride;

  void give(Unit& unit) {
    unit.ahead = next;
    unit.ahead_groups = left < share ? left : share;
    unit.ahead_lines = lines, unit.ahead_stride = stride;
    next += unit.ahead_groups * stride;
    left -= unit.ahead_groups;
  }
};

// Whole tiles: all lines of a piece, distributed evenly over `units` units of `steps` steps.
Ahead ahead_of_tile(const char* next, index_t bytes, index_t units, index_t steps) {
  const index_t all = next ? bytes / kLine : 0, each = (all + units - 1) / units;
  const index_t lines = each <= steps ? 1 : each <= 2 * steps ? 2 : 4;
  return {next, (all + lines - 1) / lines, (each + lines - 1) / lines, lines, lines * kLine};
}

// Block of a narrower item: prefetches its own columns; other threads own the rest.
Ahead ahead_of_block(const char* next, index_t steps, index_t step_bytes, index_t column, index_t block, index_t units) {
  const index_t lines = block * step_bytes / kTileColumns / kLine;
  return {next + column * step_bytes / kTileColumns, next ? steps : 0, (steps + units - 1) / units,
          lines < 1 ? 1 : lines, step_bytes};
}

const char* memory_at(const Weight& weight, index_t tile, index_t k) {
  const Stored stored = stored_of(weight);
  const char* const begin = weight.memory + tile * weight.tile_bytes + (is_coded(weight) ? kTileColumns * 4 : 0);
  return begin + k / stored.k * stored.bytes;
}

// Computes all slices of an item. The first slice accumulates in `first_sums`, which receives the total. `next_memory`: weights
// of the thread's probable next item.
void multiply_slices(const LinearCall& call, const LinearItem& item, const char* next_memory, float* first_sums,
                     Buffers& buffers) {
  const Weight& weight = *call.weight;
  const Finish target{call, item.tile, item.from, item.to};
  const Units units = Units::of(item.rows);
  const Stored stored = stored_of(weight);
  const bool native = is_native(weight), widens = is_coded(weight) || (!native && item.rows > kDirectRows);
  const bool own = !native && item.rows <= kOwnRows;  // also few rows of a last panel, although prepared
  const Way way = widens ? kWay<Widened> : way_of(weight);
  // Widened codes of a block must stay in the L1 cache.
  const index_t in_registers = block_vectors(units.rows_of(0)) * kLanes;
  const index_t most = is_coded(weight) && in_registers > kTileColumns / 2 ? kTileColumns / 2 : in_registers;
  const index_t span = item.to - item.from, width = span * item.spans;
  const index_t block = span < most ? span : most, blocks = width / block;
  const bool fetches = !weight.follows || item.rows > 1 || block < kTileColumns;  // prefetches the next piece
  const Multiply shorter = way.multiply(units.rows, block / kLanes);
  const Multiply longer = units.longer ? way.multiply(units.rows + 1, block / kLanes) : shorter;
  const char* piece = memory_at(weight, item.tile, item.k);
  for (index_t begin = item.k; begin < item.k_end; begin += kPiece) {
    const index_t in_slice = begin % weight.slice_depth;
    const index_t depth = item.k_end - begin < kPiece ? item.k_end - begin : kPiece, end = begin + depth;
    const index_t bytes = (depth + stored.k - 1) / stored.k * stored.bytes;
    const index_t left = item.k_end - end;  // 0: the next piece is of the next item
    const char* next = !fetches ? nullptr : left ? piece + bytes : next_memory;
    const index_t next_depth = left && left < kPiece ? left : weight.slice_depth < kPiece ? weight.slice_depth : kPiece;
    const index_t next_steps = next_depth / stored.k;
    const bool whole = width == kTileColumns, in_first = begin < item.k + weight.slice_depth;
    const bool ends = end == item.k_end || end % weight.slice_depth == 0;
    if (own)
      for (index_t r = 0; r < item.rows; ++r)
        widen_row(call.dtype, call.x, (item.row + r) * call.x_stride + begin, depth, buffers.x + r * kPiece);
    Unit unit{};
    unit.steps = depth / way.k;
    unit.odd = way.k == 2 && depth % 2 != 0;
    unit.first = in_slice == 0;
    Ahead ahead = ahead_of_tile(next, next_steps * stored.bytes, units.count * blocks, unit.steps);
    for (index_t place = 0; place < width; place += block) {
      const index_t column = column_of(item, place);
      if (!whole) ahead = ahead_of_block(next, next_steps, stored.bytes, column, block, units.count);
      if (widens) widen_block(weight, piece, depth, column, block, buffers.weights);
      unit.weight = widens ? (const char*)buffers.weights : piece + column * (stored.bytes / kTileColumns);
      for (index_t u = 0; u < units.count; ++u) {
        const index_t row = units.begin(u), at = row * kTileColumns + column;
        if (own) {
          unit.x = buffers.x, unit.x_stride = kPiece;
        } else if (!native) {
          unit.x = (const float*)call.prepared + item.row * weight.depth + item.rows * begin + row * depth;
        } else {
          unit.x = (const bf16*)call.x + (item.row + row) * call.x_stride + begin, unit.x_stride = call.x_stride;
        }
        unit.sums = (in_first ? first_sums : buffers.sums) + at;
        unit.total = ends && !in_first ? first_sums + at : nullptr;
        if (end == weight.depth && place + block == width) prefetch_outputs(target, item.row + row, units.rows_of(u));
        ahead.give(unit);
        (u < units.longer ? longer : shorter)(unit);
      }
    }
    piece += bytes;
  }
}

// Adds the sums of an item's leaves in buffers.total[0].
void multiply_leaves(const LinearCall& call, const LinearItem& item, const char* next_memory, Buffers& buffers) {
  const Weight* const weights = call.weight;
  add_as_tree(
      weights->leaves,
      [&](index_t leaf, index_t place) {
        const char* const next = leaf + 1 < weights->leaves ? memory_at(weights[leaf + 1], item.tile, 0) : next_memory;
        multiply_slices(leaf_of(call, leaf), item, next, buffers.total[place], buffers);
      },
      [&](index_t from, index_t to) { add_sums(item, item.rows, buffers.total[from], buffers.total[to]); });
}

void multiply_item(const LinearCall& call, const LinearItem& item, const char* next_memory, Buffers& buffers) {
  const Units units = Units::of(item.rows);
  if (call.sliced) {
    float* const sums = partials_of(call, item, item.slice);
    multiply_slices(item.leaf == 0 ? call : leaf_of(call, item.leaf), item, next_memory, sums, buffers);
    if (!brings_last_slice(call, item)) return;
    add_slices(call, item, buffers.total[0]);
  } else if (call.weight->leaves == 1) {
    multiply_slices(call, item, next_memory, buffers.total[0], buffers);
  } else {
    multiply_leaves(call, item, next_memory, buffers);
  }
  const Finish target{call, item.tile, item.from, item.to};
  const FinishRows finish_rows = finish_for(call);
  for (index_t u = 0; u < units.count; ++u)
    finish_rows(target, buffers.total[0] + units.begin(u) * kTileColumns, item.row + units.begin(u), units.rows_of(u));
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  const Weight& weight = *call.weight;
  const auto memory_of = [&](index_t item) {
    const LinearItem at = item_of(call, item);
    return memory_at(call.weight[at.leaf], at.tile, at.k);
  };
  prefetch_begin(memory_of(begin), weight.memory + weight.tiles * weight.tile_bytes);
  Buffers& buffers = *(Buffers*)thread_memory(sizeof(Buffers));
  for (index_t i = begin; i < end; ++i) {
    // After the last item: threads take items in order, so the most likely next item is `threads` ahead.
    const index_t next = i + 1 < end ? i + 1 : end == begin + 1 ? i + call.threads : call.items;
    multiply_item(call, item_of(call, i), next < call.items ? memory_of(next) : nullptr, buffers);
  }
}

// --- x in unit order, in fp32 ---

Preparation preparation(const Weight& weight, Dtype, Inputs) {
  return {is_native(weight) ? kNever : kOwnRows + 1, (weight.depth * 4 + 63) / 64 * 64, 0};
}

index_t panel_units(const LinearCall& call, index_t panel) {
  const index_t left = call.rows - panel * call.panel_rows;
  return Units::of(left < call.panel_rows ? left : call.panel_rows).count;
}

index_t pieces_of(const LinearCall& call) { return (call.weight->depth + kPiece - 1) / kPiece; }

// One item per unit and piece.
index_t prepare_items(const LinearCall& call) {
  return ((call.panels - 1) * panel_units(call, 0) + panel_units(call, call.panels - 1)) * pieces_of(call);
}

// Transposes x [rows][depth] to [depth][rows].
template <class Element>
void interleave(const Element* x, index_t x_stride, index_t rows, index_t depth, float* out) {
  for (index_t k = 0; k < depth; k += kLanes)
    for (index_t row = 0; row < rows; row += kLanes) {
      const index_t count = rows - row < kLanes ? rows - row : kLanes;
      i32v lanes[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        lanes[i] = i < count ? as_bits(load(x + (row + i) * x_stride + k, depth - k)) : i32v{};
      transpose(lanes);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i)
        if (k + i < depth) store(out + (k + i) * rows + row, as_float(lanes[i]), count);
    }
}

void prepare(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  const index_t pieces = pieces_of(call), in_panel = panel_units(call, 0), all_depth = call.weight->depth;
  for (index_t item = begin; item < end; ++item) {
    const index_t panel = item / pieces / in_panel, unit = item / pieces % in_panel, from = item % pieces * kPiece;
    const index_t first = panel * call.panel_rows;
    const index_t panel_rows = call.rows - first < call.panel_rows ? call.rows - first : call.panel_rows;
    const Units units = Units::of(panel_rows);
    const index_t depth = all_depth - from < kPiece ? all_depth - from : kPiece;
    float* out = (float*)call.prepared + first * all_depth + panel_rows * from + units.begin(unit) * depth;
    const index_t at = (first + units.begin(unit)) * call.x_stride + from, rows = units.rows_of(unit);
    if (call.dtype == Dtype::bf16)
      interleave((const bf16*)call.x + at, call.x_stride, rows, depth, out);
    else if (call.dtype == Dtype::fp16)
      interleave((const fp16*)call.x + at, call.x_stride, rows, depth, out);
    else
      interleave((const float*)call.x + at, call.x_stride, rows, depth, out);
  }
}

}  // namespace

const LinearKernels float_linear = {preparation, prepare_items, prepare, multiply_items};

}  // namespace qt::QT_ISA
