// Log-probability of one token of a row, its rank, and the most likely tokens, without sorting the vocabulary.
//
// A thread owns a row: one pass for the maxima, one for the sum of exponentials, one for the rank. Then it selects from slightly
// more than the requested tokens. Bytes: the row once from memory, twice from cache. Limiter: the exponential. Reduction order:
// see logit_row.hpp; the logarithm and the subtraction are fp64. Independent of batch size.
#include "logit_row.hpp"

namespace qt::QT_ISA {
namespace {

// Number of logits larger than `own`.
template <class Element>
index_t num_above(const Element* x, index_t n, float own) {
  i32v counts = {};
  index_t i = 0;
  for (; i + kLanes <= n; i += kLanes) counts -= i32v(load(x + i) > own);
  if (i < n) counts -= i32v(or_lowest(load(x + i, n - i), n - i) > own);
  index_t count = 0;
  for (int lane = 0; lane < kLanes; ++lane) count += counts[lane];
  return count;
}

// Sorts n entries by descending value, ties by ascending id. The input is in id order, and every pass of the radix sort is
// stable. room: 2 n elements.
void sort_descending(float* values, std::int32_t* ids, index_t n, float* room) {
  float* from_values = values;
  std::int32_t* from_ids = ids;
  float* to_values = room;
  std::int32_t* to_ids = reinterpret_cast<std::int32_t*>(room + n);
  for (int shift = 0; shift < 32; shift += 8) {
    index_t starts[257] = {};
    for (index_t i = 0; i < n; ++i) ++starts[(~key_of(from_values[i] + 0.0f) >> shift & 255) + 1];  // -0 equals 0
    for (int digit = 0; digit < 256; ++digit) starts[digit + 1] += starts[digit];
    for (index_t i = 0; i < n; ++i) {
      const index_t to = starts[~key_of(from_values[i] + 0.0f) >> shift & 255]++;
      to_values[to] = from_values[i];
      to_ids[to] = from_ids[i];
    }
    float* const values_before = from_values;
    std::int32_t* const ids_before = from_ids;
    from_values = to_values;
    from_ids = to_ids;
    to_values = values_before;
    to_ids = ids_before;
  }
}

// Output for a row with a NaN or without a finite largest logit: every value NaN, and the first token ids.
void report_nothing(std::int32_t own, index_t num_top, std::int32_t* ids, float* values) {
  ids[0] = own;
  for (index_t i = 0; i <= num_top; ++i) {
    values[i] = __builtin_nanf("");
    if (i) ids[i] = std::int32_t(i - 1);
  }
}

template <class Element>
void report(const void* call, index_t begin, index_t end) {
  const LogprobsCall& c = *static_cast<const LogprobsCall*>(call);
  const Scratch s = scratch_for(c.of);
  const index_t vocab = c.of.vocab_size, blocks = blocks_of(vocab);
  for (index_t i = begin; i < end; ++i) {
    const Element* x = static_cast<const Element*>(c.of.logits) + (c.of.rows ? c.of.rows[i] : i) * c.of.stride;
    std::int32_t* ids = c.ids + i * (1 + c.num_top);
    float* values = c.values + i * (1 + c.num_top);
    const Largest top = find_maxima(x, vocab, s.maxima);
    if (top.any_nan || !(top.value - top.value == 0)) {
      report_nothing(c.own[i], c.num_top, ids, values);
      c.ranks[i] = 1;
      c.normalizers[i] = __builtin_nan("");
      continue;
    }
    const Weigh weight_of = {all(top.value), all(1.0f), all(top.value - 87.0f)};
    const double total = weigh(x, vocab, weight_of, s.maxima, nullptr, nullptr);
    const double normalizer = double(top.value) + __builtin_log(total);
    const float own = load(x + c.own[i], 1)[0];
    ids[0] = c.own[i];
    values[0] = float(double(own) - normalizer);
    c.normalizers[i] = normalizer;
    c.ranks[i] = std::int32_t(1 + num_above(x, vocab, own));
    if (!c.num_top) continue;
    index_t n = gather(x, vocab, s.maxima, reached_by(c.num_top, s.maxima, blocks, s.narrowed), s.values, s.ids);
    if (n > c.num_top) {
      const float last = largest_reaching<index_t>(s.values, nullptr, n, c.num_top, s.narrowed);
      n = keep_at_least(last, s.values, nullptr, s.ids, n);  // includes ties with the last
    }
    sort_descending(s.values, s.ids, n, s.narrowed);
    for (index_t j = 0; j < c.num_top; ++j) {
      ids[1 + j] = s.ids[j];
      values[1 + j] = float(double(s.values[j]) - normalizer);
    }
  }
}

}  // namespace

extern const LogprobsKernels logprobs;
const LogprobsKernels logprobs = {.logprobs = {report<bf16>, report<fp16>, report<float>}};

}  // namespace qt::QT_ISA
