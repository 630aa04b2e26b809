// Compiled step: the operations of a model's forward pass, recorded once and run with one call per step.
//
// An operation is recorded with the addresses of its weights and activation buffers. The buffers have the size of the largest
// step and never move. All data that changes between steps is in a Step. Each kernel file defines a subclass of Op and the C
// function that appends it; this file knows no operation.
#pragma once

#include <cstdlib>
#include <memory>
#include <vector>

#include "pool.hpp"
#include "work.hpp"

namespace qt {

struct DrawSettings;
struct Masks;

// Rotary tables of a step, with the layout of `quintet.executor.backends.cpu.program.step.CRotation`.
struct Rotation {
  const void *cosines, *sines;      // [..][rotary], in the model's dtype; the second half repeats the first
  index_t by_token;                 // 1: row i belongs to token i; 0: row p belongs to position p
};

// Input of one step, with the layout of `quintet.executor.backends.cpu.program.step.CStep`. T tokens in R rows; a row is a run
// of consecutive tokens of one request. The caller owns all the memory; `qt_fill_step` fills the arrays from a plan.
//
//   row r:   slot row_slots[r], tokens [row_offsets[r], row_offsets[r] + row_counts[r]) of the step,
//            at positions row_starts[r], row_starts[r] + 1, ...
struct Step {
  index_t num_tokens;
  index_t num_rows;
  index_t num_outputs;              // tokens that need logits
  std::int32_t* token_ids;          // [T]
  std::int64_t* positions;          // [T]
  std::int64_t* row_slots;          // [R]: row of the block tables
  std::int64_t* row_starts;         // [R]
  std::int64_t* row_counts;         // [R], at least 1
  std::int64_t* row_offsets;        // [R]
  const std::int32_t* block_table;  // [cache groups][slots][block_table_stride]
  index_t block_table_stride;
  index_t block_table_group_stride;
  std::int64_t* output_tokens;      // [num_outputs]: their indices among the T tokens
  const Rotation* rotations;        // of the model

  // Used by qt_fill_step and qt_program_draw only.
  index_t max_tokens;               // capacity of the arrays
  index_t max_rows;
  index_t num_slots;
  std::int32_t* slot_tokens;        // [slots][slot_tokens_stride]: tokens of the request in each slot
  index_t slot_tokens_stride;
  const DrawSettings* settings;     // [slots]
  std::int64_t* output_slots;       // [num_outputs]
  std::int64_t* output_positions;   // [num_outputs]: positions of the sampled tokens
  std::int32_t* drawn;              // [num_outputs]: the sampled tokens
  const Masks* masks;               // of all outputs; or null
  std::int64_t* marks;              // timestamps of the program's marks, in ns of the monotonic clock; or null
  const std::int32_t* slot_adapters;  // qt_fill_step only: [slots], number of the adapter of each slot's request, or 0; or null
  std::int64_t* row_adapters;       // [R]: the same of each row; or null: no adapters
};

// Rows of an operation: all tokens of the step, or those that need logits.
enum class Extent : int { tokens = 0, outputs = 1 };

// Number of these rows. Inlined everywhere: kernels of several instruction sets include it.
static inline __attribute__((always_inline)) index_t rows_in(const Step& step, Extent extent) {
  return extent == Extent::outputs ? step.num_outputs : step.num_tokens;
}

class Op {
 public:
  virtual ~Op() = default;
  // Describes this operation's work in a step, cut for `threads` threads. Called once per step before any work runs. The
  // operation owns the description. Count 0 means no work.
  virtual Work prepare(const Step& step, index_t threads) = 0;
};

// Load of one operation in a step, in the field order of `bench.kernels.op_balance.OpBalance`.
struct OpBalance {
  index_t pieces, takes;       // number of pieces; number of takes by threads
  index_t cost, busiest;       // of all pieces; of the busiest thread's pieces
  index_t bytes, bytes_again;  // weights and KV read; the part of them that an earlier piece has read already
};

class Program {
 public:
  ~Program();
  void append(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  // Before the next appended operation, each run stores a timestamp in the step's next mark.
  void mark() { marks_.push_back(size()); }
  // Runs operations [begin, end).
  void run(const Step& step, index_t begin, index_t end);
  // Simulates the load of operations [begin, end) on `threads` threads. Runs no operation and reads only the row arrays of the
  // step. Late works are those of the last step.
  void balance(const Step& step, index_t threads, index_t begin, index_t end, OpBalance* out);
  index_t size() const { return index_t(ops_.size()); }
  // Scratch memory shared by all operations, valid only while one of them runs. Its size is the largest reservation. Its
  // address is fixed once all operations are recorded.
  void reserve(index_t bytes);
  char* scratch() const { return scratch_.get(); }

 private:
  struct Free {
    void operator()(char* memory) const { std::free(memory); }
  };

  std::unique_ptr<char, Free> scratch_;
  index_t scratch_bytes_ = 0;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<index_t> marks_;
  std::vector<Work> list_;
};

}  // namespace qt
