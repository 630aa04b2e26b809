// Samples one token from a row of logits: temperature, min-p, top-k, top-p, then inversion of the cumulative distribution at one
// random number. Greedy: the most likely token. The kept tokens, including ties, are those of quintet.executor.sampling.draw.
//
// A thread owns a row. Passes over the row by mode:
//
// - Greedy: one pass, about 6 instructions a vector. Limiter: memory bandwidth.
// - Top-k: the same pass, then work on about k logits.
// - Others: a second pass for the weights, one exponential an element. It skips blocks without candidates.
// - Top-p without top-k: after the weights, ever longer lists of the largest logits until they reach p. If the list is long:
//   16-bit logits use a histogram of values; fp32 logits use a selection by weight over all. Then the weights of the remaining
//   logits.
//
// Logits are compared as stored, never divided by the temperature. Each bound is a quotient in the reference; here it becomes the
// least logit with a rounded quotient that reaches it. Weights are e^((x - max) * (1 / temperature)). Reduction order: see
// logit_row.hpp. It depends on the row and its settings only, not on batch size.
#include "counts.hpp"
#include "logit_row.hpp"

namespace qt::QT_ISA {
namespace {

constexpr float kLeastExponent = -87.0f;  // of a weight; tokens below e^-87 of the largest weight are dropped
constexpr index_t kFew = 4096;            // up to this many logits, selection is faster than a histogram
constexpr float kLowest = -3.4028234664e38f;

// The uniform number in (0, 1) of a seed and a position: Philox4x32-10, see quintet.executor.sampling.philox.
double uniform(std::uint64_t seed, std::uint64_t position) {
  std::uint32_t c0 = std::uint32_t(position), c1 = std::uint32_t(position >> 32), c2 = 0, c3 = 0;
  std::uint32_t k0 = std::uint32_t(seed), k1 = std::uint32_t(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t p0 = std::uint64_t(c0) * 0xD2511F53u, p1 = std::uint64_t(c2) * 0xCD9E8D57u;
    c0 = std::uint32_t(p1 >> 32) ^ c1 ^ k0;
    c1 = std::uint32_t(p1);
    c2 = std::uint32_t(p0 >> 32) ^ c3 ^ k1;
    c3 = std::uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return (double(std::uint64_t(c0) << 20 | c1 >> 12) + 0.5) * 0x1p-52;
}

// The least x <= most with x / temperature >= bound; requires bound <= most / temperature.
float least_reaching(float bound, float temperature, float most) {
  if (temperature == 1.0f) return bound;
  std::uint32_t low = key_of(kLowest), high = key_of(most);  // invariant: high reaches the bound
  while (low < high) {
    const std::uint32_t middle = low + (high - low) / 2;
    if (of_key(middle) / temperature >= bound)
      high = middle;
    else
      low = middle + 1;
  }
  return of_key(high);
}

// The index where the cumulative weight first exceeds share * total, and the position within its weight. Never an index of weight
// 0; at least one weight must be positive.
struct Inverted {
  index_t index;
  double inside;  // fraction of its weight, in [0, 1)
};

Inverted invert(const float* weights, index_t n, double total, double share) {
  const double target = share * total;
  double before = 0, after = 0;
  index_t found = 0;
  for (index_t i = 0; i < n && !(after > target); ++i) {
    if (!(weights[i] > 0)) continue;
    found = i;
    before = after;
    after += double(weights[i]);
  }
  const double inside = (target - before) / double(weights[found]), most = 1.0 - 0x1p-52;
  return {found, !(inside > 0) ? 0 : inside > most ? most : inside};
}

double sum(const float* weights, index_t n) {
  double total = 0;
  for (index_t i = 0; i < n; ++i) total += double(weights[i]);
  return total;
}

template <class Element>
class Draw {
 public:
  // maxima: the row's block maxima, or null.
  Draw(const Element* x, index_t vocab_size, float* maxima, const Scratch& scratch)
      : x_(x), vocab_(vocab_size), known_(maxima != nullptr), s_(scratch) {
    if (known_) s_.maxima = maxima;
  }

  std::int32_t greedy() {
    const Largest top = largest();
    return std::int32_t(index_of(x_, vocab_, s_.maxima, top.any_nan ? __builtin_nanf("") : top.value));
  }

  std::int32_t operator()(const DrawSettings& settings, double share) {
    const Largest top = largest();
    top_ = top.value;
    temperature_ = settings.temperature;
    const float quotient = top_ / temperature_;
    if (top.any_nan || !(quotient >= kLowest && quotient <= -kLowest)) return 0;  // no distribution: token 0, like the reference
    floor_ = kLowest;
    raise(top_ + kLeastExponent * temperature_);
    const float least = quotient + settings.log_min_p;
    if (least >= kLowest) raise(least_reaching(least, temperature_, top_));
    if (settings.top_k > 0 && settings.top_k < vocab_) cut_top_k(settings.top_k);
    if (settings.top_p < 1.0) cut_top_p(settings.top_p);
    return std::int32_t(listed_ && n_ <= vocab_ / 8 ? from_list(share) : from_row(share));
  }

 private:
  Largest largest() {
    return known_ ? largest_of(s_.maxima, blocks_of(vocab_)) : find_maxima(x_, vocab_, s_.maxima);
  }

  void raise(float floor) { floor_ = floor > floor_ ? floor : floor_; }

  // The least logit with the same quotient as x.
  float equal_of(float x) const { return least_reaching(x / temperature_, temperature_, x); }

  Weigh weights() const { return {all(top_), all(1.0f / temperature_), all(floor_)}; }

  // Lists the logits >= `least`.
  void list(float least) {
    n_ = gather(x_, vocab_, s_.maxima, least, s_.values, s_.ids);
    listed_ = true;
    weighed_ = false;
  }

  // Lists at least the `count` largest logits not below the floor, with ties. Returns true if the list is complete.
  bool list_largest(index_t count) {
    const float reached = reached_by(count, s_.maxima, blocks_of(vocab_), s_.narrowed);
    const bool complete = !(reached > floor_);
    list(complete ? floor_ : equal_of(reached) > floor_ ? equal_of(reached) : floor_);
    return complete;
  }

  void weigh_list() {
    if (!weighed_) total_ = weigh(s_.values, n_, weights(), nullptr, nullptr, s_.weights);
    weighed_ = true;
  }

  void cut(float last_kept) {
    raise(equal_of(last_kept));
    n_ = keep_at_least(floor_, s_.values, weighed_ ? s_.weights : nullptr, s_.ids, n_);
  }

  void cut_top_k(index_t k) {
    list_largest(k);
    if (n_ >= k) cut(largest_reaching<index_t>(s_.values, nullptr, n_, k, s_.narrowed));
  }

  void cut_top_p(double p) {
    if (listed_)
      weigh_list();
    else if (!list_for_mass(p))
      return;
    cut(largest_reaching<double>(s_.values, s_.weights, n_, p * total_, s_.narrowed));
  }

  // Lists ever more of the largest logits until they hold the share p of the mass; total_ is then the total mass. Returns false
  // if the list would be most of the vocabulary and cut_top_p_by_counts made the cut.
  bool list_for_mass(double p) {
    const double total = weigh(x_, vocab_, weights(), s_.maxima, s_.sums, nullptr);
    for (index_t count = 32; 2 * count <= blocks_of(vocab_); count *= 4) {
      const bool complete = list_largest(count);
      weigh_list();
      if (complete) return true;
      if (total_ >= p * total) {
        total_ = total;
        return true;
      }
    }
    if constexpr (sizeof(Element) == 2) {
      if (vocab_ > kFew) {
        listed_ = false;
        cut_top_p_by_counts(p);
        return false;
      }
    }
    list(floor_);
    weigh_list();
    return true;
  }

  // 16-bit logits have few distinct values: their histogram gives the cumulative mass for any spread of logits.
  void cut_top_p_by_counts(double p) {
    const index_t different = count_values(x_, vocab_, s_.maxima, floor_, top_, s_.counts, s_.values, s_.weights);
    const Weigh weight_of = weights();
    double total = 0, before = 0;
    for (index_t i = 0; i < different; i += kLanes)
      store(s_.weights + i, load(s_.weights + i) * weight_of(load(s_.values + i)));
    for (index_t i = 0; i < different; ++i) total += double(s_.weights[i]);
    index_t last = 0;
    for (; last + 1 < different; ++last) {
      before += double(s_.weights[last]);
      if (before >= p * total) break;
    }
    raise(equal_of(s_.values[last]));
  }

  index_t from_list(double share) {
    weigh_list();
    return s_.ids[invert(s_.weights, n_, sum(s_.weights, n_), share).index];
  }

  index_t from_row(double share) {
    const double total = weigh(x_, vocab_, weights(), s_.maxima, s_.sums, nullptr);
    const Inverted block = invert(s_.sums, blocks_of(vocab_), total, share);
    const index_t begin = block.index * kBlock, n = vocab_ - begin < kBlock ? vocab_ - begin : kBlock;
    weigh(x_ + begin, n, weights(), nullptr, nullptr, s_.weights);
    return begin + invert(s_.weights, n, sum(s_.weights, n), block.inside).index;
  }

  const Element* x_;
  index_t vocab_;
  bool known_;
  Scratch s_;
  float top_ = 0, temperature_ = 1;
  float floor_ = kLowest;  // logits below it are not sampled
  bool listed_ = false;    // true if every candidate is in the list
  bool weighed_ = false;   // true if the list has weights
  index_t n_ = 0;
  double total_ = 0;
};

template <class Element>
std::int32_t draw_row(const Element* x, index_t vocab_size, float* maxima, const Scratch& scratch,
                      const DrawSettings* settings, std::int64_t position) {
  Draw<Element> draw(x, vocab_size, maxima, scratch);
  if (!settings || settings->temperature == 0.0f) return draw.greedy();
  return draw(*settings, uniform(settings->seed, std::uint64_t(position)));
}

template <class Element>
void draw(const void* call, index_t begin, index_t end) {
  const DrawCall& c = *static_cast<const DrawCall*>(call);
  const Scratch scratch = scratch_for(c.of);
  for (index_t i = begin; i < end; ++i) {
    const index_t row = c.of.rows ? c.of.rows[i] : i;
    float* maxima = c.maxima ? c.maxima + i * blocks_of(c.of.vocab_size) : nullptr;
    const Element* x = static_cast<const Element*>(c.of.logits) + row * c.of.stride;
    const DrawSettings* settings = c.settings ? c.settings + c.slots[i] : nullptr;
    const std::int64_t position = c.positions ? c.positions[i] : 0;
    std::int32_t token;
    const std::int64_t mask = c.masks ? c.masks->rows[i] : -1;
    if (mask >= 0) {
      copy_masked(x, c.of.vocab_size, c.masks->words + mask * c.masks->stride, scratch.masked);
      token = draw_row<float>(scratch.masked, c.of.vocab_size, nullptr, scratch, settings, position);
    } else {
      token = draw_row(x, c.of.vocab_size, maxima, scratch, settings, position);
    }
    c.tokens[i] = token;
    if (c.slot_tokens) c.slot_tokens[c.slots[i] * c.slot_tokens_stride + c.positions[i]] = token;
  }
}

template <class Element>
void find_maxima_of_parts(const void* call, index_t begin, index_t end) {
  const DrawCall& c = *static_cast<const DrawCall*>(call);
  const index_t blocks = blocks_of(c.of.vocab_size);
  for (index_t i = begin; i < end; ++i) {
    const index_t item = i / c.parts, part = i % c.parts, row = c.of.rows ? c.of.rows[item] : item;
    const index_t first = part * blocks / c.parts, last = (part + 1) * blocks / c.parts;
    if (first == last) continue;
    const index_t left = c.of.vocab_size - first * kBlock, n = (last - first) * kBlock;
    float* maxima = c.maxima + item * blocks + first;
    const Element* x = static_cast<const Element*>(c.of.logits) + row * c.of.stride + first * kBlock;
    if (find_maxima(x, n < left ? n : left, maxima).any_nan) maxima[0] = __builtin_nanf("");
  }
}

}  // namespace

extern const SamplingKernels sampling;
const SamplingKernels sampling = {
    .find_maxima = {find_maxima_of_parts<bf16>, find_maxima_of_parts<fp16>, find_maxima_of_parts<float>},
    .draw = {draw<bf16>, draw<fp16>, draw<float>},
};

}  // namespace qt::QT_ISA
