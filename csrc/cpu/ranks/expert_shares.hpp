// Which rank computes which rows of an expert in a step, where several ranks have it; and what experts were asked for so far.
//
//     homes    rank 0: 0 1 2 3    rank 1: 4 5 6 7      rows of 4: rank 1's
//     copies   rank 0: 6 .        rank 1: 1 .          rows of 1 and 6: divided, so that both have about as much to do
//
// Every rank routes all tokens, so every rank divides alike without a message. The rows of an expert are adjacent for each rank,
// in the order of the ranks. A row's numbers are the same on any rank: dividing decides when a step is over, and no bit.
#pragma once

#include <cstdint>
#include <vector>

#include "experts.hpp"
#include "rank_sums.hpp"

namespace qt {

inline constexpr index_t kReadRows = 12;  // so many rows are multiplied in the time in which a weight is read

class ExpertShares {
 public:
  struct Rows {
    index_t begin, end;  // of the expert's rows in the step
  };

  explicit ExpertShares(const ExpertsLayer& layer);

  // Divides a step's rows, and adds to `ExpertsLayer::asked`. counts: of each expert.
  void divide(const std::vector<index_t>& counts);
  // What this rank has of it.
  Rows rows(index_t expert) const { return mine_[std::size_t(expert)]; }
  // Its place among the weights that this rank has, if it has some of its rows.
  index_t place(index_t expert) const;

 private:
  void note_copies();
  void divide_one(index_t expert, index_t count);
  void note(const std::vector<index_t>& counts);

  const ExpertsLayer& layer_;
  std::vector<index_t> homes_;          // of each expert
  std::vector<std::uint64_t> holders_;  // of each expert, a bit for each rank
  std::vector<index_t> copied_;         // experts that several have, those with most rows first
  std::vector<Rows> mine_;
  index_t work_[kMostRanks] = {};  // of each rank in the step, in rows
};

}  // namespace qt
