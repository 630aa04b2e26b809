// Merge of partial attention states that several ranks computed. Arguments of the kernels.
#pragma once

#include "attention.hpp"

namespace qt {

// Adjacent heads of this rank in one unit (AttentionCall). The units cover the heads of all ranks that share the KV memory.
struct MergeHeads {
  index_t unit, unit_heads;  // unit index; its number of heads
  index_t inside;            // index of the first head in the unit
  index_t first, count;      // first head among the rank's own; number of heads
};

// A token with partitions divided over the ranks.
struct MergeToken {
  index_t token;
  const float* partials;  // [partitions][units][partial_floats]: see AttentionPiece
  index_t partitions;
};

// A piece of work is a token and a range of heads.
struct MergeCall {
  AttentionCall own;      // of this rank: output, sinks, scales
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
