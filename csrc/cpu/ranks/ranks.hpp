// Ranks: processes that compute one model together over shared memory. Each has a part of every layer's weights.
//
//     rank 0      send ──▶ order, the step's arrays ──▶ receive   other ranks
//     all ranks   own partial sums of a layer ──▶ barrier ──▶ sums of all ranks added, as one tree
//
//     | head | a line for each rank | orders, each with the step's arrays, tables, items, payload | rotations |
//     | sums, twice | gathered, twice | rows of experts | weights in transfer | logits | KV, queries, partitions: once for each
//     set of ranks that share a KV memory |
//
// Rank 0 has the plan, the block tables and the sampler. The other ranks run the same operations of their own programs over the
// step in shared memory. A layer with divided inputs produces a partial fp32 sum of every output on each rank. All ranks read
// and add the sums in one order, so all continue with the same bits.
//
// Each rank has two buffers of sums, used by alternating layers. A rank that writes the next sums does not overwrite sums that
// another rank still reads; two layers later it has passed a barrier in between. With expert parallelism, ranks write one row for
// each choice of a token into a single buffer; a barrier separates two such layers.
//
// A pipeline stage and the next one (docs/parallel.md) are also two ranks, without barriers: the first sends an order, and the
// input of the second is the order's payload. Several orders may be in flight, each with its own arrays and payload. If the
// stages are on two machines, each machine has such a memory. A process on either machine forwards orders (step_bytes.cpp): it
// receives as rank 1 on one machine and sends as rank 0 on the other.
//
// Ranks of one group on several machines use the same memory layout. Each rank records the rows that it has written for the
// others. After sending these bytes, the forwarding process advances the rank's barrier count on every other machine.
//
// Waits spin shortly, then use a futex. No rank checks the liveness of the others: the processes end together
// (docs/parallel.md).
#pragma once

#include <atomic>

#include "program.hpp"

namespace qt {

// Capacities, with the layout of `quintet.executor.distributed.parallel.library.CRanksShape`.
struct RanksShape {
  index_t ranks;
  index_t max_tokens, max_rows, max_outputs;  // of a step
  index_t tables, slots, table_stride;        // block tables [tables][slots][table_stride]
  index_t block_size;
  index_t sums_width;                         // most numbers in a row of sums
  index_t logits_row_bytes;                   // per row of logits, columns of all ranks
  index_t rotated_row_bytes;                  // per token: cosines and sines that do not depend on its position alone; or 0
  index_t gathered_row_bytes;                 // most bytes of a row gathered from the columns of all ranks; or 0
  index_t experts_row_bytes;                  // most bytes of a token's expert rows under expert parallelism; or 0
  index_t staging_bytes;                      // of weights in transfer between ranks
  index_t depth;                              // orders in flight
  index_t payload_bytes;                      // of an order, in addition to its step
  index_t kv_bytes;                           // of a KV memory that several ranks share; or 0
  index_t kv_copies;                          // number of these memories
  index_t query_row_bytes;                    // most bytes of a token's queries, of all heads over one of these memories
  index_t partial_floats;                     // of the partial attention states of these heads, for all partitions
  index_t adapters;                           // number of LoRA adapters
};

// A command of rank 0, with the layout of `quintet.executor.distributed.parallel.library.COrder`. Python defines all kinds
// except `kRun`.
struct Order {
  index_t kind;
  index_t begin, end;  // operations of the program; or ints of the items
  index_t length;      // the step's largest position plus 1
  index_t num_tokens, num_rows, num_outputs;
};
inline constexpr index_t kRun = 0;
inline constexpr index_t kItemInts = 1 << 16;

// Status values that a rank publishes for others to poll.
enum class Note : index_t { progress = 0, chores = 1 };
inline constexpr index_t kNotes = 2;

// Rows in shared memory that a rank has written for the other ranks at a barrier.
struct Left {
  index_t offset;  // from the beginning of the memory
  index_t row_bytes, stride;
  index_t rows;
  index_t for_first;  // 1: only rank 0 reads them
};

// A monotonic counter with waits across processes.
struct alignas(64) Turn {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  void reach(std::uint32_t turn);
  void wait_for(std::uint32_t turn, int spins);
};

class Ranks {
 public:
  static index_t bytes(const RanksShape& shape);

  // memory: `bytes` bytes, initially zero, shared by all ranks. spins: pauses of a wait before it sleeps.
  Ranks(const RanksShape& shape, void* memory, index_t rank, int spins);

  // Rank 0: waits until there is room for another order.
  void make_room();
  // Rank 0: make_room(), then sends the order. step: null if the order needs none.
  void send(const Order& order, const Step* step);
  // Rank 0: waits until all ranks have completed the sent orders, or have started.
  void wait_for_all();
  // Other ranks: waits for the next order. For kRun, `step` is set to the arrays in shared memory.
  Order receive(Step& step);
  // Other ranks: reports that the rank has started, or has completed the order.
  void done();
  // Other ranks: reports the number of completed orders since the first, independent of the number received.
  void done_with(std::uint32_t orders);
  // Rank 0, any thread: waits until all ranks have completed `orders` orders; 0: until all have started.
  void wait_for_done(std::uint32_t orders);

  // Other ranks, any thread: waits until `orders` orders were sent since the first, without receiving one.
  void wait_for_sent(std::uint32_t orders);
  // Any rank, any thread: publishes a status value; returns the sum of the other ranks' values.
  void note(Note which, std::uint64_t value);
  std::uint64_t noted(Note which) const;

  // Barrier of all ranks. left: not read if all ranks share one memory.
  void barrier(const Left& left = {});
  // Any thread: waits until ranks [begin, end) have reached `count` barriers since the first.
  void wait_for_barrier(index_t begin, index_t end, std::uint32_t count);
  // For a rank on another machine: it has reached `count` barriers, and its rows are in this memory.
  void reach_barrier(std::uint32_t count);
  // Rows that this rank wrote for the last barrier or the one before; others are not recorded.
  Left left(std::uint32_t barrier) const;
  // From the beginning of the memory.
  index_t offset_of(const void* place) const;

  const RanksShape& shape() const { return shape_; }
  index_t rank() const { return rank_; }
  // Sums of a rank for the layers of turn 0 or 1. Rows have as many numbers as the layer has columns.
  float* sums(index_t turn, index_t rank) const;
  // Rows gathered from the columns of all ranks, for turn 0 or 1.
  char* gathered(index_t turn) const { return gathered_ + turn * shape_.max_tokens * shape_.gathered_row_bytes; }
  char* expert_rows() const { return expert_rows_; }
  char* staging() const { return staging_; }
  char* logits() const { return logits_; }
  // Of the next order of rank 0, or of the order that another rank has received.
  std::int32_t* items() const { return items_ + place() * kItemInts; }
  char* payload() const { return payload_ + place() * shape_.payload_bytes; }
  char* rotated() const { return rotated_; }
  // A KV memory shared by adjacent ranks.
  char* kv(index_t copy) const { return kv_ + copy * shape_.kv_bytes; }
  // Attention buffers of this memory: queries of all heads, and states of partitions. All layers share them, since all ranks
  // wait at a barrier after each layer.
  char* queries(index_t copy) const { return queries_ + copy * shape_.max_tokens * shape_.query_row_bytes; }
  float* partials(index_t copy) const { return partials_ + copy * shape_.partial_floats; }
  // Step arrays of the next order of rank 0, or of the order that another rank has received.
  Step step() const { return step_at(place()); }
  // Block table entries of a row that ends with the `tokens`-th token.
  index_t table_entries(index_t tokens) const;

 private:
  struct Head;
  struct Line;

  index_t place() const { return (sent_ + (rank_ == 0)) % std::uint32_t(shape_.depth); }
  // The step with its arrays at a place.
  Step step_at(index_t place) const;

  RanksShape shape_;
  index_t rank_;
  int spins_;
  std::uint32_t sent_ = 1;  // sent or received orders; the first one reports the start
  Head* head_;
  Line* lines_;
  Order* orders_;
  Step step_{};  // its arrays at the first place, in the shared memory
  std::int32_t* table_;
  std::int32_t* items_;
  char* payload_;
  char* rotated_;
  float* sums_;
  char* gathered_;
  char* expert_rows_;
  char* staging_;
  char* logits_;
  char* kv_;
  char* queries_;
  float* partials_;
};

// Appends a barrier of all ranks, for steps with such rows. left: without the number of rows.
void append_meeting(Program* program, Ranks* ranks, Extent extent, const Left& left = {});

}  // namespace qt
