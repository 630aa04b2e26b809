// C ABI of expert layers, and the cut of their products. See experts.hpp.
#include "experts.hpp"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "expert_shares.hpp"
#include "linear_group.hpp"
#include "program.hpp"
#include "ranks.hpp"
#include "require.hpp"

namespace qt {

namespace {

constexpr index_t kRoutedAtOnce = 16;  // up to so many tokens are routed in the planning piece
constexpr index_t kElementsAtOnce = 8192;
constexpr index_t kPageBytes = 4096, kLineBytes = 64;

// Stride in elements of the rows between the products. Rows of full pages would map to the same cache sets, so they get one
// more cache line.
index_t stride_of(index_t width, index_t size) {
  return width + (width * size % kPageBytes == 0 ? kLineBytes / size : 0);
}

index_t in_lines(index_t bytes) { return (bytes + kLineBytes - 1) / kLineBytes * kLineBytes; }

LinearCall gate_up_call(const ExpertsLayer& layer, index_t x_stride, index_t y_stride, int dtype) {
  LinearCall call = linear_call(layer.gate_up[0], nullptr, x_stride, dtype, nullptr, nullptr, nullptr, y_stride,
                                int(layer.activation), int(layer.gate_up_inputs));
  call.gate_factor = float(layer.gate_factor), call.gate_limit = float(layer.gate_limit);
  return call;
}

LinearCall down_call(const ExpertsLayer& layer, index_t x_stride, index_t y_stride, int dtype, int y_dtype) {
  LinearCall call = linear_call(layer.down[0], nullptr, x_stride, dtype, nullptr, nullptr, nullptr, y_stride,
                                int(Activation::none), int(layer.down_inputs));
  call.y_dtype = Dtype(y_dtype);
  return call;
}

// Output of a layer. rows: expert rows of all ranks in shared memory; null: rows of this process.
struct Results {
  void* y;
  index_t y_stride;
  bool in_fp32 = false;  // partial sums
  char* rows = nullptr;
  const void* residual = nullptr;
};

// Works of a layer in one step: `route`, `plan`, four late works and `combine`.
class Experts {
 public:
  enum Part { kRoute, kPlan, kGather, kPrepareIn, kMultiplyIn, kPrepareOut, kMultiplyOut, kCombine, kParts };

  Experts(const ExpertsLayer& layer, const void* x, index_t x_stride, const void* scores, index_t scores_stride,
          const Results& results, int dtype)
      : layer_(layer), dtype_(dtype), y_dtype_(results.in_fp32 ? int(Dtype::fp32) : dtype),
        size_(dtype == int(Dtype::fp32) ? 4 : 2), out_size_(y_dtype_ == int(Dtype::fp32) ? 4 : 2),
        shared_rows_(results.rows), hidden_(layer.gate_up[0]->depth),
        width_(layer.down[0]->depth), x_(static_cast<const char*>(x)), x_stride_(x_stride),
        row_stride_(stride_of(hidden_, size_)), act_stride_(stride_of(width_, size_)),
        gate_up_(gate_up_call(layer, row_stride_, act_stride_, dtype)),
        down_(down_call(layer, act_stride_, row_stride_, dtype, y_dtype_)),
        counts_(std::size_t(layer.routing.experts)), next_(counts_), firsts_(counts_), parts_(counts_.size()),
        begins_(std::size_t(layer.routing.experts)), shares_(layer_) {
    const Routing& routing = layer_.routing;
    QT_REQUIRE(routing.experts >= 1 && routing.experts <= kMostExperts && routing.chosen >= 1 &&
                   routing.chosen <= kMostChosen && routing.groups >= 1 && routing.experts % routing.groups == 0 &&
                   routing.chosen_groups >= 1 && routing.chosen_groups <= routing.groups && routing.group_best >= 1 &&
                   routing.group_best <= std::min(routing.experts / routing.groups, kMostChosen) &&
                   routing.chosen <= routing.chosen_groups * (routing.experts / routing.groups),
               "%lld of %lld experts in %lld of %lld groups", (long long)routing.chosen, (long long)routing.experts,
               (long long)routing.chosen_groups, (long long)routing.groups);
    QT_REQUIRE(layer.gate_up[0]->columns == 2 * width_ && layer.down[0]->columns == hidden_,
               "experts of %lld and %lld columns, %lld and %lld deep", (long long)layer.gate_up[0]->columns,
               (long long)layer.down[0]->columns, (long long)hidden_, (long long)width_);
    QT_REQUIRE(shared_rows_ || layer.kept == routing.experts, "%lld of %lld experts, and no rank has the others",
               (long long)layer.kept, (long long)routing.experts);
    gate_ups_.assign(layer.gate_up, layer.gate_up + layer.kept + layer.places);
    downs_.assign(layer.down, layer.down + layer.kept + layer.places);
    route_ = {&layer_.routing, scores, scores_stride, nullptr, nullptr};
    gather_ = {x, x_stride, hidden_, nullptr, routing.chosen, nullptr, nullptr, row_stride_};
    combine_ = {nullptr, row_stride_, hidden_, nullptr, routing.chosen, nullptr, results.residual, results.y, results.y_stride};
  }

  // Bytes of a token's rows in the memory shared by ranks.
  index_t row_bytes() const { return layer_.routing.chosen * row_stride_ * out_size_; }

  // Scratch bytes for up to `tokens` tokens.
  index_t bytes(index_t tokens) { return lay_out(nullptr, tokens); }

  // Describes all works of a step. threads: used for the cut.
  void describe(index_t tokens, index_t max_tokens, index_t threads, char* scratch) {
    tokens_ = tokens, threads_ = threads;
    lay_out(scratch, max_tokens);
  }
  Work work(int part) {
    const ExpertsKernels& kernels = QT_CHOOSE(experts);
    const index_t grain = std::max(index_t(1), kElementsAtOnce / hidden_);
    if (part == kRoute) return {tokens_ > kRoutedAtOnce ? tokens_ : 0, 16, kernels.route[dtype_], &route_};
    if (part == kPlan) return {1, 1, plan, this};
    if (part == kCombine) return {tokens_, grain, kernels.combine[y_dtype_], &combine_};
    Work work;
    work.late = &late_[part];
    return work;
  }

 private:
  index_t lay_out(char* memory, index_t tokens) {
    const index_t pairs = tokens * layer_.routing.chosen;
    index_t at = 0;
    const auto take = [&](index_t bytes) {
      char* const begin = memory + at;
      at += in_lines(bytes);
      return begin;
    };
    route_.ids = reinterpret_cast<std::int32_t*>(take(pairs * 4));
    route_.weights = reinterpret_cast<float*>(take(pairs * 4));
    row_of_ = reinterpret_cast<std::int32_t*>(take(pairs * 4));
    pair_of_ = reinterpret_cast<std::int32_t*>(take(pairs * 4));
    rows_ = take(pairs * row_stride_ * std::max(size_, out_size_));  // input rows, then output rows unless these are in shared
                                                                     // memory
    out_ = shared_rows_ ? shared_rows_ : rows_;
    act_ = take(pairs * act_stride_ * size_);
    prepared_ = take(pairs * std::max(gate_up_.preparation().row_bytes, down_.preparation().row_bytes));
    gather_.pairs = pair_of_, gather_.y = rows_;
    gather_.factors = layer_.scaled_inputs ? route_.weights : nullptr;
    combine_.x = out_, combine_.rows = row_of_;
    combine_.weights = layer_.scaled_inputs ? nullptr : route_.weights;
    return at;
  }

  static void plan(const void* experts, index_t, index_t) { static_cast<Experts*>(const_cast<void*>(experts))->plan(); }

  void plan() {
    if (tokens_ <= kRoutedAtOnce) QT_CHOOSE(experts).route[dtype_](&route_, 0, tokens_);
    const index_t active = sort_pairs();
    gate_up_.clear(), down_.clear();
    bool gathers = false;
    index_t cost = 0;
    for (index_t i = 0; i < active; ++i) {
      const auto [expert, place, begin, rows] = parts_[std::size_t(i)];
      cost += std::max(kReadRows, rows);
      for (index_t at = 0; at < index_t(sizeof(Weight)); at += kLineBytes) {  // prefetches all headers; otherwise each one is a
                                                                              // cache miss in turn
        __builtin_prefetch(reinterpret_cast<const char*>(gate_ups_[std::size_t(place)]) + at);
        __builtin_prefetch(reinterpret_cast<const char*>(downs_[std::size_t(place)]) + at);
      }
    }
    for (index_t i = 0, row = 0; i < active; ++i) {
      const auto [expert, place, begin, rows] = parts_[std::size_t(i)];
      const index_t share = threads_ * std::max(kReadRows, rows) / cost + 1;
      const bool direct = rows == 1 && !layer_.scaled_inputs;  // read without a gather
      gathers |= !direct;
      const char* x = direct ? x_ + pair_of_[row] / layer_.routing.chosen * x_stride_ * size_
                             : rows_ + row * row_stride_ * size_;
      const index_t to = shared_rows_ ? begins_[std::size_t(expert)] + begin : row;
      gate_up_.add(gate_ups_[std::size_t(place)], rows, share, x, direct ? x_stride_ : row_stride_,
                   bias_of(layer_.gate_up_bias, place * 2 * width_ * size_), act_ + row * act_stride_ * size_,
                   prepared_ + row * gate_up_.preparation().row_bytes);
      down_.add(downs_[std::size_t(place)], rows, share, act_ + row * act_stride_ * size_, act_stride_,
                bias_of(layer_.down_bias, place * hidden_ * size_), out_ + to * row_stride_ * out_size_,
                prepared_ + row * down_.preparation().row_bytes);
      row += rows;
    }
    const index_t grain = std::max(index_t(1), kElementsAtOnce / hidden_);
    late_[kGather] = {gathers ? rows_here_ : 0, grain, QT_CHOOSE(experts).gather[dtype_], &gather_};
    late_[kPrepareIn] = gate_up_.prepare(), late_[kMultiplyIn] = gate_up_.multiply(threads_);
    late_[kPrepareOut] = down_.prepare(), late_[kMultiplyOut] = down_.multiply(threads_);
  }

  // Sorts the pairs of this rank by expert, stably; experts with the most rows come first. Returns the number of experts.
  // Output rows have this order; shared rows are ordered by the ids of all experts.
  index_t sort_pairs() {
    const index_t pairs = tokens_ * layer_.routing.chosen, experts = layer_.routing.experts;
    std::fill(counts_.begin(), counts_.end(), 0);
    for (index_t pair = 0; pair < pairs; ++pair) ++counts_[std::size_t(route_.ids[pair])];
    shares_.divide(counts_);
    index_t active = 0, all_rows = 0;
    for (index_t expert = 0; expert < experts; ++expert) {
      begins_[std::size_t(expert)] = all_rows;
      all_rows += counts_[std::size_t(expert)];
      const auto [begin, end] = shares_.rows(expert);
      if (end > begin) parts_[std::size_t(active++)] = {expert, shares_.place(expert), begin, end - begin};
    }
    std::sort(parts_.begin(), parts_.begin() + active, [](const Share& a, const Share& b) {
      return a.rows != b.rows ? a.rows > b.rows : a.expert < b.expert;
    });
    rows_here_ = 0;
    for (index_t i = 0; i < active; rows_here_ += parts_[std::size_t(i++)].rows)
      firsts_[std::size_t(parts_[std::size_t(i)].expert)] = rows_here_;
    std::fill(next_.begin(), next_.end(), 0);
    for (index_t pair = 0; pair < pairs; ++pair) {
      const std::size_t expert = std::size_t(route_.ids[pair]);
      const auto [begin, end] = shares_.rows(index_t(expert));
      const index_t number = next_[expert]++, row = firsts_[expert] + number - begin;
      if (number >= begin && number < end) pair_of_[row] = std::int32_t(pair);
      row_of_[pair] = std::int32_t(shared_rows_ ? begins_[expert] + number : row);
    }
    return active;
  }

  static const char* bias_of(const void* biases, index_t bytes_before) {
    return biases ? static_cast<const char*>(biases) + bytes_before : nullptr;
  }

  // This rank's part of an expert: `rows` of its rows, starting at `begin`.
  struct Share {
    index_t expert, place, begin, rows;
  };

  ExpertsLayer layer_;
  int dtype_, y_dtype_;  // of the input; of the experts' results and their sum
  index_t size_, out_size_;
  char* shared_rows_;
  index_t hidden_, width_;
  const char* x_;
  index_t x_stride_, row_stride_, act_stride_;
  LinearGroup gate_up_, down_;
  // For each expert: number of rows; rows seen so far; first row among this rank's rows, and among all rows.
  std::vector<index_t> counts_, next_, firsts_;
  std::vector<Share> parts_;  // experts with rows on this rank
  std::vector<index_t> begins_;
  ExpertShares shares_;
  std::vector<const Weight*> gate_ups_, downs_;
  RouteCall route_;
  GatherCall gather_;
  CombineCall combine_;
  Work late_[kParts];
  index_t tokens_ = 0, threads_ = 1, rows_here_ = 0;
  std::int32_t *row_of_ = nullptr, *pair_of_ = nullptr;  // of each pair; of each row
  char *rows_ = nullptr, *out_ = nullptr, *act_ = nullptr, *prepared_ = nullptr;
};

class ExpertsOp final : public Op {
 public:
  ExpertsOp(std::shared_ptr<Experts> experts, const Program* program, index_t max_tokens, int part)
      : experts_(std::move(experts)), program_(program), max_tokens_(max_tokens), part_(part) {}
  Work prepare(const Step& step, index_t threads) override {
    if (part_ == 0) experts_->describe(step.num_tokens, max_tokens_, threads, program_->scratch());
    return experts_->work(part_);
  }

 private:
  std::shared_ptr<Experts> experts_;
  const Program* program_;
  index_t max_tokens_;
  int part_;
};

void append_parts(Program* program, std::shared_ptr<Experts> experts, index_t max_tokens, int begin, int end) {
  program->reserve(experts->bytes(max_tokens));
  for (int part = begin; part < end; ++part)
    program->append(std::make_unique<ExpertsOp>(experts, program, max_tokens, part));
}

}  // namespace
}  // namespace qt

QT_EXPORT index_t qt_experts_bytes() { return sizeof(qt::ExpertsLayer); }

// Divides a step's rows, counts[experts], over the ranks as a layer does, and updates `asked`.
QT_EXPORT void qt_experts_divide(const qt::ExpertsLayer* layer, const std::int64_t* counts) {
  qt::ExpertShares shares(*layer);
  shares.divide(std::vector<index_t>(counts, counts + layer->routing.experts));
}

// y[rows, hidden] = the weighted sum of the experts chosen by scores[rows, experts], for x[rows, hidden]. dtype: of x, scores,
// biases and y.
QT_EXPORT void qt_op_experts(const qt::ExpertsLayer* layer, const void* x, index_t x_stride, const void* scores,
                             index_t scores_stride, index_t rows, void* y, index_t y_stride, int dtype) {
  qt::Experts experts(*layer, x, x_stride, scores, scores_stride, {y, y_stride}, dtype);
  char* scratch = static_cast<char*>(std::aligned_alloc(64, experts.bytes(rows)));
  experts.describe(rows, rows, qt::pool().threads(), scratch);
  qt::Work works[qt::Experts::kParts];
  for (int part = 0; part < qt::Experts::kParts; ++part) works[part] = experts.work(part);
  qt::pool().run(works, qt::Experts::kParts);
  std::free(scratch);
}

// Appends the same for the step's tokens, at most max_tokens. The weights and the arrays of the layer must outlive the program;
// the layer itself need not.
QT_EXPORT void qt_program_experts(qt::Program* program, const qt::ExpertsLayer* layer, const void* x, index_t x_stride,
                                  const void* scores, index_t scores_stride, index_t max_tokens, void* y, index_t y_stride,
                                  int dtype) {
  using qt::Experts;
  const auto experts = std::make_shared<Experts>(*layer, x, x_stride, scores, scores_stride, qt::Results{y, y_stride}, dtype);
  qt::append_parts(program, experts, max_tokens, 0, Experts::kParts);
}

// Appends unrounded fp32 sums of experts with a width divided over the ranks (ranks.hpp). dtype: of x and scores.
QT_EXPORT void qt_program_experts_sums(qt::Program* program, const qt::ExpertsLayer* layer, const void* x, index_t x_stride,
                                       const void* scores, index_t scores_stride, index_t max_tokens, float* y,
                                       index_t y_stride, int dtype) {
  using qt::Experts;
  const qt::Results results{.y = y, .y_stride = y_stride, .in_fp32 = true};
  const auto experts = std::make_shared<Experts>(*layer, x, x_stride, scores, scores_stride, results, dtype);
  qt::append_parts(program, experts, max_tokens, 0, Experts::kParts);
}

// Appends an expert-parallel layer: write the rows of this rank's experts to shared memory, barrier, y = sum of a token's rows
// in the order of a single process, rounded; then (+ residual), rounded again. The ranks must have passed a barrier since they
// read the previous rows.
QT_EXPORT void qt_program_experts_of_ranks(qt::Program* program, qt::Ranks* ranks, const qt::ExpertsLayer* layer, const void* x,
                                           index_t x_stride, const void* scores, index_t scores_stride, index_t max_tokens,
                                           const void* residual, void* y, index_t y_stride, int dtype) {
  using qt::Experts;
  const qt::Results results{.y = y, .y_stride = y_stride, .rows = ranks->expert_rows(), .residual = residual};
  const auto experts = std::make_shared<Experts>(*layer, x, x_stride, scores, scores_stride, results, dtype);
  QT_REQUIRE(experts->row_bytes() <= ranks->shape().experts_row_bytes && max_tokens <= ranks->shape().max_tokens,
             "%lld bytes of each of %lld tokens", (long long)experts->row_bytes(), (long long)max_tokens);
  qt::append_parts(program, experts, max_tokens, 0, Experts::kCombine);
  qt::append_meeting(program, ranks, qt::Extent::tokens);
  qt::append_parts(program, experts, max_tokens, Experts::kCombine, Experts::kParts);
}
