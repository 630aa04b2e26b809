// Context parallelism: attention over keys and values that several ranks share (docs/parallel.md).
//
//   tokens of prompts, and few keys    each rank computes its own heads, over all keys
//   a new token over many keys         each rank computes some partitions for the heads of all these ranks; then, after a
//                                      barrier, each rank merges the partitions of its own heads
//
//        queries of rank 0 | of rank 1       partitions   0   1   2   3   4 ...
//        ---- read by all ranks -------      computed by  0   1   0   1   0 ...
//
// So one rank reads a key and a value, not all ranks. A single process also reduces these partitions separately and merges them
// in order (kernels/attention/attention.cpp). So the bits do not depend on the rank that computes a partition.
#include <algorithm>
#include <memory>
#include <vector>

#include "attention_cut.hpp"
#include "attention_merge.hpp"
#include "blocks.hpp"
#include "paged.hpp"
#include "ranks.hpp"
#include "require.hpp"

namespace qt {
namespace {

// Least partitions per rank, of all tokens of a step together. Fewer do not pay for the barrier and for idle threads.
constexpr index_t kLeastEach = 2;

// Division of a step's attention over ranks. An AttentionCut divides the heads of this rank over its threads.
class ContextCut {
 public:
  ContextCut(const AttentionCall& own, const KvPlace& place, const void* all_queries, Ranks* ranks, Program& program,
             index_t max_tokens)
      : cut_(own, place.group, max_tokens, &program),
        group_(place.group),
        ranks_(ranks),
        sharer_(place.sharer),
        sharers_(place.sharers),
        partials_(ranks->partials(ranks->rank() / place.sharers)),
        run_(kernel_of(own).run),
        merge_(QT_CHOOSE(attention_merge).merge[own.layer.dtype]) {
    all_ = own;
    all_.q = all_queries;
    all_.layer.heads *= sharers_;
    all_.group *= sharers_;
    all_.kv_head_units = (all_.group + kMaxRows - 1) / kMaxRows;
    all_.unit_heads = (all_.group + all_.kv_head_units - 1) / all_.kv_head_units;
    all_.kv_head_units = (all_.group + all_.unit_heads - 1) / all_.unit_heads;
    all_.group_tokens = 1;
    all_.part_dim = all_.kv.value_dim;
    floats_ = all_.unit_heads * (all_.kv.value_dim + 2);
    merging_.own = own;
    merging_.units = all_.kv_head_units;
    merging_.partial_floats = floats_;
    find_heads();
  }

  void describe(const Step& step, index_t threads) {
    choose(step);
    Step rest = step;
    rest.num_rows = index_t(rows_.slots.size());
    rest.row_slots = rows_.slots.data();
    rest.row_starts = rows_.starts.data();
    rest.row_counts = rows_.counts.data();
    rest.row_offsets = rows_.offsets.data();
    cut_.describe(rest, threads);
    all_.pieces = pieces_.data();
    all_.num_pieces = index_t(pieces_.size());
    merging_.tokens = tokens_.data();
    merging_.heads = heads_.data();
    merging_.num_heads = index_t(heads_.size());
  }

  const AttentionCut& own() const { return cut_; }
  Ranks* ranks() const { return ranks_; }
  bool is_divided() const { return !tokens_.empty(); }

  Work partitions() const {
    const index_t keys = cost_of_number(all_.unit_heads) * kPartitionKeys;
    return {.count = all_.num_pieces * all_.kv_head_units,
            .run = run_,
            .call = &all_,
            .each_cost = keys * (all_.kv.key_dim + all_.kv.value_dim),
            .bytes = all_.num_pieces * kPartitionTiles * all_.kv.tile_bytes};
  }

  Work merges() const {
    constexpr index_t kCost = 4;  // per number of a partition, in multiplications
    index_t partitions = 0;
    for (const MergeToken& token : tokens_) partitions += token.partitions;
    Work work{.count = index_t(tokens_.size() * heads_.size()), .run = merge_, .call = &merging_};
    if (work.count > 0) work.each_cost = kCost * partitions * merging_.own.group * all_.kv.value_dim / work.count;
    return work;
  }

 private:
  struct Rows {
    std::vector<std::int64_t> slots, starts, counts, offsets;
  };

  // Finds this rank's heads in each unit.
  void find_heads() {
    const index_t own = merging_.own.group, begin = sharer_ * own, end = begin + own;
    for (index_t head = begin; head < end;) {
      const index_t unit = head / all_.unit_heads, inside = head % all_.unit_heads;
      const index_t unit_end = std::min((unit + 1) * all_.unit_heads, all_.group);
      const index_t next = std::min(unit_end, end);
      heads_.push_back({unit, unit_end - unit * all_.unit_heads, inside, head - begin, next - head});
      head = next;
    }
  }

  index_t first_partition(const Step& step, index_t row) const {
    return seen_from(all_.layer.window, all_.layer.chunk, step.row_starts[row]) / kPartitionKeys;
  }

  // Partitions of a row with one token, divided over the ranks; 0: each rank computes its own heads.
  index_t partitions_of(const Step& step, index_t row) const {
    if (step.row_counts[row] != 1) return 0;
    const index_t partitions = step.row_starts[row] / kPartitionKeys + 1 - first_partition(step, row);
    return partitions > 1 ? partitions : 0;
  }

  // Chooses the divided rows. All ranks get the same result, independent of their number of threads.
  void choose(const Step& step) {
    const index_t each = all_.kv_head_units * floats_, room = ranks_->shape().partial_floats / each;
    const bool may_be = merging_.own.group <= kFewRows && !all_.layer.alibi_slopes;
    index_t wanted = 0;
    for (index_t row = 0; may_be && row < step.num_rows; ++row) wanted += partitions_of(step, row);
    const bool worth_it = wanted >= kLeastEach * sharers_;
    rows_.slots.clear(), rows_.starts.clear(), rows_.counts.clear(), rows_.offsets.clear();
    tokens_.clear(), pieces_.clear();
    index_t taken = 0;
    for (index_t row = 0; row < step.num_rows; ++row) {
      const index_t partitions = worth_it ? partitions_of(step, row) : 0;
      if (partitions == 0 || taken + partitions > room) {
        rows_.slots.push_back(step.row_slots[row]);
        rows_.starts.push_back(step.row_starts[row]);
        rows_.counts.push_back(step.row_counts[row]);
        rows_.offsets.push_back(step.row_offsets[row]);
        continue;
      }
      tokens_.push_back({step.row_offsets[row], partials_ + taken * each, partitions});
      for (index_t i = 0; i < partitions; ++i, ++taken)
        if (taken % sharers_ == sharer_) pieces_.push_back(piece_of(step, row, i, partials_ + taken * each));
    }
  }

  AttentionPiece piece_of(const Step& step, index_t row, index_t i, float* partials) {
    AttentionPiece piece{};
    piece.blocks = blocks_of(step, row, group_);
    piece.token = step.row_offsets[row];
    piece.count = 1;
    piece.position = step.row_starts[row];
    piece.first = piece.all_first = first_partition(step, row) + i;
    piece.last = piece.all_last = piece.first + 1;
    piece.partials = partials;
    piece.partial_floats = floats_;
    return piece;
  }

  AttentionCut cut_;
  index_t group_;  // cache group
  Ranks* ranks_;
  index_t sharer_, sharers_;
  float* partials_;
  void (*run_)(const void*, index_t, index_t);
  void (*merge_)(const void*, index_t, index_t);
  AttentionCall all_;
  index_t floats_;  // of a unit's state of one partition
  MergeCall merging_{};
  std::vector<MergeHeads> heads_;
  Rows rows_;  // rows that are computed by heads
  std::vector<MergeToken> tokens_;
  std::vector<AttentionPiece> pieces_;
};

// Its works, in this order. The first one describes the step.
enum class Part { scores, rest, partitions, barrier, merges };

class ContextOp final : public Op {
 public:
  ContextOp(std::shared_ptr<ContextCut> cut, Part part, bool is_first) : cut_(std::move(cut)), part_(part), is_first_(is_first) {}

  Work prepare(const Step& step, index_t threads) override {
    if (is_first_) cut_->describe(step, threads);
    switch (part_) {
      case Part::scores: return cut_->own().scores();
      case Part::rest: return cut_->own().rest();
      case Part::partitions: return cut_->partitions();
      case Part::barrier: return {.count = cut_->is_divided(), .run = wait_at_barrier, .call = cut_->ranks()};
      case Part::merges: return cut_->merges();
    }
    return {};
  }

 private:
  static void wait_at_barrier(const void* ranks, index_t, index_t) { static_cast<Ranks*>(const_cast<void*>(ranks))->barrier(); }

  std::shared_ptr<ContextCut> cut_;
  Part part_;
  bool is_first_;
};

}  // namespace
}  // namespace qt

// Appends attention as qt_program_attention does, over KV memory that this rank shares with other ranks. Contains a barrier
// with them. q: the queries of the heads of all these ranks, in shared memory.
QT_EXPORT void qt_program_context_attention(qt::Program* program, qt::Ranks* ranks, const qt::AttentionLayer* layer, const void* q,
                                            index_t q_stride, const qt::KvPlace* kv, void* out, index_t out_stride,
                                            index_t max_tokens) {
  using qt::Part;
  const index_t width = layer->heads * qt::padded(layer->key_width);
  QT_REQUIRE(layer->kv_heads == 1 && kv->sharers > 1 && q_stride >= kv->sharers * width &&
                 ranks->rank() % kv->sharers == kv->sharer && ranks->rank() / kv->sharers < ranks->shape().kv_copies,
             "%lld KV heads of %lld ranks, of which this is number %lld of %lld, queries %lld apart", (long long)layer->kv_heads,
             (long long)kv->sharers, (long long)ranks->rank(), (long long)ranks->shape().ranks, (long long)q_stride);
  const index_t item_bytes = layer->dtype == int(qt::Dtype::fp32) ? 4 : 2;
  const void* const own = static_cast<const char*>(q) + kv->sharer * width * item_bytes;
  const qt::AttentionCall call = qt::attention_call(*layer, own, q_stride, kv, out, out_stride);
  program->reserve(qt::kPartialsBytes);
  const auto cut = std::make_shared<qt::ContextCut>(call, *kv, q, ranks, *program, max_tokens);
  bool is_first = true;
  for (const Part part : {Part::scores, Part::rest, Part::partitions, Part::barrier, Part::merges}) {
    if (part == Part::scores && !cut->own().may_be_apart()) continue;
    program->append(std::make_unique<qt::ContextOp>(cut, part, is_first));
    is_first = false;
  }
}
