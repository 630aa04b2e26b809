// Collective operations of ranks in a program: barrier and all-reduce of sums.
#include <memory>

#include "rank_sums.hpp"
#include "ranks.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kAddCost = 4;  // per number of one rank, in multiplications

// Barrier of all ranks. It has one piece: all other threads wait for this work anyway.
class Barrier final : public Op {
 public:
  Barrier(Ranks* ranks, Extent extent, const Left& left) : ranks_(ranks), extent_(extent), left_(left) {}
  Work prepare(const Step& step, index_t) override {
    left_.rows = rows_in(step, extent_);
    return {.count = left_.rows > 0, .run = run, .call = this};
  }

 private:
  static void run(const void* op, index_t, index_t) {
    const Barrier& self = *static_cast<const Barrier*>(op);
    self.ranks_->barrier(self.left_);
  }

  Ranks* ranks_;
  Extent extent_;
  Left left_;
};

class AddSums final : public Op {
 public:
  AddSums(const RankSumCall& call, int dtype) : call_(call), run_(QT_CHOOSE(rank_sums).add_sums[dtype]) {}
  Work prepare(const Step& step, index_t) override {
    return {.count = step.num_tokens * call_.pieces_of_row,
            .grain = 16,
            .run = run_,
            .call = &call_,
            .each_cost = kAddCost * call_.ranks * call_.width / call_.pieces_of_row};
  }

 private:
  RankSumCall call_;
  void (*run_)(const void* call, index_t begin, index_t end);
};

}  // namespace

void append_meeting(Program* program, Ranks* ranks, Extent extent, const Left& left) {
  program->append(std::make_unique<Barrier>(ranks, extent, left));
}

}  // namespace qt

// Returns the rank's buffer of partial sums, for up to max_tokens rows of `width`. Layers alternate between turn 0 and 1.
QT_EXPORT float* qt_ranks_sums(qt::Ranks* ranks, index_t turn, index_t width) {
  QT_REQUIRE((turn == 0 || turn == 1) && width > 0 && width <= ranks->shape().sums_width, "turn %lld, rows of %lld",
             (long long)turn, (long long)width);
  return ranks->sums(turn, ranks->rank());
}

// Returns the buffer of rows gathered from the columns of all ranks, `bytes` per row. Layers alternate between turn 0 and 1.
QT_EXPORT char* qt_ranks_gathered(qt::Ranks* ranks, index_t turn, index_t bytes) {
  QT_REQUIRE((turn == 0 || turn == 1) && bytes > 0 && bytes <= ranks->shape().gathered_row_bytes, "turn %lld, rows of %lld bytes",
             (long long)turn, (long long)bytes);
  return ranks->gathered(turn);
}

// Appends a barrier of all ranks. extent: an Extent; without rows there is no barrier. left: rows of `row_bytes` that this rank
// has written for the other ranks, `stride` bytes apart; row_bytes 0: none. for_first: only rank 0 reads them.
QT_EXPORT void qt_program_meet(qt::Program* program, qt::Ranks* ranks, int extent, const void* left, index_t row_bytes,
                               index_t stride, int for_first) {
  QT_REQUIRE(row_bytes >= 0 && stride >= row_bytes, "rows of %lld bytes, %lld apart", (long long)row_bytes, (long long)stride);
  const index_t offset = row_bytes > 0 ? ranks->offset_of(left) : 0;
  qt::append_meeting(program, ranks, qt::Extent(extent),
                     {.offset = offset, .row_bytes = row_bytes, .stride = stride, .rows = 0, .for_first = for_first});
}

// Appends an all-reduce, after a barrier: y = the sums of all ranks, added as a tree (+ bias), rounded to dtype; then (+
// residual), rounded again. turn, width: as in qt_ranks_sums. residual: layout of y, may be y; or null.
QT_EXPORT void qt_program_add_sums(qt::Program* program, qt::Ranks* ranks, index_t turn, index_t width, const void* bias,
                                   const void* residual, void* y, index_t y_stride, int dtype) {
  QT_REQUIRE(ranks->shape().ranks <= qt::kMostRanks, "%lld ranks", (long long)ranks->shape().ranks);
  QT_REQUIRE(y_stride >= width && dtype >= 0 && dtype <= int(qt::Dtype::fp32), "rows of %lld, %lld apart, format %d",
             (long long)width, (long long)y_stride, dtype);
  const index_t pieces = (width + qt::kSumColumns - 1) / qt::kSumColumns;
  const qt::RankSumCall call{.first = ranks->sums(turn, 0),
                             .stride = ranks->sums(turn, 1) - ranks->sums(turn, 0),
                             .ranks = ranks->shape().ranks,
                             .width = width,
                             .pieces_of_row = pieces,
                             .bias = bias,
                             .residual = residual,
                             .y = y,
                             .y_stride = y_stride};
  program->append(std::make_unique<qt::AddSums>(call, dtype));
}
