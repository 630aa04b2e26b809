// Division of a step's attention into pieces of work. The results do not depend on the cut.
#pragma once

#include <vector>

#include "attention.hpp"
#include "blocks.hpp"

namespace qt {

// Scratch of a program for partial results and separate scores: a million tokens of context with 32 heads. Rows beyond this
// size are not divided.
inline constexpr index_t kPartialsBytes = 32 << 20;

// For tests: selects VDPBF16PS (where available) for bf16 attention from now on. 0: no, 1: yes, -1: if it is faster.
void want_pairs(int wanted);

// Returns the arguments that all steps of a layer share, except the division of heads into units. Aborts if the layer violates
// a precondition of the kernels.
AttentionCall attention_call(const AttentionLayer& layer, const void* q, index_t q_stride, const KvPlace* kv, void* out,
                             index_t out_stride);

// Returns the kernel of the call.
AttentionKernel kernel_of(const AttentionCall& call);

// Cost of `rows` rows per number of a key or a value.
index_t cost_of_number(index_t rows);

// Attention of one layer: one work, or two in sequence. It uses the program's scratch from the first work to the end of the
// second.
class AttentionCut {
 public:
  // call: arguments that all steps share. group: cache group. program: its scratch has kPartialsBytes.
  AttentionCut(const AttentionCall& call, index_t group, index_t max_tokens, const Program* program);

  // True if a step may have a separate scores work.
  bool may_be_apart() const { return may_be_apart_; }
  void describe(const Step& step, index_t threads);
  Work scores() const;  // of the last described step; empty if `rest` is the only work
  Work rest() const;

 private:
  // Division into two works: tiles of a scores piece, numbers of a values piece, cost of the busiest thread.
  struct Apart {
    index_t tiles, part_dim, cost;
  };

  index_t units() const { return call_.kv.kv_heads * call_.kv_head_units; }
  index_t parts() const { return (call_.kv.value_dim + call_.part_dim - 1) / call_.part_dim; }
  index_t seen_from(index_t position) const { return qt::seen_from(call_.layer.window, call_.layer.chunk, position); }
  index_t begin_of(index_t end, index_t groups) const;
  AttentionPiece piece_of(const Step& step, index_t row, index_t begin, index_t end) const;
  index_t cost_of(const AttentionPiece& piece) const;
  index_t keys_of_cut(const AttentionPiece& piece, index_t most) const;
  bool is_small(const AttentionPiece& piece, index_t most) const;
  void share_heads(index_t units);
  index_t units_for(index_t threads, index_t most) const;
  index_t cuts_of(const AttentionPiece& piece, index_t most) const;
  Apart best_apart(index_t threads, index_t most) const;
  index_t take_apart(index_t threads, index_t most);
  void split(index_t most, index_t floats);
  void count_bytes(const Step& step);

  AttentionCall call_;
  index_t group_;
  const Program* program_;
  AttentionKernel kernel_;
  bool may_be_apart_;
  index_t most_groups_;
  index_t bytes_ = 0, bytes_again_ = 0;
  std::vector<AttentionPiece> pieces_;
  std::vector<ScorePiece> score_pieces_;
  std::vector<std::uint32_t> pending_;
};

}  // namespace qt
