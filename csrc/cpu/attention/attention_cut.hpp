// How a step's attention is cut into pieces of work, for so many threads. Nothing about a result depends on it.
#pragma once

#include <vector>

#include "attention.hpp"
#include "blocks.hpp"

namespace qt {

// Of a program's scratch for partitions that are reduced apart, and scores that are a work of their own: a million tokens of context
// of 32 heads. A row for which no room is left is not cut.
inline constexpr index_t kPartialsBytes = 32 << 20;

// For tests: whether attention multiplies bf16 with VDPBF16PS from now on where there is such a thing. 0, 1; -1: if it is faster.
void want_pairs(int wanted);

// What every step's attention of a layer has alike; but for how heads are cut into units. The layer is checked: it does not return
// where kernels could not rely on it.
AttentionCall attention_call(const AttentionLayer& layer, const void* q, index_t q_stride, const KvPlace* kv, void* out,
                             index_t out_stride);

// What computes it.
AttentionKernel kernel_of(const AttentionCall& call);

// What so many rows cost for each number of a key or a value.
index_t cost_of_number(index_t rows);

// One layer's attention: a work, or two, one after the other. Its scratch is its program's, from the first to the end of the second.
class AttentionCut {
 public:
  // `call`: what every step has alike. group: of layers. program: has room for kPartialsBytes.
  AttentionCut(const AttentionCall& call, index_t group, index_t max_tokens, const Program* program);

  // Whether there may be scores to compute first.
  bool may_be_apart() const { return may_be_apart_; }
  void describe(const Step& step, index_t threads);
  Work scores() const;  // of the last step described; none: `rest` is all there is to do
  Work rest() const;

 private:
  // Two works: tiles of a piece of scores, numbers of one of values; what they cost the busiest thread.
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
