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

struct DrawSettings;
struct Masks;

// How a step's tokens are rotated, laid out like `quintet.executor.backends.cpu.program.step.CRotation`.
struct Rotation {
  const void *cosines, *sines;      // [..][rotary], in the model's number format; of each, the second half is like the first
  index_t by_token;                 // 1: row i belongs to token i; 0: row p belongs to position p
};

// One step's input, laid out like `quintet.executor.backends.cpu.program.step.CStep`. T tokens, R rows of consecutive ones. The
// caller that runs a program owns all the memory; `qt_fill_step` fills the arrays from a plan.
//
//   row r:   slot row_slots[r], tokens [row_offsets[r], row_offsets[r] + row_counts[r]) of the step,
//            at positions row_starts[r], row_starts[r] + 1, ...
struct Step {
  index_t num_tokens;
  index_t num_rows;
  index_t num_outputs;              // tokens that need logits
  std::int32_t* token_ids;          // [T]
  std::int64_t* positions;          // [T]
  std::int64_t* row_slots;          // [R]: the row of the block tables
  std::int64_t* row_starts;         // [R]
  std::int64_t* row_counts;         // [R], at least 1
  std::int64_t* row_offsets;        // [R]
  const std::int32_t* block_table;  // [groups][slots][block_table_stride]
  index_t block_table_stride;
  index_t block_table_group_stride;
  std::int64_t* output_tokens;      // [num_outputs]: their indexes among the T tokens
  const Rotation* rotations;        // of the model, as many as it has

  // For qt_fill_step and qt_program_draw alone.
  index_t max_tokens;               // what the arrays have room for
  index_t max_rows;
  index_t num_slots;
  std::int32_t* slot_tokens;        // [slots][slot_tokens_stride]: the tokens that each slot's tenant has
  index_t slot_tokens_stride;
  const DrawSettings* settings;     // of every slot
  std::int64_t* output_slots;       // [num_outputs]
  std::int64_t* output_positions;   // [num_outputs]: where the drawn token will stand
  std::int32_t* drawn;              // [num_outputs]
  const Masks* masks;               // of every slot; or null
  std::int64_t* marks;              // when the program's marks were passed, in ns of the monotonic clock; or null
};

// The rows of an operation of a program: the step's tokens, or those of them that need logits.
enum class Extent : int { tokens = 0, outputs = 1 };

// How many these are. Inlined everywhere: kernels of several instruction sets include it.
static inline __attribute__((always_inline)) index_t rows_in(const Step& step, Extent extent) {
  return extent == Extent::outputs ? step.num_outputs : step.num_tokens;
}

class Op {
 public:
  virtual ~Op() = default;
  // Describes this operation's work in a step, cut for so many threads. Called once per step before anything runs; the
  // description lives in the operation. No work (count 0) is fine.
  virtual Work prepare(const Step& step, index_t threads) = 0;
};

// One operation's share of a step on so many threads, in the order of `quintet.executor.backends.cpu.program.runner.OpBalance`.
struct OpBalance {
  index_t pieces, takes;       // pieces of work; how often a thread takes some
  index_t cost, busiest;       // of all pieces; of the busiest thread's
  index_t bytes, bytes_again;  // of weights and KV; of them, read before by another piece
};

class Program {
 public:
  void append(std::unique_ptr<Op> op) { ops_.push_back(std::move(op)); }
  // Before the next operation that is appended, each run notes the time in the step's next mark.
  void mark() { marks_.push_back(size()); }
  // Runs operations [begin, end).
  void run(const Step& step, index_t begin, index_t end);
  // How operations [begin, end) would keep so many threads busy. Nothing is run, and none of the step's arrays but the rows' is
  // read. Late works are those of the last step.
  void balance(const Step& step, index_t threads, index_t begin, index_t end, OpBalance* out);
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
  std::vector<index_t> marks_;
  std::vector<Work> list_;
};

}  // namespace qt
