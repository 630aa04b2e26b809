// Drawing tokens and reporting log-probabilities, straight from rows of logits.
//
// Knows a row of logits, what its request draws with, and nothing else: no batch, no slot's history. A work item is a
// row, or, where there are few, a part of one, with its largest logits found.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

// What a request draws with; laid out like `quintet.executor.sampling.settings`.
struct DrawSettings {
  float temperature;   // 0: the most likely token, and nothing below counts
  float log_min_p;     // -inf: none
  std::int64_t top_k;  // 0 or at least the vocabulary: none
  double top_p;        // 1: none
  std::uint64_t seed;
};

// Which tokens the tenants of some slots may draw, laid out like `quintet.executor.sampling.masks.CMasks`.
struct Masks {
  const std::uint32_t* words;  // [slots][stride]: bit t of a slot's row, from the lowest of its first word: token t
  index_t stride;
  const std::uint8_t* used;    // [slots]: 0 where every token may be drawn, and the row means nothing
};

constexpr index_t kBlock = 128;  // consecutive logits with their largest one known to a search

// Internal to each file: what is compiled for several instruction sets must not be merged by the linker.
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
  const DrawSettings* settings = nullptr;   // of every slot; null: every item takes the most likely
  const std::int64_t* slots = nullptr;      // [items]
  const std::int64_t* positions = nullptr;  // [items]: what the random number is a function of, besides the seed
  std::int32_t* tokens = nullptr;           // [items]
  std::int32_t* slot_tokens = nullptr;      // [slots][slot_tokens_stride]: tokens are written there too; or null
  index_t slot_tokens_stride = 0;
  const Masks* masks = nullptr;             // or null: none is used
  index_t parts = 1;                        // that an item's blocks are looked through in
  float* maxima = nullptr;                  // [items][blocks]: of each block, any of them NaN where a logit is; null: not known
};

struct LogprobsCall {
  LogitRows of;
  const std::int32_t* own = nullptr;  // [items]: the token that is reported first
  index_t num_top = 0;
  std::int32_t* ids = nullptr;    // [items][1 + num_top]
  float* values = nullptr;        // [items][1 + num_top]
  std::int32_t* ranks = nullptr;  // [items], from 1
  double* normalizers = nullptr;  // [items]: what to subtract from a logit
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
