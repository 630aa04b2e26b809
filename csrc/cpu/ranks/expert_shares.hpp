// Load balancing of experts over ranks: divides the rows of an expert that several ranks hold, and counts the rows of each
// expert.
//
//     homes    rank 0: 0 1 2 3    rank 1: 4 5 6 7      rows of 4: computed by rank 1
//     copies   rank 0: 6 .        rank 1: 1 .          rows of 1 and 6: divided, so that both ranks have about equal work
//
// Every rank routes all tokens, so all ranks compute the same division without a message. The rows of an expert are contiguous
// per rank, in the order of the ranks. A row has the same bits on any rank; the division affects only the time of a step.
#pragma once

#include <cstdint>
#include <vector>

#include "experts.hpp"
#include "rank_sums.hpp"

namespace qt {

inline constexpr index_t kReadRows = 12;  // rows that are multiplied in the time of one read of a weight

class ExpertShares {
 public:
  struct Rows {
    index_t begin, end;  // of the expert's rows in the step
  };

  explicit ExpertShares(const ExpertsLayer& layer);

  // Divides a step's rows and updates `ExpertsLayer::asked`. counts: rows of each expert.
  void divide(const std::vector<index_t>& counts);
  // Rows of the expert on this rank.
  Rows rows(index_t expert) const { return mine_[std::size_t(expert)]; }
  // Index of the expert among this rank's weights, if the rank has rows of it.
  index_t place(index_t expert) const;

 private:
  void note_copies();
  void divide_one(index_t expert, index_t count);
  void note(const std::vector<index_t>& counts);

  const ExpertsLayer& layer_;
  std::vector<index_t> homes_;          // rank of each expert
  std::vector<std::uint64_t> holders_;  // of each expert, one bit per rank
  std::vector<index_t> copied_;         // experts on several ranks, most rows first
  std::vector<Rows> mine_;
  index_t work_[kMostRanks] = {};  // of each rank in the step, in rows
};

}  // namespace qt
