// What ranks do together, as operations of a program: meet, and add what each has left.
#include <memory>

#include "rank_sums.hpp"
#include "ranks.hpp"
#include "require.hpp"

namespace qt {
namespace {

constexpr index_t kAddCost = 4;  // of a number of one rank, in multiplications

// One piece: a thread that waits for other processes holds up nobody of its own, for all wait for this work.
class Meet final : public Op {
 public:
  Meet(Ranks* ranks, bool of_outputs) : ranks_(ranks), of_outputs_(of_outputs) {}
  Work prepare(const Step& step, index_t) override {
    return {.count = (of_outputs_ ? step.num_outputs : step.num_tokens) > 0, .run = run, .call = ranks_};
  }

 private:
  static void run(const void* ranks, index_t, index_t) { static_cast<Ranks*>(const_cast<void*>(ranks))->meet(); }

  Ranks* ranks_;
  bool of_outputs_;
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

void append_meeting(Program* program, Ranks* ranks, bool of_outputs) {
  program->append(std::make_unique<Meet>(ranks, of_outputs));
}

}  // namespace qt

// Where a rank leaves its sums of up to max_tokens rows of `width`, of the layers whose turn is `turn`: 0 or 1, one after the other.
QT_EXPORT float* qt_ranks_sums(qt::Ranks* ranks, index_t turn, index_t width) {
  QT_REQUIRE((turn == 0 || turn == 1) && width > 0 && width <= ranks->shape().sums_width, "turn %lld, rows of %lld",
             (long long)turn, (long long)width);
  return ranks->sums(turn, ranks->rank());
}

// Where rows of `bytes` lie that ranks put together of their columns, of those whose turn is `turn`: 0 or 1, one after the other.
QT_EXPORT char* qt_ranks_gathered(qt::Ranks* ranks, index_t turn, index_t bytes) {
  QT_REQUIRE((turn == 0 || turn == 1) && bytes > 0 && bytes <= ranks->shape().gathered_row_bytes, "turn %lld, rows of %lld bytes",
             (long long)turn, (long long)bytes);
  return ranks->gathered(turn);
}

// Appends: wait until every rank is here. extent: as of other operations; of no rows nobody waits.
QT_EXPORT void qt_program_meet(qt::Program* program, qt::Ranks* ranks, int extent) {
  qt::append_meeting(program, ranks, extent != 0);
}

// Appends y = all ranks' sums, as a tree (+ bias), rounded to dtype; then (+ residual), rounded again. Behind a meeting.
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
