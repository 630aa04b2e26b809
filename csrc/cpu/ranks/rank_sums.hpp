// Adding what ranks (ranks.hpp) have left of a layer's outputs. The arguments that the compiled-once half passes.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

// One addition of all ranks' sums. A piece is up to kSumColumns numbers of one row.
struct RankSumCall {
  const float* first;   // rank 0's sums [rows][width]
  index_t stride;       // numbers from a rank's sums to the next one's
  index_t ranks, width, pieces_of_row;
  const void* bias;      // [width] or null
  const void* residual;  // laid out like y, may be y; or null
  void* y;
  index_t y_stride;
};
inline constexpr index_t kSumColumns = 512;
inline constexpr index_t kMostRanks = 64;

// Indexed by Dtype (bf16, fp16, fp32): of bias, residual and y.
struct RankKernels {
  void (*add_sums[3])(const void* call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(RankKernels, rank_sums)

}  // namespace qt
