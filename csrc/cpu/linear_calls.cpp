// Linear layers and packed embeddings as operations of a program and as calls of their own; how they are split over
// threads.
#include <cstdlib>
#include <memory>

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

const LinearKernels& kernels_of(const Weight& weight) {
  const bool floats = int(weight.format) <= int(Dtype::fp32);
  return floats ? QT_CHOOSE(float_linear) : QT_CHOOSE(integer_linear);
}

index_t least(index_t a, index_t b) { return a < b ? a : b; }
index_t most(index_t a, index_t b) { return a > b ? a : b; }

// Panels of rows by parts of columns. Nothing about a result depends on it.
void split(LinearCall& call, const Preparation& preparation, index_t threads) {
  const index_t tiles = call.weight->tiles;
  call.threads = threads;
  call.panel_rows = preparation.panel_rows != 0 ? preparation.panel_rows : kPanelRows;
  call.panels = (call.rows + call.panel_rows - 1) / call.panel_rows;
  call.width = kTileColumns;
  while (!call.weight->paired && call.width > 16 && tiles * kTileColumns / call.width * call.panels < 2 * threads)
    call.width /= 2;
  call.parts = tiles * kTileColumns / call.width;
}

index_t grain(const LinearCall& call, index_t threads) {
  if (call.rows > kStreamRows) return 1;
  const index_t by_bytes = kStreamChunk / (call.weight->tile_bytes * call.width / kTileColumns);
  return most(1, least(by_bytes, call.parts / (threads * kChunksPerThread)));
}

struct Linear {
  LinearCall call{};
  Preparation preparation{};

  // Both works of the call for `rows`, whose prepared x may use `scratch`.
  void describe(index_t rows, char* scratch) {
    call.rows = rows;
    call.is_prepared = rows >= preparation.from_rows;
    call.prepared = call.is_prepared ? scratch : const_cast<void*>(call.x);
    call.prepared_stride =
        call.is_prepared ? preparation.row_bytes : call.x_stride * (call.dtype == Dtype::fp32 ? 4 : 2);
    call.x_group = preparation.x_group;
    split(call, preparation, pool().threads());
  }
  Work prepare() const {
    const LinearKernels& kernels = kernels_of(*call.weight);
    return {call.is_prepared ? kernels.prepare_items(call) : 0, kPrepareGrain, kernels.prepare, &call};
  }
  Work multiply() const {
    Work work{call.panels * call.parts, grain(call, pool().threads()), kernels_of(*call.weight).multiply, &call};
    if (call.panels == 1) {
      work.memory = call.weight->memory;
      work.piece_bytes = call.weight->tile_bytes * call.width / kTileColumns;
    }
    return work;
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

// Rewrites x; the operation that follows multiplies it.
class PrepareOp final : public Op {
 public:
  PrepareOp(std::shared_ptr<Linear> linear, const Program* program, bool outputs_only)
      : linear_(std::move(linear)), program_(program), outputs_only_(outputs_only) {}
  Work prepare(const Step& step) override {
    linear_->describe(outputs_only_ ? step.num_outputs : step.num_tokens, program_->scratch());
    return linear_->prepare();
  }

 private:
  std::shared_ptr<Linear> linear_;
  const Program* program_;
  bool outputs_only_;
};

class LinearOp final : public Op {
 public:
  LinearOp(std::shared_ptr<Linear> linear, const Program* program, bool outputs_only)
      : linear_(std::move(linear)), program_(program), outputs_only_(outputs_only) {}
  Work prepare(const Step& step) override {
    linear_->describe(outputs_only_ ? step.num_outputs : step.num_tokens, program_->scratch());
    return linear_->multiply();
  }

 private:
  std::shared_ptr<Linear> linear_;
  const Program* program_;
  bool outputs_only_;
};

class PackedEmbeddingOp final : public Op {
 public:
  explicit PackedEmbeddingOp(const PackedEmbeddingCall& call) : call_(call) {}
  Work prepare(const Step& step) override {
    call_.token_ids = step.token_ids;
    return {step.num_tokens, 1, QT_CHOOSE(pack).embed, &call_};
  }

 private:
  PackedEmbeddingCall call_;
};

}  // namespace
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
  char* scratch = nullptr;
  if (rows >= linear.preparation.from_rows)
    scratch = static_cast<char*>(std::aligned_alloc(64, linear.preparation.row_bytes * rows));
  linear.describe(rows, scratch);
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
  if (max_rows >= linear->preparation.from_rows) {
    program->reserve(linear->preparation.row_bytes * max_rows);
    program->append(std::make_unique<qt::PrepareOp>(linear, program, extent != 0));
  }
  program->append(std::make_unique<qt::LinearOp>(linear, program, extent != 0));
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
