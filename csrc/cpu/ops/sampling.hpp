// Sampling of tokens and log-probabilities, computed from rows of logits without sorting.
//
// A work item is a row, or a part of a row if there are few rows. The result depends on the row of logits and the request's
// settings only, independent of the batch size and of the slot's history.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

// Sampling parameters of a request, with the layout of `quintet.executor.sampling.settings`.
struct DrawSettings {
  float temperature;   // 0: greedy; the other fields are ignored
  float log_min_p;     // -inf: off
  std::int64_t top_k;  // 0 or at least vocab_size: off
  double top_p;        // 1: off
  std::uint64_t seed;
};

// Allowed tokens of some items, with the layout of `quintet.executor.sampling.masks.CMasks`.
struct Masks {
  const std::uint32_t* words;  // [masks][stride]: bit t % 32 of word t / 32 is token t
  index_t stride;
  const std::int64_t* rows;    // [items]: the item's mask; -1: none
};

constexpr index_t kBlock = 128;  // size of a logit block: consecutive logits with a known maximum

// Internal linkage: the linker must not merge code of several instruction sets.
static inline index_t blocks_of(index_t vocab_size) { return (vocab_size + kBlock - 1) / kBlock; }

struct LogitRows {
  const void* logits = nullptr;
  index_t stride = 0;  // in elements
  index_t vocab_size = 0;
  const std::int64_t* rows = nullptr;         // item i is row rows[i]; null: row i
  void* (*scratch)(index_t bytes) = nullptr;  // memory of the calling thread, valid until its next call
};

struct DrawCall {
  LogitRows of;
  const DrawSettings* settings = nullptr;   // [slots]; null: greedy for every item
  const std::int64_t* slots = nullptr;      // [items]
  const std::int64_t* positions = nullptr;  // [items]: with the seed, the input of the random number
  std::int32_t* tokens = nullptr;           // [items]
  std::int32_t* slot_tokens = nullptr;      // [slots][slot_tokens_stride]: second destination of tokens; or null
  index_t slot_tokens_stride = 0;
  const Masks* masks = nullptr;             // null: no masks
  index_t parts = 1;                        // parts of an item's logit blocks in find_maxima
  float* maxima = nullptr;                  // [items][logit blocks]: maxima; one may be NaN if a logit is NaN; null: not
                                            // computed
};

struct LogprobsCall {
  LogitRows of;
  const std::int32_t* own = nullptr;  // [items]: the token reported first
  index_t num_top = 0;
  std::int32_t* ids = nullptr;    // [items][1 + num_top]
  float* values = nullptr;        // [items][1 + num_top]
  std::int32_t* ranks = nullptr;  // [items], from 1
  double* normalizers = nullptr;  // [items]: subtracted from a logit
};

// Indexed by Dtype (bf16, fp16, fp32).
struct SamplingKernels {
  void (*find_maxima[3])(const void* call, index_t begin, index_t end);  // piece i: part i % parts of item i / parts
  void (*draw[3])(const void* call, index_t begin, index_t end);
};

struct LogprobsKernels {
  void (*logprobs[3])(const void* call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(SamplingKernels, sampling)
QT_DECLARE_KERNELS(LogprobsKernels, logprobs)

}  // namespace qt
