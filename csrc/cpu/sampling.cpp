// The C ABI of drawing and of log-probabilities. Logits: [rows][vocab_size] of a format, rows `stride` elements apart.
#include "sampling.hpp"

#include <cstdlib>

#include "pool.hpp"

namespace qt {
namespace {

// Memory that a thread keeps: asking the system for it at every step costs more than a pass over it. It is as large as
// the largest row the thread has seen needs, and touched as far as the rows need it.
struct Kept {
  void* memory = nullptr;
  index_t size = 0;
  ~Kept() { std::free(memory); }
};

void* scratch(index_t bytes) {
  static thread_local Kept kept;
  if (kept.size < bytes) {
    std::free(kept.memory);
    kept.size = (bytes + 63) / 64 * 64;
    kept.memory = std::aligned_alloc(64, kept.size);
  }
  return kept.memory;
}

LogitRows rows_of(const void* logits, index_t stride, index_t vocab_size, const std::int64_t* rows) {
  LogitRows of;
  of.logits = logits;
  of.stride = stride;
  of.vocab_size = vocab_size;
  of.rows = rows;
  of.scratch = scratch;
  return of;
}

void run(const Work& work) {
  if (work.count == 1)  // nobody to share with: waking the pool would take as long as the row
    work.run(work.call, 0, 1);
  else
    pool().run(&work, 1);
}

}  // namespace
}  // namespace qt

// rows: which row of logits each of `count` items is, or null: item i is row i. settings: of every slot, or null: all
// take the most likely, and slots and positions are not read. Rows with a NaN: greedy ones take the first NaN, as
// torch.argmax does; drawing ones take token 0, as do rows without anything to draw.
QT_EXPORT void qt_draw(const void* logits, index_t stride, int dtype, index_t vocab_size, const std::int64_t* rows,
                       index_t count, const qt::DrawSettings* settings, const std::int64_t* slots,
                       const std::int64_t* positions, std::int32_t* tokens) {
  const qt::DrawCall call = {qt::rows_of(logits, stride, vocab_size, rows), settings, slots, positions, tokens};
  qt::run({.count = count, .grain = 1, .run = QT_CHOOSE(sampling).draw[dtype], .call = &call});
}

// own: [count] tokens; ids, values: [count][1 + num_top], the own token first, then the num_top (at most vocab_size)
// most likely, the lower id first among equals; ranks: [count], 1 + how many are more likely than the own; normalizers:
// [count], what to subtract from a logit to have its log-probability. A row with a NaN or without a finite largest
// logit: NaN.
QT_EXPORT void qt_logprobs(const void* logits, index_t stride, int dtype, index_t vocab_size, const std::int64_t* rows,
                           index_t count, const std::int32_t* own, index_t num_top, std::int32_t* ids, float* values,
                           std::int32_t* ranks, double* normalizers) {
  const qt::LogprobsCall call = {
      qt::rows_of(logits, stride, vocab_size, rows), own, num_top, ids, values, ranks, normalizers};
  qt::run({.count = count, .grain = 1, .run = QT_CHOOSE(logprobs).logprobs[dtype], .call = &call});
}
