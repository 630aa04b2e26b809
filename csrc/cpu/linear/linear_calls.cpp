// C ABI of linear layers and packed embeddings: operations of a program, and single calls.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "linear_cut.hpp"
#include "program.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kPrepareGrain = 8;
constexpr index_t kPrepareCost = 4;  // per element of x, in multiplications

struct Linear {
  LinearCall call{};
  Preparation preparation{};
  std::vector<std::uint32_t> pending;
  Cut cut{};
  index_t cut_rows = 0, cut_threads = 0;  // rows and threads of `cut`

  Linear(const LinearCall& described)
      : call(described),
        preparation(linear_kernels_of(*call.weight).preparation(*call.weight, call.dtype, call.inputs)) {}

  // Scratch bytes for the sums of slices of up to `rows` rows.
  index_t sliced_bytes(index_t rows) const {
    const Weight& weight = *call.weight;
    const index_t slices = weight.whole_slices;
    return slices == 1 ? 0 : slices * weight.tiles * std::min(rows, kSlicedRows) * kTileColumns * 4;
  }
  // Bytes of prepared x, for all leaves.
  index_t prepared_bytes(index_t rows) const { return call.weight->leaves * qt::prepared_bytes(preparation, rows); }

  // Describes both works of the call for `rows` rows, except the addresses of their scratch memory.
  void describe(index_t rows, index_t threads) {
    if (rows != cut_rows || threads != cut_threads)
      cut = best_cut(*call.weight, preparation, std::max(index_t(1), rows), threads, true);
    cut_rows = rows, cut_threads = threads;
    cut_call(call, preparation, rows, threads, cut);
    if (cut.sliced && index_t(pending.size()) < call.panels * call.parts) pending.resize(call.panels * call.parts);
    call.pending = pending.data();
  }
  // Sets the scratch addresses. `scratch`: prepared_bytes, `partials`: sliced_bytes, both for at least the described rows.
  void place(char* scratch, char* partials) {
    call.prepared = call.is_prepared ? scratch : const_cast<void*>(call.x);
    call.partials = reinterpret_cast<float*>(partials);
  }
  Work prepare() const {
    const LinearKernels& kernels = linear_kernels_of(*call.weight);
    const index_t leaves = call.weight->leaves;
    const auto run = leaves == 1 ? kernels.prepare : prepare_leaves;
    Work work{call.is_prepared ? leaves * kernels.prepare_items(call) : 0, kPrepareGrain, run, &call};
    if (work.count > 0) work.each_cost = kPrepareCost * call.rows * call.weight->whole_depth / work.count;
    return work;
  }
  static void prepare_leaves(const void* described, index_t begin, index_t end) {
    const LinearCall& call = *static_cast<const LinearCall*>(described);
    const LinearKernels& kernels = linear_kernels_of(*call.weight);
    const index_t each = kernels.prepare_items(call);
    for (index_t leaf = begin / each; begin < end; ++leaf) {
      const LinearCall its = leaf_of(call, leaf);
      const index_t last = std::min(end, (leaf + 1) * each);
      kernels.prepare(&its, begin - leaf * each, last - leaf * each);
      begin = last;
    }
  }
  Work multiply() const {
    const index_t grain = grain_of(call, preparation.together, call.threads, call.items);
    Work work{call.items, grain, linear_kernels_of(*call.weight).multiply, &call};
    work.cost = cost_of_item;
    const Weight& weight = *call.weight;
    const index_t weight_bytes = weight.leaves * weight.tiles * weight.tile_bytes + weight.outliers.bytes;
    work.bytes = call.panels * weight_bytes, work.bytes_again = work.bytes - weight_bytes * (call.panels > 0);
    if (call.panels == 1) work.region = region_of_item;
    return work;
  }
};

// One of the two works of a linear layer: `prepare` rewrites x, `multiply` follows it.
class LinearOp final : public Op {
 public:
  LinearOp(std::shared_ptr<Linear> linear, const Program* program, index_t max_rows, Extent extent,
           Work (Linear::*work)() const)
      : linear_(std::move(linear)), program_(program), max_rows_(max_rows), extent_(extent), work_(work) {}
  Work prepare(const Step& step, index_t threads) override {
    linear_->describe(rows_in(step, extent_), threads);
    linear_->place(program_->scratch(), program_->scratch() + linear_->prepared_bytes(max_rows_));
    return (linear_.get()->*work_)();
  }

 private:
  std::shared_ptr<Linear> linear_;
  const Program* program_;
  index_t max_rows_;
  Extent extent_;
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

void append_linear(Program* program, const LinearCall& call, index_t max_rows, Extent extent) {
  auto linear = std::make_shared<Linear>(call);
  program->reserve(linear->prepared_bytes(max_rows) + linear->sliced_bytes(max_rows));
  for (const auto work : {&Linear::prepare, &Linear::multiply})
    if (work == &Linear::multiply || max_rows >= linear->preparation.from_rows)
      program->append(std::make_unique<LinearOp>(linear, program, max_rows, extent, work));
}

// Sets the format of y: the call's dtype (rounded), or fp32.
void set_y_dtype(LinearCall& call, int y_dtype) {
  const bool is_plain = !call.residual && call.activation == Activation::none;
  QT_REQUIRE(y_dtype == int(call.dtype) || (y_dtype == int(Dtype::fp32) && is_plain),
             "a result of format %d, inputs of %d, %s", y_dtype, int(call.dtype),
             is_plain ? "nothing fused behind" : "a residual or an activation behind");
  call.y_dtype = Dtype(y_dtype);
}

}  // namespace
}  // namespace qt

// y[rows, columns] = x[rows, depth] · Wᵀ (+ bias), rounded to dtype; then the activation, or (+ residual), rounded again.
// Paired weights: activation of the gates times the ups, y[rows, columns / 2].
// dtype: of x, bias, residual and y; a floating-point weight has the same dtype.
// activation: an Activation; paired weights need one; not allowed with a residual.
// residual: layout of y, may be y. inputs: an Inputs. y_dtype: dtype, or fp32 without residual and activation: y is not
// rounded.
QT_EXPORT void qt_weight_linear(const qt::Weight* weight, const void* x, index_t x_stride, index_t rows, int dtype,
                                const void* bias, const void* residual, void* y, index_t y_stride, int activation,
                                int inputs, int y_dtype) {
  qt::LinearCall call = qt::linear_call(weight, x, x_stride, dtype, bias, residual, y, y_stride, activation, inputs);
  qt::set_y_dtype(call, y_dtype);
  qt::Linear linear(call);
  linear.describe(rows, qt::pool().threads());
  const index_t prepared = linear.prepared_bytes(rows), partials = linear.call.sliced ? linear.sliced_bytes(rows) : 0;
  char* scratch = prepared + partials == 0 ? nullptr : static_cast<char*>(std::aligned_alloc(64, prepared + partials));
  linear.place(scratch, scratch + prepared);
  const qt::Work works[] = {linear.prepare(), linear.multiply()};
  qt::pool().run(works, 2);
  std::free(scratch);
}

// Appends the same product for rows of the step (extent: an Extent), at most max_rows of them.
QT_EXPORT void qt_program_linear(qt::Program* program, const qt::Weight* weight, const void* x, index_t x_stride,
                                 index_t max_rows, int dtype, const void* bias, const void* residual, void* y,
                                 index_t y_stride, int activation, int inputs, int y_dtype, int extent) {
  QT_REQUIRE(x_stride >= weight->whole_depth && y_stride >= weight->columns / (weight->paired ? 2 : 1),
             "rows %lld and %lld apart, of a weight %lld deep with %lld columns", (long long)x_stride, (long long)y_stride,
             (long long)weight->whole_depth, (long long)weight->columns);
  qt::LinearCall call = qt::linear_call(weight, x, x_stride, dtype, bias, residual, y, y_stride, activation, inputs);
  qt::set_y_dtype(call, y_dtype);
  qt::append_linear(program, call, max_rows, qt::Extent(extent));
}

// Appends x · Wᵀ of the step's tokens as unrounded fp32 sums: the partial sums of one rank (ranks.hpp). The weight is not
// paired.
QT_EXPORT void qt_program_linear_sums(qt::Program* program, const qt::Weight* weight, const void* x, index_t x_stride,
                                      index_t max_rows, int dtype, float* y, index_t y_stride, int inputs) {
  QT_REQUIRE(!weight->paired && x_stride >= weight->whole_depth && y_stride >= weight->columns,
             "rows %lld and %lld apart, of a weight %lld deep with %lld columns", (long long)x_stride, (long long)y_stride,
             (long long)weight->whole_depth, (long long)weight->columns);
  qt::LinearCall call = qt::linear_call(weight, x, x_stride, dtype, nullptr, nullptr, y, y_stride, 0, inputs);
  call.y_dtype = qt::Dtype::fp32;
  qt::append_linear(program, call, max_rows, qt::Extent::tokens);
}

// Appends y[token] = column token_ids[token] of the weight: the embedding of a model with tied embeddings. The weight is not
// paired. dtype: of y; a floating-point weight has the same dtype.
QT_EXPORT void qt_program_embedding_packed(qt::Program* program, const qt::Weight* weight, void* y, index_t y_stride,
                                           int dtype) {
  QT_REQUIRE(!weight->paired && weight->leaves == 1 && y_stride >= weight->depth, "rows %lld apart, of a weight %lld deep",
             (long long)y_stride, (long long)weight->depth);
  program->append(
      std::make_unique<qt::PackedEmbeddingOp>(qt::PackedEmbeddingCall{weight, nullptr, y, y_stride, qt::Dtype(dtype)}));
}
