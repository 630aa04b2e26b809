// Linear layer per head: y[:, h * columns + c] = sum over k of x[:, h * depth + k] * W_h[c, k].
//
// Latent attention applies its key and value projections to queries and results instead of keys and values (DeepSeek-AI,
// "DeepSeek-V2", 2024, section 2.1.2): one matrix per head. Bytes: the weights of all heads once per panel of rows.
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "linear_group.hpp"
#include "program.hpp"
#include "require.hpp"

namespace qt {
namespace {

class HeadLinear {
 public:
  HeadLinear(const Weight* const* weights, index_t heads, const void* x, index_t x_stride, int dtype, void* y, index_t y_stride)
      : weights_(weights, weights + heads), x_(static_cast<const char*>(x)), y_(static_cast<char*>(y)), x_stride_(x_stride),
        size_(dtype == int(Dtype::fp32) ? 4 : 2),
        group_(linear_call(weights[0], x, x_stride, dtype, nullptr, nullptr, y, y_stride, int(Activation::none), 0)) {
    QT_REQUIRE(heads >= 1 && x_stride >= heads * weights[0]->depth && y_stride >= heads * weights[0]->columns,
               "%lld heads, rows %lld and %lld apart", (long long)heads, (long long)x_stride, (long long)y_stride);
  }

  index_t bytes(index_t rows) const { return index_t(weights_.size()) * prepared_bytes(group_.preparation(), rows); }

  void describe(index_t rows, index_t threads, char* scratch) {
    if (rows == rows_ && threads == threads_ && scratch == scratch_) return;
    rows_ = rows, threads_ = threads, scratch_ = scratch;
    const index_t heads = index_t(weights_.size()), each = prepared_bytes(group_.preparation(), rows);
    group_.clear();
    for (index_t head = 0; head < heads && rows > 0; ++head) {
      const Weight* weight = weights_[std::size_t(head)];
      group_.add(weight, rows, threads / heads + 1, x_ + head * weight->depth * size_, x_stride_, nullptr,
                 y_ + head * weight->columns * size_, scratch + head * each);
    }
  }
  const LinearGroup& group() const { return group_; }

 private:
  std::vector<const Weight*> weights_;
  const char* x_;
  char* y_;
  index_t x_stride_, size_;
  LinearGroup group_;
  index_t rows_ = -1, threads_ = 0;  // rows and threads of the described group
  char* scratch_ = nullptr;
};

// One of the two works.
class HeadLinearOp final : public Op {
 public:
  HeadLinearOp(std::shared_ptr<HeadLinear> heads, const Program* program, bool multiplies)
      : heads_(std::move(heads)), program_(program), multiplies_(multiplies) {}
  Work prepare(const Step& step, index_t threads) override {
    if (multiplies_) return heads_->group().multiply(threads);
    heads_->describe(step.num_tokens, threads, program_->scratch());
    return heads_->group().prepare();
  }

 private:
  std::shared_ptr<HeadLinear> heads_;
  const Program* program_;
  bool multiplies_;
};

}  // namespace
}  // namespace qt

// The weights have one shape and format and are not paired. dtype: of x and y, and of floating-point weights. y must not be x.
QT_EXPORT void qt_op_head_linear(const qt::Weight* const* weights, index_t heads, const void* x, index_t x_stride, index_t rows,
                                 int dtype, void* y, index_t y_stride) {
  qt::HeadLinear all(weights, heads, x, x_stride, dtype, y, y_stride);
  char* scratch = static_cast<char*>(std::aligned_alloc(64, std::max(index_t(64), all.bytes(rows))));
  const index_t threads = qt::pool().threads();
  all.describe(rows, threads, scratch);
  const qt::Work works[] = {all.group().prepare(), all.group().multiply(threads)};
  qt::pool().run(works, 2);
  std::free(scratch);
}

// Appends the same for the step's tokens, at most max_tokens. The weights must outlive the program.
QT_EXPORT void qt_program_head_linear(qt::Program* program, const qt::Weight* const* weights, index_t heads, const void* x,
                                      index_t x_stride, index_t max_tokens, int dtype, void* y, index_t y_stride) {
  auto all = std::make_shared<qt::HeadLinear>(weights, heads, x, x_stride, dtype, y, y_stride);
  program->reserve(all->bytes(max_tokens));
  for (const bool multiplies : {false, true})
    program->append(std::make_unique<qt::HeadLinearOp>(all, program, multiplies));
}
