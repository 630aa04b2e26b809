#include "expert_shares.hpp"

#include <algorithm>

#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kRowsAtOnce = 32;  // assigned to one rank at a time

// In rows. Few rows take as long as one read of the expert's weights.
index_t work_of(index_t rows) { return rows > 0 ? std::max(kReadRows, rows) : 0; }

}  // namespace

ExpertShares::ExpertShares(const ExpertsLayer& layer)
    : layer_(layer), holders_(std::size_t(layer.routing.experts)), mine_(std::size_t(layer.routing.experts)) {
  const index_t experts = layer.routing.experts;
  QT_REQUIRE(layer.ranks >= 1 && layer.ranks <= kMostRanks && layer.rank >= 0 && layer.rank < layer.ranks && layer.places >= 0,
             "rank %lld of %lld with %lld places", (long long)layer.rank, (long long)layer.ranks, (long long)layer.places);
  for (index_t rank = 0; rank < layer.ranks; ++rank)
    homes_.resize(std::size_t(experts * (rank + 1) / layer.ranks), rank);
  QT_REQUIRE(layer.first == experts * layer.rank / layer.ranks &&
                 layer.first + layer.kept == experts * (layer.rank + 1) / layer.ranks,
             "experts from %lld on, %lld, at rank %lld of %lld", (long long)layer.first, (long long)layer.kept,
             (long long)layer.rank, (long long)layer.ranks);
}

void ExpertShares::divide(const std::vector<index_t>& counts) {
  std::fill(work_, work_ + layer_.ranks, 0);
  copied_.clear();
  if (layer_.places > 0) note_copies();
  for (index_t expert = 0; expert < layer_.routing.experts; ++expert) {
    const index_t count = counts[std::size_t(expert)], home = homes_[std::size_t(expert)];
    if (layer_.places > 0 && (holders_[std::size_t(expert)] & (holders_[std::size_t(expert)] - 1)) != 0) {
      if (count > 0) copied_.push_back(expert);
      mine_[std::size_t(expert)] = {0, 0};
      continue;
    }
    work_[home] += work_of(count);
    mine_[std::size_t(expert)] = {0, home == layer_.rank ? count : 0};
  }
  std::sort(copied_.begin(), copied_.end(), [&counts](index_t a, index_t b) {
    const index_t rows_a = counts[std::size_t(a)], rows_b = counts[std::size_t(b)];
    return rows_a != rows_b ? rows_a > rows_b : a < b;
  });
  for (const index_t expert : copied_) divide_one(expert, counts[std::size_t(expert)]);
  if (layer_.asked) note(counts);
}

void ExpertShares::note_copies() {
  for (std::size_t expert = 0; expert < holders_.size(); ++expert) holders_[expert] = std::uint64_t(1) << homes_[expert];
  for (index_t i = 0; i < layer_.ranks * layer_.places; ++i)
    if (layer_.copies[i] >= 0) holders_[std::size_t(layer_.copies[i])] |= std::uint64_t(1) << (i / layer_.places);
}

// Assigns the rows in small parts, each to the rank that would finish first; a tie goes to the lower rank.
void ExpertShares::divide_one(index_t expert, index_t count) {
  const std::uint64_t holders = holders_[std::size_t(expert)];
  index_t given[kMostRanks] = {};
  for (index_t left = count; left > 0;) {
    const index_t rows = std::min(left, kRowsAtOnce);
    index_t best = -1, least = 0;
    for (index_t rank = 0; rank < layer_.ranks; ++rank) {
      if (!(holders >> rank & 1)) continue;
      const index_t after = work_[rank] + work_of(given[rank] + rows) - work_of(given[rank]);
      if (best < 0 || after < least) best = rank, least = after;
    }
    given[best] += rows, work_[best] = least, left -= rows;
  }
  index_t begin = 0;
  for (index_t rank = 0; rank < layer_.rank; ++rank) begin += given[rank];
  mine_[std::size_t(expert)] = {begin, begin + given[layer_.rank]};
}

index_t ExpertShares::place(index_t expert) const {
  if (homes_[std::size_t(expert)] == layer_.rank) return expert - layer_.first;
  const std::int32_t* const copies = layer_.copies + layer_.rank * layer_.places;
  return layer_.kept + (std::find(copies, copies + layer_.places, std::int32_t(expert)) - copies);
}

void ExpertShares::note(const std::vector<index_t>& counts) {
  const std::size_t experts = counts.size();
  index_t busiest = 0, all = 0;
  for (std::size_t expert = 0; expert < experts; ++expert) layer_.asked[expert] += work_of(counts[expert]);
  for (index_t rank = 0; rank < layer_.ranks; ++rank) busiest = std::max(busiest, work_[rank]), all += work_[rank];
  layer_.asked[experts] += busiest, layer_.asked[experts + 1] += all;
}

}  // namespace qt
