// Low-rank adapters of a linear layer: y[t] += (x[t] · Aᵀ) · Bᵀ, with the A and B of the adapter of each token's row (Hu et al.,
// "LoRA", 2021). Tokens of rows without an adapter keep their y.
//
// One weight holds the A of several adapters (a bundle), since a weight with few columns is padded to a tile. The tokens of a
// bundle are multiplied by it together, then those of each adapter by its B. Rows of tokens that are not adjacent are copied to
// scratch memory first, and those of y back afterwards. x · Aᵀ is rounded to the number format of x, and so is the product with
// B before it is added. A row's bits do not depend on the other rows.
#include <algorithm>
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
      : rank_(b[0]->depth), together_(a[0]->columns / rank_), a_(a, a + (adapters + together_ - 1) / together_), b_(b, b + adapters),
        x_(static_cast<const char*>(x)), y_(static_cast<char*>(y)), x_stride_(x_stride), y_stride_(y_stride),
        low_stride_(a[0]->columns), max_tokens_(max_tokens), size_(dtype == int(Dtype::fp32) ? 4 : 2),
        counts_(std::size_t(adapters)),
        down_(linear_call(a[0], x, x_stride, dtype, nullptr, nullptr, nullptr, low_stride_, int(Activation::none), 0)),
        up_(linear_call(b[0], nullptr, low_stride_, dtype, nullptr, y, y, y_stride, int(Activation::none), 0)) {
    for (const Weight* each : a_)
      QT_REQUIRE(each->columns == together_ * rank_ && each->depth == a[0]->depth, "A of %lld by %lld, others of %lld by %lld",
                 (long long)each->columns, (long long)each->depth, (long long)(together_ * rank_), (long long)a[0]->depth);
    for (const Weight* each : b_)
      QT_REQUIRE(each->columns == b[0]->columns && each->depth == rank_, "B of %lld by %lld, others of %lld by %lld",
                 (long long)each->columns, (long long)each->depth, (long long)b[0]->columns, (long long)rank_);
    QT_REQUIRE(x_stride >= a[0]->depth && y_stride >= b[0]->columns, "rows %lld and %lld apart, of a layer %lld deep with %lld columns",
               (long long)x_stride, (long long)y_stride, (long long)a[0]->depth, (long long)b[0]->columns);
  }

  // Scratch bytes of a step.
  index_t bytes() const {
    const index_t prepared = prepared_bytes(down_.preparation(), max_tokens_) + prepared_bytes(up_.preparation(), max_tokens_);
    return in_lines(max_tokens_ * x_stride_ * size_) + in_lines(max_tokens_ * y_stride_ * size_) +
           in_lines(max_tokens_ * low_stride_ * size_) + prepared + index_t(a_.size() + b_.size()) * 64;
  }

  void describe(const Step& step, index_t threads, char* scratch) {
    down_.clear(), up_.clear(), copied_x_.clear(), copied_y_.clear();
    if (!step.row_adapters || !group_tokens(step)) return;
    gathered_x_ = scratch, gathered_y_ = gathered_x_ + in_lines(max_tokens_ * x_stride_ * size_);
    low_ = gathered_y_ + in_lines(max_tokens_ * y_stride_ * size_);
    char* prepared = low_ + in_lines(max_tokens_ * low_stride_ * size_);
    index_t used = 0;
    for (const index_t count : counts_) used += count > 0;
    const index_t share = threads / used + 1;
    for (index_t bundle = 0, begin = 0; bundle < index_t(a_.size()); ++bundle) {
      const index_t first = bundle * together_, last = std::min(first + together_, index_t(b_.size()));
      index_t end = begin;
      for (index_t adapter = first; adapter < last; ++adapter) end += counts_[std::size_t(adapter)];
      if (end == begin) continue;
      const char* x = place(begin, end, const_cast<char*>(x_), x_stride_, gathered_x_, copied_x_);
      down_.add(a_[std::size_t(bundle)], end - begin, share, x, x_stride_, nullptr, low_ + begin * low_stride_ * size_, prepared);
      prepared += prepared_bytes(down_.preparation(), end - begin);
      for (index_t adapter = first; adapter < last; ++adapter) {
        const index_t count = counts_[std::size_t(adapter)];
        if (count == 0) continue;
        const char* low = low_ + (begin * low_stride_ + (adapter - first) * rank_) * size_;
        char* y = place(begin, begin + count, y_, y_stride_, gathered_y_, copied_y_);
        up_.add(b_[std::size_t(adapter)], count, share, low, low_stride_, nullptr, y, prepared);
        prepared += prepared_bytes(up_.preparation(), count);
        begin += count;
      }
    }
  }

  Work work(int part, index_t threads) const {
    switch (part) {
      case kGather: return {index_t(copied_x_.size() + copied_y_.size()), kRowsAtOnce, gather, this};
      case kPrepareA: return down_.prepare();
      case kMultiplyA: return down_.multiply(threads);
      case kPrepareB: return up_.prepare();
      case kMultiplyB: return up_.multiply(threads);
      default: return {index_t(copied_y_.size()), kRowsAtOnce, scatter, this};
    }
  }

 private:
  // Sorts the tokens with an adapter by adapter, in order otherwise. Returns false if there are none.
  bool group_tokens(const Step& step) {
    counts_.assign(counts_.size(), 0);
    index_t total = 0;
    for (index_t row = 0; row < step.num_rows; ++row) {
      const index_t adapter = step.row_adapters[row];
      QT_REQUIRE(adapter >= 0 && adapter <= index_t(counts_.size()), "adapter %lld of %zu", (long long)adapter, counts_.size());
      if (adapter > 0) counts_[std::size_t(adapter - 1)] += step.row_counts[row], total += step.row_counts[row];
    }
    if (total == 0) return false;
    ends_.assign(counts_.size(), 0);
    for (std::size_t i = 1; i < counts_.size(); ++i) ends_[i] = ends_[i - 1] + counts_[i - 1];
    tokens_.resize(std::size_t(total));
    for (index_t row = 0; row < step.num_rows; ++row) {
      const index_t adapter = step.row_adapters[row];
      for (index_t i = 0; adapter > 0 && i < step.row_counts[row]; ++i)
        tokens_[std::size_t(ends_[std::size_t(adapter - 1)]++)] = step.row_offsets[row] + i;
    }
    return true;
  }

  // Returns the first row of the tokens [begin, end) of tokens_: their own rows if these are adjacent; otherwise a place for
  // copies, and adds them to `copied`.
  char* place(index_t begin, index_t end, char* own, index_t stride, char* gathered, std::vector<index_t>& copied) const {
    const index_t first = tokens_[std::size_t(begin)];
    bool adjacent = true;
    for (index_t i = begin; adjacent && i < end; ++i) adjacent = tokens_[std::size_t(i)] == first + i - begin;
    for (index_t i = begin; !adjacent && i < end; ++i) copied.push_back(i);
    return adjacent ? own + first * stride * size_ : gathered + begin * stride * size_;
  }

  static void gather(const void* described, index_t begin, index_t end) {
    const LoraLinear& lora = *static_cast<const LoraLinear*>(described);
    for (const index_t of_x = index_t(lora.copied_x_.size()); begin < end; ++begin) {
      const bool is_x = begin < of_x;
      const index_t place = is_x ? lora.copied_x_[std::size_t(begin)] : lora.copied_y_[std::size_t(begin - of_x)];
      const index_t token = lora.tokens_[std::size_t(place)], stride = (is_x ? lora.x_stride_ : lora.y_stride_) * lora.size_;
      std::memcpy((is_x ? lora.gathered_x_ : lora.gathered_y_) + place * stride, (is_x ? lora.x_ : lora.y_) + token * stride,
                  std::size_t((is_x ? lora.a_[0]->depth : lora.b_[0]->columns) * lora.size_));
    }
  }

  static void scatter(const void* described, index_t begin, index_t end) {
    const LoraLinear& lora = *static_cast<const LoraLinear*>(described);
    for (const index_t stride = lora.y_stride_ * lora.size_; begin < end; ++begin) {
      const index_t place = lora.copied_y_[std::size_t(begin)];
      std::memcpy(lora.y_ + lora.tokens_[std::size_t(place)] * stride, lora.gathered_y_ + place * stride,
                  std::size_t(lora.b_[0]->columns * lora.size_));
    }
  }

  index_t rank_, together_;  // columns of an adapter's A; adapters of a bundle
  std::vector<const Weight*> a_, b_;
  const char* x_;
  char* y_;
  index_t x_stride_, y_stride_, low_stride_, max_tokens_, size_;
  std::vector<index_t> counts_, ends_;          // tokens of each adapter
  std::vector<index_t> tokens_;                 // tokens with an adapter, by adapter
  std::vector<index_t> copied_x_, copied_y_;    // indices into tokens_
  char *gathered_x_ = nullptr, *gathered_y_ = nullptr, *low_ = nullptr;
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

// Appends the adapters of a layer, for the step's tokens, at most max_tokens. The number of a row's adapter is its index plus 1
// (Step::row_adapters). b: [columns of y, rank] of each adapter. a: [n * rank, depth of x] of each bundle: n adapters in order,
// fewer in the last one, of which the other rows are unused. The weights must outlive the program. dtype: of x, y and the weights.
QT_EXPORT void qt_program_lora(qt::Program* program, const qt::Weight* const* a, const qt::Weight* const* b, index_t adapters,
                               const void* x, index_t x_stride, index_t max_tokens, int dtype, void* y, index_t y_stride) {
  auto lora = std::make_shared<qt::LoraLinear>(a, b, adapters, x, x_stride, max_tokens, dtype, y, y_stride);
  program->reserve(lora->bytes());
  for (int part = 0; part < qt::LoraLinear::kParts; ++part)
    program->append(std::make_unique<qt::LoraOp>(lora, program, part));
}
