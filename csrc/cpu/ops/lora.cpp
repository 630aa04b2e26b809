// Low-rank adapters of a linear layer: y[t] += (x[t] · Aᵀ) · Bᵀ, with the A and B of the adapter of each token's row (Hu et al.,
// "LoRA", 2021). Tokens of rows without an adapter keep their y.
//
// The tokens of each adapter are multiplied together. If they are not adjacent, their rows of x and y are copied to scratch
// memory first, and the rows of y back afterwards. x · Aᵀ is rounded to the number format of x, and so is the product with B
// before it is added. A row's bits do not depend on the other rows.
#include <cstring>
#include <memory>
#include <vector>

#include "linear_group.hpp"
#include "program.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kRowsAtOnce = 8;  // copied rows of a piece

index_t in_lines(index_t bytes) { return (bytes + 63) / 64 * 64; }

class LoraLinear {
 public:
  enum Part { kGather, kPrepareA, kMultiplyA, kPrepareB, kMultiplyB, kScatter, kParts };

  LoraLinear(const Weight* const* a, const Weight* const* b, index_t adapters, const void* x, index_t x_stride, index_t max_tokens,
             int dtype, void* y, index_t y_stride)
      : a_(a, a + adapters), b_(b, b + adapters), x_(static_cast<const char*>(x)), y_(static_cast<char*>(y)),
        x_stride_(x_stride), y_stride_(y_stride), max_tokens_(max_tokens), size_(dtype == int(Dtype::fp32) ? 4 : 2),
        rank_(a[0]->columns), counts_(std::size_t(adapters)),
        down_(linear_call(a[0], x, x_stride, dtype, nullptr, nullptr, nullptr, rank_, int(Activation::none), 0)),
        up_(linear_call(b[0], nullptr, rank_, dtype, nullptr, y, y, y_stride, int(Activation::none), 0)) {
    for (index_t i = 0; i < adapters; ++i)
      QT_REQUIRE(a[i]->columns == rank_ && b[i]->depth == rank_ && a[i]->depth == a[0]->depth && b[i]->columns == b[0]->columns,
                 "adapter %lld: %lld by %lld and %lld by %lld", (long long)i, (long long)a[i]->columns, (long long)a[i]->depth,
                 (long long)b[i]->columns, (long long)b[i]->depth);
    QT_REQUIRE(x_stride >= a[0]->depth && y_stride >= b[0]->columns, "rows %lld and %lld apart, of a layer %lld deep with %lld columns",
               (long long)x_stride, (long long)y_stride, (long long)a[0]->depth, (long long)b[0]->columns);
  }

  // Scratch bytes of a step.
  index_t bytes() const {
    const index_t prepared = prepared_bytes(down_.preparation(), max_tokens_) + prepared_bytes(up_.preparation(), max_tokens_);
    return in_lines(max_tokens_ * x_stride_ * size_) + in_lines(max_tokens_ * y_stride_ * size_) +
           in_lines(max_tokens_ * rank_ * size_) + prepared + index_t(2 * a_.size()) * 64;
  }

  void describe(const Step& step, index_t threads, char* scratch) {
    down_.clear(), up_.clear(), copied_.clear();
    if (!step.slot_adapters || !group_tokens(step)) return;
    gathered_x_ = scratch, gathered_y_ = gathered_x_ + in_lines(max_tokens_ * x_stride_ * size_);
    char* between = gathered_y_ + in_lines(max_tokens_ * y_stride_ * size_);
    char* prepared = between + in_lines(max_tokens_ * rank_ * size_);
    index_t begin = 0, used = 0;
    for (const index_t count : counts_) used += count > 0;
    for (std::size_t adapter = 0; adapter < counts_.size(); ++adapter) {
      const index_t count = counts_[adapter];
      if (count == 0) continue;
      const index_t first = tokens_[std::size_t(begin)];
      const bool adjacent = tokens_[std::size_t(begin + count - 1)] - first == count - 1;
      const char* x = adjacent ? x_ + first * x_stride_ * size_ : gathered_x_ + begin * x_stride_ * size_;
      char* y = adjacent ? y_ + first * y_stride_ * size_ : gathered_y_ + begin * y_stride_ * size_;
      char* low = between + begin * rank_ * size_;
      for (index_t i = begin; !adjacent && i < begin + count; ++i) copied_.push_back(i);
      down_.add(a_[adapter], count, threads / used + 1, x, x_stride_, nullptr, low, prepared);
      prepared += prepared_bytes(down_.preparation(), count);
      up_.add(b_[adapter], count, threads / used + 1, low, rank_, nullptr, y, prepared);
      prepared += prepared_bytes(up_.preparation(), count);
      begin += count;
    }
  }

  Work work(int part, index_t threads) const {
    switch (part) {
      case kGather: return {index_t(copied_.size()), kRowsAtOnce, copy<true>, this};
      case kPrepareA: return down_.prepare();
      case kMultiplyA: return down_.multiply(threads);
      case kPrepareB: return up_.prepare();
      case kMultiplyB: return up_.multiply(threads);
      default: return {index_t(copied_.size()), kRowsAtOnce, copy<false>, this};
    }
  }

 private:
  // Sorts the tokens with an adapter by adapter, in order otherwise. Returns false if there are none.
  bool group_tokens(const Step& step) {
    counts_.assign(counts_.size(), 0);
    index_t total = 0;
    for (index_t row = 0; row < step.num_rows; ++row) {
      const std::int32_t adapter = step.slot_adapters[step.row_slots[row]];
      QT_REQUIRE(adapter >= 0 && adapter <= index_t(counts_.size()), "adapter %d of %zu", adapter, counts_.size());
      if (adapter > 0) counts_[std::size_t(adapter - 1)] += step.row_counts[row], total += step.row_counts[row];
    }
    if (total == 0) return false;
    ends_.assign(counts_.size(), 0);
    for (std::size_t i = 1; i < counts_.size(); ++i) ends_[i] = ends_[i - 1] + counts_[i - 1];
    tokens_.resize(std::size_t(total));
    for (index_t row = 0; row < step.num_rows; ++row) {
      const std::int32_t adapter = step.slot_adapters[step.row_slots[row]];
      for (index_t i = 0; adapter > 0 && i < step.row_counts[row]; ++i)
        tokens_[std::size_t(ends_[std::size_t(adapter - 1)]++)] = step.row_offsets[row] + i;
    }
    return true;
  }

  template <bool gathers>
  static void copy(const void* described, index_t begin, index_t end) {
    const LoraLinear& lora = *static_cast<const LoraLinear*>(described);
    const std::size_t x_bytes = std::size_t(lora.a_[0]->depth * lora.size_), y_bytes = std::size_t(lora.b_[0]->columns * lora.size_);
    for (; begin < end; ++begin) {
      const index_t place = lora.copied_[std::size_t(begin)], token = lora.tokens_[std::size_t(place)];
      char* const own = lora.y_ + token * lora.y_stride_ * lora.size_;
      char* const gathered = lora.gathered_y_ + place * lora.y_stride_ * lora.size_;
      std::memcpy(gathers ? gathered : own, gathers ? own : gathered, y_bytes);
      if (gathers)
        std::memcpy(lora.gathered_x_ + place * lora.x_stride_ * lora.size_, lora.x_ + token * lora.x_stride_ * lora.size_, x_bytes);
    }
  }

  std::vector<const Weight*> a_, b_;
  const char* x_;
  char* y_;
  index_t x_stride_, y_stride_, max_tokens_, size_, rank_;
  std::vector<index_t> counts_, ends_;  // tokens of each adapter
  std::vector<index_t> tokens_;         // tokens with an adapter, by adapter
  std::vector<index_t> copied_;         // indices into tokens_ of those that are not adjacent to the others of their adapter
  char *gathered_x_ = nullptr, *gathered_y_ = nullptr;
  LinearGroup down_, up_;
};

class LoraOp final : public Op {
 public:
  LoraOp(std::shared_ptr<LoraLinear> lora, const Program* program, int part) : lora_(std::move(lora)), program_(program), part_(part) {}
  Work prepare(const Step& step, index_t threads) override {
    if (part_ == LoraLinear::kGather) lora_->describe(step, threads, program_->scratch());
    return lora_->work(part_, threads);
  }

 private:
  std::shared_ptr<LoraLinear> lora_;
  const Program* program_;
  int part_;
};

}  // namespace
}  // namespace qt

// Appends the adapters of a layer, for the step's tokens, at most max_tokens. a: [rank, depth of x], b: [columns of y, rank] of
// each adapter, of the same shapes for all; the number of a slot's adapter is its index plus 1 (Step::slot_adapters). The weights
// must outlive the program. dtype: of x, y and the weights.
QT_EXPORT void qt_program_lora(qt::Program* program, const qt::Weight* const* a, const qt::Weight* const* b, index_t adapters,
                               const void* x, index_t x_stride, index_t max_tokens, int dtype, void* y, index_t y_stride) {
  auto lora = std::make_shared<qt::LoraLinear>(a, b, adapters, x, x_stride, max_tokens, dtype, y, y_stride);
  program->reserve(lora->bytes());
  for (int part = 0; part < qt::LoraLinear::kParts; ++part)
    program->append(std::make_unique<qt::LoraOp>(lora, program, part));
}
