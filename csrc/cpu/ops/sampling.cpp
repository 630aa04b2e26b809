// C ABI of sampling and log-probabilities. Logits: [rows][vocab_size] of a dtype, rows `stride` elements apart.
#include "sampling.hpp"

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "pool.hpp"
#include "program.hpp"
#include "require.hpp"
#include "thread_memory.hpp"

namespace qt {
namespace {

LogitRows rows_of(const void* logits, index_t stride, index_t vocab_size, const std::int64_t* rows) {
  LogitRows of;
  of.logits = logits;
  of.stride = stride;
  of.vocab_size = vocab_size;
  of.rows = rows;
  of.scratch = thread_memory;
  return of;
}

// Sampling as operations of a program. If there are fewer rows than threads, a first work computes the maximum of each logit
// block, with several parts per row.
struct ProgramDraw {
  DrawCall call;
  Dtype dtype;
  std::vector<float> maxima;

  void describe(const Step& step, index_t threads) {
    constexpr index_t kPartsPerThread = 4, kLeastBlocks = 32;  // logit blocks of a part, about a microsecond
    const index_t rows = step.num_outputs, blocks = blocks_of(call.of.vocab_size);
    call.settings = step.settings;
    call.slots = step.output_slots;
    call.positions = step.output_positions;
    call.tokens = step.drawn;
    call.slot_tokens = step.slot_tokens;
    call.slot_tokens_stride = step.slot_tokens_stride;
    call.masks = step.masks;
    call.parts = 1;
    if (rows > 0 && rows < 2 * threads) call.parts = (kPartsPerThread * threads + rows - 1) / rows;
    call.parts = std::max(index_t(1), std::min(call.parts, blocks / kLeastBlocks));
    call.maxima = nullptr;
    if (call.parts <= 1) return;
    if (index_t(maxima.size()) < rows * blocks) maxima.resize(rows * blocks);
    call.maxima = maxima.data();
  }
};

class FindMaxima final : public Op {
 public:
  explicit FindMaxima(std::shared_ptr<ProgramDraw> of) : of_(std::move(of)) {}
  Work prepare(const Step& step, index_t threads) override {
    of_->describe(step, threads);
    const index_t count = of_->call.maxima ? step.num_outputs * of_->call.parts : 0;
    return {.count = count,
            .run = QT_CHOOSE(sampling).find_maxima[int(of_->dtype)],
            .call = &of_->call,
            .each_cost = of_->call.of.vocab_size / of_->call.parts};
  }

 private:
  std::shared_ptr<ProgramDraw> of_;
};

class DrawTokens final : public Op {
 public:
  explicit DrawTokens(std::shared_ptr<ProgramDraw> of) : of_(std::move(of)) {}
  Work prepare(const Step& step, index_t threads) override {
    of_->describe(step, threads);
    // With known maxima of the logit blocks, few blocks are read.
    const index_t cost = of_->call.maxima ? blocks_of(of_->call.of.vocab_size) : of_->call.of.vocab_size;
    return {.count = step.num_outputs,
            .run = QT_CHOOSE(sampling).draw[int(of_->dtype)],
            .call = &of_->call,
            .each_cost = cost};
  }

 private:
  std::shared_ptr<ProgramDraw> of_;
};

void run(const Work& work) {
  if (work.count == 1)  // waking the pool would take as long as one row
    work.run(work.call, 0, 1);
  else
    pool().run(&work, 1);
}

}  // namespace
}  // namespace qt

// Samples one token for each of `count` items.
// rows: index of each item's row of logits, or null: item i is row i.
// settings: [slots], or null: greedy for all items; slots and positions are then not read.
// slots, positions: [count], slot of each item, and position of the sampled token.
// masks: of all items, or null. A masked item samples a token of its mask, independent of its logits.
// tokens: [count], output.
// Rows with a NaN: greedy rows return the first NaN, as torch.argmax does; sampled rows return token 0. Sampled rows without a
// candidate also return token 0.
QT_EXPORT void qt_draw(const void* logits, index_t stride, int dtype, index_t vocab_size, const std::int64_t* rows,
                       index_t count, const qt::DrawSettings* settings, const std::int64_t* slots,
                       const std::int64_t* positions, const qt::Masks* masks, std::int32_t* tokens) {
  qt::DrawCall call;
  call.of = qt::rows_of(logits, stride, vocab_size, rows);
  call.settings = settings, call.slots = slots, call.positions = positions, call.masks = masks, call.tokens = tokens;
  qt::run({.count = count, .grain = 1, .run = QT_CHOOSE(sampling).draw[dtype], .call = &call});
}

// Appends sampling of the step's output rows. `logits` has one row per output. Tokens are stored in the step's `drawn` and in
// slot_tokens.
QT_EXPORT void qt_program_draw(qt::Program* program, const void* logits, index_t stride, int dtype, index_t vocab_size) {
  QT_REQUIRE(vocab_size > 0 && stride >= vocab_size && dtype >= 0 && dtype <= int(qt::Dtype::fp32),
             "%lld logits, rows %lld apart, format %d", (long long)vocab_size, (long long)stride, dtype);
  auto draw = std::make_shared<qt::ProgramDraw>();
  draw->call.of = qt::rows_of(logits, stride, vocab_size, nullptr);
  draw->dtype = qt::Dtype(dtype);
  program->append(std::make_unique<qt::FindMaxima>(draw));
  program->append(std::make_unique<qt::DrawTokens>(draw));
}

// Log-probabilities of `count` rows of logits. own: [count] tokens. rows: as in qt_draw.
// ids, values: [count][1 + num_top], the own token first, then the num_top (at most vocab_size) most likely tokens; a tie goes
// to the lower id.
// ranks: [count], 1 + number of tokens more likely than the own token.
// normalizers: [count], log-probability = logit - normalizer.
// A row with a NaN, or without a finite maximum: all values are NaN.
QT_EXPORT void qt_logprobs(const void* logits, index_t stride, int dtype, index_t vocab_size, const std::int64_t* rows,
                           index_t count, const std::int32_t* own, index_t num_top, std::int32_t* ids, float* values,
                           std::int32_t* ranks, double* normalizers) {
  const qt::LogprobsCall call = {
      qt::rows_of(logits, stride, vocab_size, rows), own, num_top, ids, values, ranks, normalizers};
  qt::run({.count = count, .grain = 1, .run = QT_CHOOSE(logprobs).logprobs[dtype], .call = &call});
}
