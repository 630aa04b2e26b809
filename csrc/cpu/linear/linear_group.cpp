#include "linear_group.hpp"

#include <algorithm>

#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kPrepareGrain = 8;
constexpr index_t kRemembered = 256;  // rows

}  // namespace

LinearGroup::LinearGroup(const LinearCall& like)
    : like_(like), kernels_(linear_kernels_of(*like.weight)),
      preparation_(kernels_.preparation(*like.weight, like.dtype, like.inputs)) {
  QT_REQUIRE(like.weight->leaves == 1, "a group of weights in %lld leaves", (long long)like.weight->leaves);
}

void LinearGroup::clear() { calls_.clear(), items_.assign(1, 0), prepared_items_.assign(1, 0); }

void LinearGroup::add(const Weight* weight, index_t rows, index_t threads, const char* x, index_t x_stride, const char* bias,
                      char* y, char* prepared) {
  LinearCall call = like_;
  call.weight = weight;
  call.x = x, call.x_stride = x_stride, call.bias = bias, call.y = y;
  if (like_.residual) call.residual = y;
  cut_call(call, preparation_, rows, threads, cut_of(*weight, rows, threads));
  const bool again = !calls_.empty() && rows == 1 && calls_.back().rows == 1 && calls_.back().x == x;  // next expert of the
                                                                                                       // same token: x is
                                                                                                       // prepared once
  call.prepared = !call.is_prepared ? const_cast<char*>(x) : again ? calls_.back().prepared : prepared;
  calls_.push_back(call);
  items_.push_back(items_.back() + call.items);
  prepared_items_.push_back(prepared_items_.back() + (call.is_prepared && !again ? kernels_.prepare_items(call) : 0));
}

Work LinearGroup::prepare() const {
  return {prepared_items_.back(), kPrepareGrain, run<&LinearGroup::prepared_items_, false>, this};
}

Work LinearGroup::multiply(index_t threads) const {
  index_t grain = 1;
  for (const LinearCall& call : calls_)
    grain = std::max(grain, grain_of(call, preparation_.together, threads, items_.back()));
  Work work{items_.back(), grain, run<&LinearGroup::items_, true>, this};
  work.region = region, work.cost = cost;
  for (const LinearCall& call : calls_) {
    const index_t weight_bytes = call.weight->tiles * call.weight->tile_bytes;
    work.bytes += call.panels * weight_bytes, work.bytes_again += (call.panels - 1) * weight_bytes;
  }
  return work;
}

index_t LinearGroup::call_of(const Ends& ends, index_t item) {
  return std::upper_bound(ends.begin(), ends.end(), item) - ends.begin() - 1;
}

template <auto ends_of, bool multiplies>
void LinearGroup::run(const void* described, index_t begin, index_t end) {
  const LinearGroup& group = *static_cast<const LinearGroup*>(described);
  const Ends& ends = group.*ends_of;
  const auto work = multiplies ? group.kernels_.multiply : group.kernels_.prepare;
  for (index_t i = call_of(ends, begin); begin < end; ++i) {
    const index_t first = ends[std::size_t(i)], last = std::min(end, ends[std::size_t(i) + 1]);
    if (begin < last) work(&group.calls_[std::size_t(i)], begin - first, last - first);
    begin = last;
  }
}

Region LinearGroup::region(const void* described, index_t item) {
  const LinearGroup& group = *static_cast<const LinearGroup*>(described);
  const index_t i = call_of(group.items_, item);
  return region_of_item(&group.calls_[std::size_t(i)], item - group.items_[std::size_t(i)]);
}

index_t LinearGroup::cost(const void* described, index_t item) {
  const LinearGroup& group = *static_cast<const LinearGroup*>(described);
  const index_t i = call_of(group.items_, item);
  return cost_of_item(&group.calls_[std::size_t(i)], item - group.items_[std::size_t(i)]);
}

Cut LinearGroup::cut_of(const Weight& weight, index_t rows, index_t threads) {
  if (rows >= kRemembered) return best_cut(weight, preparation_, rows, threads, false);
  if (known_.empty()) known_.resize(kRemembered);
  Known& known = known_[std::size_t(rows)];
  if (known.threads != threads) known = {threads, best_cut(weight, preparation_, rows, threads, false)};
  return known.cut;
}

}  // namespace qt
