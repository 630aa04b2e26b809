// Linear layers and packed embeddings as operations of a program and as calls of their own; how they are split over
// threads.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "linear.hpp"
#include "program.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kPanelRows = 192;
constexpr index_t kStreamRows = 32;        // up to these, the weight's bandwidth is what limits
constexpr index_t kStreamChunk = 1 << 20;  // bytes of weight that a thread then takes at a time, at most
constexpr index_t kChunksPerThread = 8;    // so that a thread that was held up leaves its share to others
constexpr index_t kPrepareGrain = 8;
constexpr index_t kNarrowest = 16;         // columns of an item; of paired weights, of gates and of ups
constexpr index_t kSlicedRows = 64;        // up to these, slices may be items of their own
constexpr index_t kPrepareCost = 4;        // of a number of x, in multiplications
constexpr index_t kReadRows = 12;          // so many rows are multiplied in the time in which a weight is read

const LinearKernels& kernels_of(const Weight& weight) {
  const bool floats = int(weight.format) <= int(Dtype::fp32);
  return floats ? QT_CHOOSE(float_linear) : QT_CHOOSE(integer_linear);
}

index_t least(index_t a, index_t b) { return a < b ? a : b; }
index_t most(index_t a, index_t b) { return a > b ? a : b; }
index_t quotient_up(index_t a, index_t b) { return (a + b - 1) / b; }

// One way to cut a multiplication. Nothing about a result depends on it.
struct Cut {
  index_t panel_rows, width;
  bool sliced;
};

// The busiest thread's multiplications for each of all of them, were they spread evenly, at most: items are taken in order,
// and those that are smaller (the last panel's, or the last slice's) come last. And what the cut itself costs.
double cost_of(const Weight& weight, index_t rows, index_t threads, const Cut& cut) {
  const index_t parts = weight.tiles * kTileColumns / cut.width, panels = quotient_up(rows, cut.panel_rows);
  const index_t last_rows = rows - (panels - 1) * cut.panel_rows, slices = cut.sliced ? weight.slices : 1;
  const index_t depth = cut.sliced ? weight.slice_depth : weight.depth;
  const index_t last_depth = weight.depth - (slices - 1) * depth;
  const double whole = double(least(rows, cut.panel_rows)) * depth;  // of one part: the largest item's
  const double smallest = double(last_rows) * last_depth;
  const double mean = double(parts) * rows * weight.depth / threads;
  const index_t items = parts * panels * slices, large = items - parts * (panels > 1 || slices > 1);
  // Whoever ends last began its last item no later than all would have ended had they shared the others evenly.
  const double by_last = mean + smallest * double(threads - 1) / threads;
  const double by_count = whole * quotient_up(items, threads);
  const double busiest = std::max(whole * quotient_up(large, threads), std::min(by_last, by_count));
  // Narrow items load x more often and keep fewer sums in registers; each panel widens or expands the weights anew; slices of
  // one's own are written, read and added.
  const bool stream = rows <= kStreamRows;
  const double narrow = cut.width == kTileColumns ? 1.0 : cut.width * 2 == kTileColumns ? 1.01 : stream ? 1.02 : 1.06;
  const double panel = rows <= kPanelRows && panels == 1 ? 1.0 : 1.0 + 3.0 / cut.panel_rows;
  return busiest / mean * narrow * panel * (cut.sliced ? 1.04 : 1.0);
}

// The cheapest way for so many threads; of those that cost alike, with the largest items.
Cut best_cut(const Weight& weight, const Preparation& preparation, index_t rows, index_t threads) {
  const index_t highest_panel = preparation.panel_rows != 0 ? preparation.panel_rows : kPanelRows, step = preparation.panel_step;
  const index_t narrowest = weight.paired ? 2 * kNarrowest : kNarrowest;
  Cut best{highest_panel, kTileColumns, false};
  double cost = cost_of(weight, rows, threads, best) * 0.98;  // whole tiles, unless there is something to win
  index_t before = 0;
  for (index_t panels = quotient_up(rows, highest_panel); before != 2 * step; ++panels) {
    const index_t even = quotient_up(quotient_up(rows, panels), step) * step;
    const index_t panel_rows = even > highest_panel ? highest_panel : most(even, 2 * step);
    if (panel_rows == before) continue;
    before = panel_rows;
    for (index_t width = kTileColumns; width >= narrowest; width /= 2)
      for (const bool sliced : {false, true}) {
        if (sliced && (weight.slices == 1 || rows > kSlicedRows || panel_rows < rows)) continue;
        const Cut cut{panel_rows, width, sliced};
        const double its = cost_of(weight, rows, threads, cut);
        if (its < cost) best = cut, cost = its;
      }
    if (rows <= kStreamRows || threads == 1) break;
  }
  return best;
}

index_t grain(const LinearCall& call, index_t together, index_t threads) {
  if (call.rows > kStreamRows) return together;
  const index_t k = call.sliced ? call.weight->slice_depth : call.weight->depth;
  const index_t item_bytes = call.weight->tile_bytes * call.width / kTileColumns * k / call.weight->depth;
  return most(1, least(kStreamChunk / most(1, item_bytes), call.items / (threads * kChunksPerThread)));
}

index_t cost_of_item(const void* described, index_t item) {
  const LinearCall& call = *static_cast<const LinearCall*>(described);
  const LinearItem at = item_of(call, item);
  return most(at.rows, kReadRows) * call.width * (at.k_end - at.k);
}

// What an item reads of a weight: all of its tile's slice, or the lines of it that have its columns.
Region region_of_item(const void* described, index_t item) {
  const LinearCall& call = *static_cast<const LinearCall*>(described);
  const Weight& weight = *call.weight;
  const LinearItem at = item_of(call, item);
  const index_t bytes = weight.tile_bytes * (at.k_end - at.k) / weight.depth;
  const char* memory = weight.memory + at.tile * weight.tile_bytes + weight.tile_bytes * at.k / weight.depth;
  if (call.width == kTileColumns) return {memory, bytes, bytes, 1};
  const index_t line = kTileColumns * 4, width = line * (at.to - at.from) / kTileColumns;
  return {memory + at.from * 4, width, line, bytes / line};
}

struct Linear {
  LinearCall call{};
  Preparation preparation{};
  std::vector<std::uint32_t> pending;
  index_t cut_rows = 0, cut_threads = 0;  // what the call is cut for

  // So many bytes of scratch for up to `rows`: of prepared x, of slices' sums.
  index_t prepared_bytes(index_t rows) const {
    return rows < preparation.from_rows ? 0 : quotient_up(preparation.row_bytes * rows, 64) * 64;
  }
  index_t sliced_bytes(index_t rows) const {
    const Weight& weight = *call.weight;
    return weight.slices == 1 ? 0 : weight.slices * weight.tiles * least(rows, kSlicedRows) * kTileColumns * 4;
  }

  // Both works of the call for `rows`, but for where they leave what is between them.
  void describe(index_t rows, index_t threads) {
    call.rows = rows;
    call.is_prepared = rows >= preparation.from_rows;
    call.prepared_stride =
        call.is_prepared ? preparation.row_bytes : call.x_stride * (call.dtype == Dtype::fp32 ? 4 : 2);
    call.x_group = preparation.x_group;
    split(threads);
  }
  // `scratch`: prepared_bytes, `partials`: sliced_bytes, of at least the rows described.
  void place(char* scratch, char* partials) {
    call.prepared = call.is_prepared ? scratch : const_cast<void*>(call.x);
    call.partials = reinterpret_cast<float*>(partials);
  }
  Work prepare() const {
    const LinearKernels& kernels = kernels_of(*call.weight);
    Work work{call.is_prepared ? kernels.prepare_items(call) : 0, kPrepareGrain, kernels.prepare, &call};
    if (work.count > 0) work.each_cost = kPrepareCost * call.rows * call.weight->depth / work.count;
    return work;
  }
  Work multiply() const {
    Work work{call.items, grain(call, preparation.together, call.threads), kernels_of(*call.weight).multiply, &call};
    work.cost = cost_of_item;
    const index_t weight_bytes = call.weight->tiles * call.weight->tile_bytes;
    work.bytes = call.panels * weight_bytes, work.bytes_again = work.bytes - weight_bytes * (call.panels > 0);
    if (call.panels == 1) work.region = region_of_item;
    return work;
  }

 private:
  void split(index_t threads) {
    if (call.rows == cut_rows && threads == cut_threads) return;
    cut_rows = call.rows, cut_threads = threads;
    const Weight& weight = *call.weight;
    const Cut cut = best_cut(weight, preparation, most(1, call.rows), threads);
    call.threads = threads;
    call.panel_rows = cut.panel_rows, call.width = cut.width, call.sliced = cut.sliced;
    call.panels = quotient_up(call.rows, cut.panel_rows);
    call.parts = weight.tiles * kTileColumns / cut.width;
    call.items = call.panels * call.parts * (cut.sliced ? weight.slices : 1);
    if (cut.sliced && index_t(pending.size()) < call.panels * call.parts) pending.resize(call.panels * call.parts);
    call.pending = pending.data();
  }
};

Linear linear_of(const Weight* weight, const void* x, index_t x_stride, int dtype, const void* bias,
                 const void* residual, void* y, index_t y_stride, int activation, int int8_activations) {
  const bool floats = int(weight->format) <= int(Dtype::fp32);
  QT_REQUIRE(dtype >= 0 && dtype <= int(Dtype::fp32) && (!floats || dtype == int(weight->format)),
             "activations of format %d, a weight of %d", dtype, int(weight->format));
  QT_REQUIRE(weight->paired ? activation == int(Activation::silu) || activation == int(Activation::gelu_tanh)
                            : activation == int(Activation::none),
             "activation %d of a weight that is %spaired", activation, weight->paired ? "" : "not ");
  Linear linear;
  LinearCall& call = linear.call;
  call.weight = weight;
  call.dtype = Dtype(dtype);
  call.x = x, call.x_stride = x_stride;
  call.bias = bias, call.residual = residual;
  call.y = y, call.y_stride = y_stride;
  call.activation = Activation(activation);
  call.int8_activations = int8_activations != 0;
  linear.preparation = kernels_of(*weight).preparation(*weight, call.dtype, call.int8_activations);
  return linear;
}

// One of a linear layer's two works: `prepare` rewrites x, `multiply` follows it.
class LinearOp final : public Op {
 public:
  LinearOp(std::shared_ptr<Linear> linear, const Program* program, index_t max_rows, bool outputs_only,
           Work (Linear::*work)() const)
      : linear_(std::move(linear)), program_(program), max_rows_(max_rows), outputs_only_(outputs_only), work_(work) {}
  Work prepare(const Step& step, index_t threads) override {
    linear_->describe(outputs_only_ ? step.num_outputs : step.num_tokens, threads);
    linear_->place(program_->scratch(), program_->scratch() + linear_->prepared_bytes(max_rows_));
    return (linear_.get()->*work_)();
  }

 private:
  std::shared_ptr<Linear> linear_;
  const Program* program_;
  index_t max_rows_;
  bool outputs_only_;
  Work (Linear::*work_)() const;
};

class PackedEmbeddingOp final : public Op {
 public:
  explicit PackedEmbeddingOp(const PackedEmbeddingCall& call) : call_(call) {}
  Work prepare(const Step& step, index_t) override {
    call_.token_ids = step.token_ids;
    return {step.num_tokens, 1, QT_CHOOSE(pack).embed, &call_};
  }

 private:
  PackedEmbeddingCall call_;
};

}  // namespace

LinearItem item_of(const LinearCall& call, index_t item) {
  const Weight& weight = *call.weight;
  const index_t output = item % (call.panels * call.parts), slice = item / (call.panels * call.parts);
  const index_t row = output / call.parts * call.panel_rows, column = output % call.parts * call.width;
  LinearItem at{};
  at.tile = column / kTileColumns;
  at.spans = weight.paired && call.width < kTileColumns ? 2 : 1;
  at.from = column % kTileColumns / at.spans;
  at.to = at.from + call.width / at.spans;
  at.row = row;
  at.rows = least(call.rows - row, call.panel_rows);
  at.slice = slice;
  at.k = slice * weight.slice_depth;
  at.k_end = call.sliced ? least(weight.depth, at.k + weight.slice_depth) : weight.depth;
  at.output = output;
  return at;
}

}  // namespace qt

// y[rows, columns] = x[rows, depth] · Wᵀ (+ bias), rounded to dtype; then (+ residual), rounded again; paired weights:
// the activation of the gates times the ups, y[rows, columns / 2]. dtype: of x, bias, residual and y; a floating-point
// weight has the same. activation: none, or of the gates silu or gelu_tanh, which paired weights need and others do
// not take. residual: laid out like y, may be y. int8_activations: x quantized per row to 8 bits (integer weights
// only).
QT_EXPORT void qt_weight_linear(const qt::Weight* weight, const void* x, index_t x_stride, index_t rows, int dtype,
                                const void* bias, const void* residual, void* y, index_t y_stride, int activation,
                                int int8_activations) {
  qt::Linear linear =
      qt::linear_of(weight, x, x_stride, dtype, bias, residual, y, y_stride, activation, int8_activations);
  linear.describe(rows, qt::pool().threads());
  const index_t prepared = linear.prepared_bytes(rows), partials = linear.call.sliced ? linear.sliced_bytes(rows) : 0;
  char* scratch = prepared + partials == 0 ? nullptr : static_cast<char*>(std::aligned_alloc(64, prepared + partials));
  linear.place(scratch, scratch + prepared);
  const qt::Work works[] = {linear.prepare(), linear.multiply()};
  qt::pool().run(works, 2);
  std::free(scratch);
}

// Appends the same for the step's tokens (extent 0) or its output rows (extent 1), at most max_rows of them.
QT_EXPORT void qt_program_linear(qt::Program* program, const qt::Weight* weight, const void* x, index_t x_stride,
                                 index_t max_rows, int dtype, const void* bias, const void* residual, void* y,
                                 index_t y_stride, int activation, int int8_activations, int extent) {
  QT_REQUIRE(x_stride >= weight->depth && y_stride >= weight->columns / (weight->paired ? 2 : 1),
             "rows %lld and %lld apart, of a weight %lld deep with %lld columns", (long long)x_stride, (long long)y_stride,
             (long long)weight->depth, (long long)weight->columns);
  auto linear = std::make_shared<qt::Linear>(
      qt::linear_of(weight, x, x_stride, dtype, bias, residual, y, y_stride, activation, int8_activations));
  program->reserve(linear->prepared_bytes(max_rows) + linear->sliced_bytes(max_rows));
  for (const auto work : {&qt::Linear::prepare, &qt::Linear::multiply})
    if (work == &qt::Linear::multiply || max_rows >= linear->preparation.from_rows)
      program->append(std::make_unique<qt::LinearOp>(linear, program, max_rows, extent != 0, work));
}

// Appends y[token] = the weight's column token_ids[token]: what a model with tied embeddings starts with. The weight is
// not paired; dtype: of y, a floating-point weight has the same.
QT_EXPORT void qt_program_embedding_packed(qt::Program* program, const qt::Weight* weight, void* y, index_t y_stride,
                                           int dtype) {
  QT_REQUIRE(!weight->paired && y_stride >= weight->depth, "rows %lld apart, of a weight %lld deep", (long long)y_stride,
             (long long)weight->depth);
  program->append(
      std::make_unique<qt::PackedEmbeddingOp>(qt::PackedEmbeddingCall{weight, nullptr, y, y_stride, qt::Dtype(dtype)}));
}
