#include "program.hpp"

#include <chrono>

namespace qt {
namespace {

void note_time(const void* mark, index_t, index_t) {
  const auto now = std::chrono::steady_clock::now().time_since_epoch();
  *static_cast<std::int64_t*>(const_cast<void*>(mark)) = std::chrono::nanoseconds(now).count();
}

}  // namespace

Program::~Program() { pool().settle(); }

void Program::run(const Step& step, index_t begin, index_t end) {
  pool().settle();  // threads of the last step may still look ahead in the calls that `prepare` changes
  list_.clear();
  for (index_t i = begin; i < end; ++i) {
    for (index_t mark = 0; step.marks && mark < index_t(marks_.size()); ++mark)
      if (marks_[mark] == i) list_.push_back({.count = 1, .run = note_time, .call = step.marks + mark});
    const Work work = ops_[i]->prepare(step, pool().threads());
    if (work.count > 0 || work.late) list_.push_back(work);  // threads would visit an empty work too
  }
  pool().run_lasting(list_.data(), index_t(list_.size()));
}

void Program::balance(const Step& step, index_t threads, index_t begin, index_t end, OpBalance* out) {
  pool().settle();
  for (index_t i = begin; i < end; ++i, ++out) {
    const Work listed = ops_[i]->prepare(step, threads);
    const Work& work = listed.late ? *listed.late : listed;
    const Balance found = balance_of(work, threads);
    *out = {work.count, found.takes, found.cost, found.busiest, work.bytes, work.bytes_again};
  }
}

void Program::reserve(index_t bytes) {
  bytes = (bytes + 63) / 64 * 64;
  if (bytes <= scratch_bytes_) return;
  scratch_.reset(static_cast<char*>(std::aligned_alloc(64, bytes)));
  scratch_bytes_ = bytes;
}

}  // namespace qt

QT_EXPORT qt::Program* qt_program_new() { return new qt::Program; }

QT_EXPORT void qt_program_delete(qt::Program* program) { delete program; }

// Number of recorded operations. A range of operations, counted between two calls, can be run alone.
QT_EXPORT index_t qt_program_size(const qt::Program* program) { return program->size(); }

QT_EXPORT void qt_program_run(qt::Program* program, const qt::Step* step, index_t begin, index_t end) {
  program->run(*step, begin, end);
}

// out: [end - begin]. See Program::balance.
QT_EXPORT void qt_program_balance(qt::Program* program, const qt::Step* step, index_t threads, index_t begin, index_t end,
                                  qt::OpBalance* out) {
  program->balance(*step, threads, begin, end, out);
}

// Starts a part with its own timestamp: the operations appended after this call. See Step::marks.
QT_EXPORT void qt_program_mark(qt::Program* program) { program->mark(); }

// Fills the step's arrays from the columns of a plan, with num_rows rows each. samples: number of the row's last tokens after
// each of which a token is sampled. Returns the largest position of the step plus 1. Returns -1 - i if row i exceeds the number
// of slots, tokens or outputs.
QT_EXPORT index_t qt_fill_step(qt::Step* step, const std::int32_t* slots, const std::int32_t* starts,
                               const std::int32_t* counts, const std::uint8_t* samples, index_t num_rows) {
  qt::Step& s = *step;
  index_t token = 0, output = 0, length = 0;
  for (index_t row = 0; row < num_rows; ++row) {
    const index_t slot = slots[row], start = starts[row], count = counts[row], end = start + count;
    const bool fits = slot >= 0 && slot < s.num_slots && start >= 0 && count > 0 && end < s.slot_tokens_stride;
    const index_t draws = samples[row];
    if (!fits || row >= s.max_rows || token + count > s.max_tokens) return -1 - row;
    if (draws > count || output + draws > s.max_rows) return -1 - row;
    s.row_slots[row] = slot, s.row_starts[row] = start, s.row_counts[row] = count, s.row_offsets[row] = token;
    if (s.row_adapters) s.row_adapters[row] = s.slot_adapters ? s.slot_adapters[slot] : 0;
    const std::int32_t* tokens = s.slot_tokens + slot * s.slot_tokens_stride;
    for (index_t position = start; position < end; ++position, ++token) {
      s.token_ids[token] = tokens[position];
      s.positions[token] = position;
    }
    for (index_t left = draws - 1; left >= 0; --left, ++output)
      s.output_tokens[output] = token - 1 - left, s.output_slots[output] = slot, s.output_positions[output] = end - left;
    length = end > length ? end : length;
  }
  s.num_tokens = token, s.num_rows = num_rows, s.num_outputs = output;
  return length;
}
