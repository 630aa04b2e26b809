// A compiled step: the operations of a model's forward pass, recorded once, run with one call per step.
//
// An operation is recorded with the addresses of its weights and of its activation buffers, which are as large as the largest
// step and never move; what changes from step to step arrives as a Step. Knows no operation: each kernel file brings its own
// subclass of Op and the C function that appends it.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "pool.hpp"
#include "work.hpp"

namespace qt {

// One step's input, laid out like `quintet.executor.program.step.Step`. T tokens, R rows of consecutive ones.
//
//   row r:   slot row_slots[r], tokens [row_offsets[r], row_offsets[r] + row_counts[r]) of the step,
//            at positions row_starts[r], row_starts[r] + 1, ...
struct Step {
  index_t num_tokens;
  index_t num_rows;
  index_t num_outputs;                // tokens whose logits are wanted
  const std::int32_t* token_ids;      // [T]
  const std::int64_t* positions;      // [T]
  const std::int64_t* row_slots;      // [R]: the row of the block table
  const std::int64_t* row_starts;     // [R]
  const std::int64_t* row_counts;     // [R], at least 1
  const std::int64_t* row_offsets;    // [R]
  const std::int32_t* block_table;    // [slots][block_table_stride]
  index_t block_table_stride;
  const std::int64_t* output_tokens;  // [num_outputs]: their indexes among the T tokens
  const void* cosines;                // see rope_by_token; [..][rotary], in the model's number format
  const void* sines;
  index_t rope_by_token;              // 1: row i belongs to token i; 0: row p belongs to position p
};

class Op {
 public:
  virtual ~Op() = default;
  // Describes this operation's work in a step. Called once per step before anything runs; the description lives in the
  // operation. No work (count 0) is fine.
  virtual Work prepare(const Step& step) = 0;
};

class Program {
 public:
  void append(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  // Runs operations [begin, end).
  void run(const Step& step, index_t begin, index_t end);
  index_t size() const { return index_t(ops_.size()); }
  // Memory that any operation may use while it runs, and no longer: one area for all, as large as the largest wish. Its
  // address is known once everything is recorded.
  void reserve(index_t bytes);
  char* scratch() const { return scratch_.get(); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  std::unique_ptr<char, Free> scratch_;
  index_t scratch_bytes_ = 0;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<Work> list_;
};

}  // namespace qt
