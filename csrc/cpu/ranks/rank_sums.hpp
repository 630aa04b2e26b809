// All-reduce of the ranks' partial sums (ranks.hpp). Arguments of the kernels.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

// One addition of the sums of all ranks. A piece is up to kSumColumns numbers of one row.
struct RankSumCall {
  const float* first;   // rank 0's sums [rows][width]
  index_t stride;       // in numbers, from one rank's sums to the next rank's
  index_t ranks, width, pieces_of_row;
  const void* bias;      // [width] or null
  const void* residual;  // layout of y, may be y; or null
  void* y;
  index_t y_stride;
};
inline constexpr index_t kSumColumns = 512;
inline constexpr index_t kMostRanks = 64;

// Indexed by Dtype (bf16, fp16, fp32) of bias, residual and y.
struct RankKernels {
  void (*add_sums[3])(const void* call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(RankKernels, rank_sums)

}  // namespace qt
