// Merge of the partitions' states in attention that ranks compute together. The arguments that the compiled-once half
// passes to the kernels.
#pragma once

#include "attention.hpp"

namespace qt {

// Adjacent heads of this rank that lie in one unit (AttentionCall) of those of all ranks that keep KV together.
struct MergeHeads {
  index_t unit, unit_heads;  // which one, and how many it has
  index_t inside;            // the first one's number among them
  index_t first, count;      // ... among the rank's own
};

// A token with partitions that all ranks have computed.
struct MergeToken {
  index_t token;
  const float* partials;  // [partitions][units][partial_floats]: see AttentionPiece
  index_t partitions;
};

// A piece of work is a token and some adjacent heads.
struct MergeCall {
  AttentionCall own;      // of this rank: where results go, sinks, scales
  const MergeToken* tokens;
  const MergeHeads* heads;
  index_t num_heads;      // ranges of heads
  index_t units, partial_floats;
};

// Indexed by the activations' Dtype.
struct MergeKernels {
  void (*merge[3])(const void* call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(MergeKernels, attention_merge)

}  // namespace qt
