// Mixture of experts: routing, gather of expert rows, and the weighted sum of expert outputs.
//
// A thread owns a token (route, combine) or a row (gather).
//
// - Route: [E] scores in fp32 on the stack and one pass for each of K choices, about E (K + 10) operations.
// - Gather: one row read, one written.
// - Combine: K rows read, one written; summed in fp32 with k ascending and rounded once.
//
// Limiter: cache bandwidth. Reduction order: over experts, lanes ascending by vectors, then by halves; over chosen experts, k
// ascending. Independent of batch size.
#include "experts.hpp"

#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kPadded = kMostExperts + kLanes;

// A token's scores, their selection keys, and the experts that are no longer available.
struct Scores {
  alignas(64) float values[kPadded];   // logits, then scores
  alignas(64) float choices[kPadded];  // selection keys
  bool taken[kMostExperts];
};

template <class Element>
void load_row(const Element* from, index_t count, float* to) {
  for (index_t i = 0; i < count; i += kLanes) store(to + i, load(from + i, count - i));
}

// e^(value - largest) / sum. The largest is finite, or all values are NaN.
void softmax(float* values, index_t count) {
  float largest = values[0];
  for (index_t i = 1; i < count; ++i) largest = values[i] > largest ? values[i] : largest;
  float sum = 0;
  f32v sums{};
  index_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const f32v e = exponential(load(values + i) - all(largest));
    store(values + i, e);
    sums += e;
  }
  if (i < count) {
    const f32v e = exponential(load(values + i) - all(largest));
    float lanes[kLanes];
    store(lanes, e);
    for (index_t lane = 0; i + lane < count; ++lane) {
      values[i + lane] = lanes[lane];
      sum += lanes[lane];
    }
  }
  sum += sum_of(sums);
  for (index_t j = 0; j < count; ++j) values[j] /= sum;
}

void sigmoid(float* values, index_t count) {
  for (index_t i = 0; i < count; i += kLanes)
    store(values + i, all(1.0f) / (all(1.0f) + exponential(-load(values + i))));
}

// Index of the largest value that is not taken, the first of equal ones; any index that is not taken if all are NaN.
index_t largest_of(const float* values, const bool* taken, index_t begin, index_t end) {
  index_t best = -1;
  for (index_t i = begin; i < end; ++i)
    if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
  return best;
}

// Marks all experts of unselected groups as taken.
void choose_groups(const Routing& routing, Scores& scores) {
  const index_t size = routing.experts / routing.groups;
  float totals[kMostExperts];
  bool chosen[kMostExperts] = {};
  for (index_t group = 0; group < routing.groups; ++group) {
    const index_t begin = group * size, end = begin + size;
    totals[group] = 0;
    index_t picked[kMostChosen];
    for (index_t n = 0; n < routing.group_best; ++n) {
      picked[n] = largest_of(scores.choices, scores.taken, begin, end);
      totals[group] += scores.choices[picked[n]];
      scores.taken[picked[n]] = true;
    }
    for (index_t n = 0; n < routing.group_best; ++n) scores.taken[picked[n]] = false;
  }
  for (index_t n = 0; n < routing.chosen_groups; ++n) chosen[largest_of(totals, chosen, 0, routing.groups)] = true;
  for (index_t i = 0; i < routing.experts; ++i) scores.taken[i] = !chosen[i / size];
}

// Sparse mixer: softmax of `largest` over the experts that are not taken and within the jitter threshold.
float share_of_near(const Routing& routing, const Scores& scores, index_t largest) {
  const float most = scores.values[largest];
  float sum = 0;
  for (index_t i = 0; i < routing.experts; ++i) {
    const float value = scores.values[i], magnitude = value < 0 ? -value : value;
    const bool is_far = (most - value) / (magnitude > most ? magnitude : most) > 2 * float(routing.jitter);
    if (!scores.taken[i] && !is_far) sum += exponential(all(value - most))[0];
  }
  return 1 / sum;
}

void route_token(const Routing& routing, Scores& scores, std::int32_t* ids, float* weights) {
  const index_t experts = routing.experts, chosen = routing.chosen;
  for (index_t i = 0; i < kLanes; ++i) scores.values[experts + i] = 0;
  if (routing.scoring == Scoring::softmax) softmax(scores.values, experts);
  if (routing.scoring == Scoring::sigmoid) sigmoid(scores.values, experts);
  for (index_t i = 0; i < experts; ++i) {
    scores.choices[i] = scores.values[i] + (routing.correction ? routing.correction[i] : 0.0f);
    scores.taken[i] = false;
  }
  if (routing.groups > 1) choose_groups(routing, scores);
  float of_chosen[kMostChosen + kLanes] = {};
  for (index_t k = 0; k < chosen; ++k) {
    const index_t id = largest_of(scores.choices, scores.taken, 0, experts);
    ids[k] = std::int32_t(id);
    of_chosen[k] = routing.scoring == Scoring::sparse_mixer ? share_of_near(routing, scores, id) : scores.values[id];
    scores.taken[id] = true;
  }
  if (routing.scoring == Scoring::softmax_of_chosen) softmax(of_chosen, chosen);
  float sum = 1;
  if (routing.renormalise) {
    sum = float(routing.addend);
    for (index_t k = 0; k < chosen; ++k) sum += of_chosen[k];
  }
  for (index_t k = 0; k < chosen; ++k) weights[k] = of_chosen[k] / sum * float(routing.scale);
}

template <class Element>
void route(const void* described, index_t begin, index_t end) {
  const RouteCall& call = *static_cast<const RouteCall*>(described);
  const index_t chosen = call.routing->chosen;
  Scores scores;
  for (index_t token = begin; token < end; ++token) {
    load_row(static_cast<const Element*>(call.scores) + token * call.stride, call.routing->experts, scores.values);
    route_token(*call.routing, scores, call.ids + token * chosen, call.weights + token * chosen);
  }
}

template <class Element>
void gather(const void* described, index_t begin, index_t end) {
  const GatherCall& call = *static_cast<const GatherCall*>(described);
  for (index_t row = begin; row < end; ++row) {
    const std::int32_t pair = call.pairs[row];
    const Element* x = static_cast<const Element*>(call.x) + pair / call.chosen * call.x_stride;
    Element* y = static_cast<Element*>(call.y) + row * call.y_stride;
    if (!call.factors) {
      std::memcpy(y, x, std::size_t(call.width) * sizeof(Element));
      continue;
    }
    const f32v factor = rounded_to<Element>(all(call.factors[pair]));
    for (index_t i = 0; i < call.width; i += kLanes)
      store(y + i, load(x + i, call.width - i) * factor, call.width - i);
  }
}

template <class Element>
void combine(const void* described, index_t begin, index_t end) {
  const CombineCall& call = *static_cast<const CombineCall*>(described);
  for (index_t token = begin; token < end; ++token) {
    const std::int32_t* rows = call.rows + token * call.chosen;
    const float* weights = call.weights ? call.weights + token * call.chosen : nullptr;
    const Element* residual =
        call.residual ? static_cast<const Element*>(call.residual) + token * call.y_stride : nullptr;
    Element* y = static_cast<Element*>(call.y) + token * call.y_stride;
    for (index_t i = 0; i < call.width; i += kLanes) {
      f32v sum{};
      for (index_t k = 0; k < call.chosen; ++k) {
        const f32v value = load(static_cast<const Element*>(call.x) + rows[k] * call.x_stride + i, call.width - i);
        sum = fma(value, all(weights ? weights[k] : 1.0f), sum);
      }
      if (residual) sum = rounded_to<Element>(sum) + load(residual + i, call.width - i);
      store(y + i, sum, call.width - i);
    }
  }
}

}  // namespace

const ExpertsKernels experts = {{route<bf16>, route<fp16>, route<float>},
                                {gather<bf16>, gather<fp16>, gather<float>},
                                {combine<bf16>, combine<fp16>, combine<float>}};

}  // namespace qt::QT_ISA
