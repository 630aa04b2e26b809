#include "linear_cut.hpp"

#include <algorithm>

#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kPanelRows = 192;
constexpr index_t kStreamRows = 32;        // up to these, the weight's memory bandwidth is the limiter
constexpr index_t kStreamChunk = 1 << 20;  // most bytes of weight in one take of a thread in that case
constexpr index_t kChunksPerThread = 8;    // so that other threads can take over the share of a delayed thread
constexpr index_t kNarrowest = 16;         // columns of an item; of paired weights: of gates and of ups
constexpr index_t kReadRows = 12;          // rows that are multiplied in the time of one read of the weight

index_t least(index_t a, index_t b) { return a < b ? a : b; }
index_t most(index_t a, index_t b) { return a > b ? a : b; }
index_t quotient_up(index_t a, index_t b) { return (a + b - 1) / b; }

// Relative cost of a cut: upper bound of the busiest thread's multiplications over the mean, times the overhead of the cut.
// Threads take items in order; the smaller items (last panel, last slice) come last.
double cost_of(const Weight& weight, index_t rows, index_t threads, const Cut& cut) {
  const index_t parts = weight.tiles * kTileColumns / cut.width, panels = quotient_up(rows, cut.panel_rows);
  const index_t last_rows = rows - (panels - 1) * cut.panel_rows, slices = cut.sliced ? weight.whole_slices : 1;
  const index_t depth = cut.sliced ? weight.slice_depth : weight.whole_depth;
  const index_t last_depth = cut.sliced ? weight.depth - (weight.slices - 1) * depth : depth;
  const double whole = double(least(rows, cut.panel_rows)) * depth;  // of one part: the largest item
  const double smallest = double(last_rows) * last_depth;
  const double mean = double(parts) * rows * weight.whole_depth / threads;
  const index_t items = parts * panels * slices, large = items - parts * (panels > 1 || slices > 1);
  // The thread that finishes last starts its last item no later than the mean finish time of the other items.
  const double by_last = mean + smallest * double(threads - 1) / threads;
  const double by_count = whole * quotient_up(items, threads);
  const double busiest = std::max(whole * quotient_up(large, threads), std::min(by_last, by_count));
  // Overheads: narrow items load x more often and keep fewer sums in registers. Each panel converts the weights again. Slices
  // as items are written, read and added.
  const bool stream = rows <= kStreamRows;
  const double narrow = cut.width == kTileColumns ? 1.0 : cut.width * 2 == kTileColumns ? 1.01 : stream ? 1.02 : 1.06;
  const double panel = rows <= kPanelRows && panels == 1 ? 1.0 : 1.0 + 3.0 / cut.panel_rows;
  return busiest / mean * narrow * panel * (cut.sliced ? 1.04 : 1.0);
}

}  // namespace

const LinearKernels& linear_kernels_of(const Weight& weight) {
  if (weight.values == Values::tables) return QT_CHOOSE(tables_linear);
  const bool floats = int(weight.format) <= int(Dtype::fp32) || weight.values != Values::integer;
  return floats ? QT_CHOOSE(float_linear) : QT_CHOOSE(integer_linear);
}

Cut best_cut(const Weight& weight, const Preparation& preparation, index_t rows, index_t threads, bool may_slice) {
  const index_t highest_panel = preparation.panel_rows != 0 ? preparation.panel_rows : kPanelRows, step = preparation.panel_step;
  const index_t narrowest = weight.paired ? 2 * kNarrowest : kNarrowest;
  Cut best{highest_panel, kTileColumns, false};
  double cost = cost_of(weight, rows, threads, best) * 0.98;  // prefers full tiles unless another cut is at least 2% cheaper
  index_t before = 0;
  for (index_t panels = quotient_up(rows, highest_panel); before != 2 * step; ++panels) {
    const index_t even = quotient_up(quotient_up(rows, panels), step) * step;
    const index_t panel_rows = even > highest_panel ? highest_panel : most(even, 2 * step);
    if (panel_rows == before) continue;
    before = panel_rows;
    for (index_t width = kTileColumns; width >= narrowest; width /= 2)
      for (const bool sliced : {false, true}) {
        if (sliced && (!may_slice || weight.whole_slices == 1 || rows > kSlicedRows || panel_rows < rows)) continue;
        const Cut cut{panel_rows, width, sliced};
        const double its = cost_of(weight, rows, threads, cut);
        if (its < cost) best = cut, cost = its;
      }
    if (rows <= kStreamRows || threads == 1) break;
  }
  return best;
}

LinearCall linear_call(const Weight* weight, const void* x, index_t x_stride, int dtype, const void* bias,
                       const void* residual, void* y, index_t y_stride, int activation, int inputs) {
  const bool floats = int(weight->format) <= int(Dtype::fp32);
  QT_REQUIRE(inputs >= 0 && inputs < kInputs, "inputs %d", inputs);
  QT_REQUIRE(!are_eight_bits(Inputs(inputs)) || (!floats && weight->values == Values::integer), "8-bit activations of a weight of %s",
             "floating-point numbers");
  QT_REQUIRE(dtype >= 0 && dtype <= int(Dtype::fp32) && (!floats || dtype == int(weight->format)),
             "activations of format %d, a weight of %d", dtype, int(weight->format));
  const bool one_number = activation >= 0 && activation < kActivations;
  QT_REQUIRE((weight->paired ? activation != 0 && (one_number || activation == int(Activation::clamped_swiglu)) : one_number) &&
                 (!residual || activation == 0),
             "activation %d of a weight that is %spaired, %s residual", activation, weight->paired ? "" : "not ",
             residual ? "with a" : "without");
  LinearCall call{};
  call.weight = weight;
  call.dtype = call.y_dtype = Dtype(dtype);
  call.x = x, call.x_stride = x_stride;
  call.bias = bias, call.residual = residual;
  call.y = y, call.y_stride = y_stride;
  call.activation = Activation(activation);
  call.inputs = Inputs(inputs);
  return call;
}

void cut_call(LinearCall& call, const Preparation& preparation, index_t rows, index_t threads, const Cut& cut) {
  const Weight& weight = *call.weight;
  call.rows = rows;
  call.is_prepared = rows >= preparation.from_rows;
  call.prepared_stride = call.is_prepared ? preparation.row_bytes : call.x_stride * (call.dtype == Dtype::fp32 ? 4 : 2);
  call.prepared_leaf = prepared_bytes(preparation, rows);
  call.x_group = preparation.x_group;
  call.threads = threads;
  call.panel_rows = cut.panel_rows, call.width = cut.width, call.sliced = cut.sliced;
  call.panels = quotient_up(rows, cut.panel_rows);
  call.parts = weight.tiles * kTileColumns / cut.width;
  call.items = call.panels * call.parts * (cut.sliced ? weight.whole_slices : 1);
}

index_t prepared_bytes(const Preparation& preparation, index_t rows) {
  return rows < preparation.from_rows ? 0 : quotient_up(preparation.row_bytes * rows, 64) * 64;
}

index_t grain_of(const LinearCall& call, index_t together, index_t threads, index_t items) {
  if (call.rows > kStreamRows) return together;
  const index_t k = call.sliced ? call.weight->slice_depth : call.weight->whole_depth;
  const index_t item_bytes = call.weight->tile_bytes * call.width / kTileColumns * k / call.weight->depth;
  return most(1, least(kStreamChunk / most(1, item_bytes), items / (threads * kChunksPerThread)));
}

index_t cost_of_item(const void* described, index_t item) {
  const LinearCall& call = *static_cast<const LinearCall*>(described);
  const LinearItem at = item_of(call, item);
  return most(at.rows, kReadRows) * call.width * (at.k_end - at.k) * (call.sliced ? 1 : call.weight->leaves);
}

Region region_of_item(const void* described, index_t item) {
  const LinearCall& call = *static_cast<const LinearCall*>(described);
  const Weight& weight = *call.weight;
  const LinearItem at = item_of(call, item);
  const index_t bytes = weight.tile_bytes * (at.k_end - at.k) / weight.depth;
  const char* memory = call.weight[at.leaf].memory + at.tile * weight.tile_bytes + weight.tile_bytes * at.k / weight.depth;
  if (call.width == kTileColumns)
    return {memory, bytes, weight.tiles * weight.tile_bytes, call.sliced ? 1 : weight.leaves};
  const index_t line = kTileColumns * 4, width = line * (at.to - at.from) / kTileColumns;
  return {memory + at.from * 4, width, line, bytes / line};
}

LinearItem item_of(const LinearCall& call, index_t item) {
  const Weight& weight = *call.weight;
  // Avoids divisions for small items, which have few rows and hence one panel.
  const index_t outputs = call.panels * call.parts, slice = call.sliced ? item / outputs : 0, output = item - slice * outputs;
  const index_t panel = call.panels > 1 ? output / call.parts : 0;
  const index_t row = panel * call.panel_rows, column = (output - panel * call.parts) * call.width;
  LinearItem at{};
  at.tile = column / kTileColumns;
  at.spans = weight.paired && call.width < kTileColumns ? 2 : 1;
  at.from = column % kTileColumns / at.spans;
  at.to = at.from + call.width / at.spans;
  at.row = row;
  at.rows = least(call.rows - row, call.panel_rows);
  at.slice = slice;
  at.leaf = weight.leaves > 1 ? slice / weight.slices : 0;
  at.k = (slice - at.leaf * weight.slices) * weight.slice_depth;
  at.k_end = call.sliced ? least(weight.depth, at.k + weight.slice_depth) : weight.depth;
  at.output = output;
  return at;
}

LinearCall leaf_of(const LinearCall& call, index_t leaf) {
  LinearCall its = call;
  its.weight = call.weight + leaf;
  const index_t x_bytes = leaf * call.weight->depth * (call.dtype == Dtype::fp32 ? 4 : 2);
  its.x = static_cast<const char*>(call.x) + x_bytes;
  its.prepared = static_cast<char*>(call.prepared) + (call.is_prepared ? leaf * call.prepared_leaf : x_bytes);
  return its;
}

}  // namespace qt
