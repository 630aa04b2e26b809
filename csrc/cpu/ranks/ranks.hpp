// Ranks: processes that compute one model together, each with a share of every layer's weights, over memory that they share.
//
//     rank 0      tell ──▶ order, the step's arrays ──▶ hear      the others
//     all ranks   its own sums of a layer ──▶ meet ──▶ all ranks' sums added, as one tree
//
//     | head | a line for each rank | orders, and of each the step's arrays, tables, mail, payload | rotations |
//     | sums, twice | gathered, twice | rows of experts | weights on their way | logits | KV, queries, partitions: each of some
//     ranks, of the next ones, ... |
//
// Rank 0 has the plan, the tables and the draw; the others run the same operations of their own programs over the step that it
// shows them, and know nothing else. A layer with divided inputs leaves a part of every output with each rank: fp32 sums,
// which all ranks read and add in one order, so that they continue with the same bits. There are two places for a rank's sums,
// which layers use in turn: the writer of the next one's does not disturb a rank that still reads, and a rank two layers on has
// met all others in between. Whole experts leave a row for each of a token's choices, in one place: between two such layers there
// is a meeting for something else.
//
// A stage and the next one (docs/parallel.md) are two ranks as well, that never meet: the first sends an order that the second
// shall continue with; its input is the order's payload. There may be several orders under way, each with arrays and a payload of
// its own. Where they are on two machines each has such memory, and a process on either carries orders across (step_bytes.cpp):
// it hears an order on one machine as rank 1, and sends it on the other as rank 0.
//
// So have ranks that are on several machines and do meet. Each names the rows that it leaves for the others; after these bytes
// the process that carries them says on every other machine that the rank has come as far.
//
// Each waits by a short spin, then a futex. No rank checks that the others live: the processes end together (docs/parallel.md).
#pragma once

#include <atomic>

#include "program.hpp"

namespace qt {

// What there is room for; laid out like `quintet.executor.distributed.parallel.library.CRanksShape`.
struct RanksShape {
  index_t ranks;
  index_t max_tokens, max_rows, max_outputs;  // of a step
  index_t tables, slots, table_stride;        // block tables [tables][slots][table_stride]
  index_t block_size;
  index_t sums_width;                         // most numbers of a row of sums
  index_t logits_row_bytes;                   // of one row of logits, all ranks' columns
  index_t rotated_row_bytes;                  // of cosines and sines of a token that depend on more than its position; or 0
  index_t gathered_row_bytes;                 // most bytes of a row that is put together of all ranks' columns; or 0
  index_t experts_row_bytes;                  // most bytes of a token's rows that whole experts have made; or 0
  index_t staging_bytes;                      // of weights on their way from one rank to another
  index_t depth;                              // orders that may be under way
  index_t payload_bytes;                      // of an order, besides its step
  index_t kv_bytes;                           // of KV memory that several ranks keep together; or 0
  index_t kv_copies;                          // such memories
  index_t query_row_bytes;                    // of a token's queries of all heads that meet one of them, at most
  index_t partial_floats;                     // of what these heads' attention comes to, partition by partition
};

// What the others shall do; laid out like `quintet.executor.distributed.parallel.library.COrder`. Kinds but `kRun` are Python's to know.
struct Order {
  index_t kind;
  index_t begin, end;  // operations of the program; or entries of the mail
  index_t length;      // the step's largest position plus 1
  index_t num_tokens, num_rows, num_outputs;
};
inline constexpr index_t kRun = 0;
inline constexpr index_t kMailInts = 1 << 16;

// What a rank says of itself, for others to look at now and then.
enum class Note : index_t { progress = 0, chores = 1 };
inline constexpr index_t kNotes = 2;

// What a rank leaves for a meeting where the others read it: rows in the memory that they share.
struct Left {
  index_t offset;  // from the beginning of the memory
  index_t row_bytes, stride;
  index_t rows;
  index_t for_first;  // whether rank 0 alone reads them
};

// A number that grows, and is waited for across processes.
struct alignas(64) Turn {
  std::atomic<std::uint32_t> value;
  std::atomic<std::uint32_t> sleepers;

  void reach(std::uint32_t turn);
  void wait_for(std::uint32_t turn, int spins);
};

class Ranks {
 public:
  static index_t bytes(const RanksShape& shape);

  // memory: `bytes`, zeros at first, shared with the other ranks. spins: pauses of a wait before it sleeps.
  Ranks(const RanksShape& shape, void* memory, index_t rank, int spins);

  // Rank 0: waits until there is room for another order.
  void make_room();
  // Rank 0: does, then sends this. step: null where the order needs none.
  void tell(const Order& order, const Step* step);
  // Rank 0: waits until all ranks have done the sent orders, or have started.
  void wait_for_all();
  // The others: waits for the next order; a run's step points to what rank 0 has shown.
  Order hear(Step& step);
  // The others: is there, or has done what it heard.
  void done();
  // The others: has done so many orders since the first, however many it has heard.
  void done_with(std::uint32_t orders);
  // Rank 0: waits until all ranks have done so many; of none, until all have started. From any thread.
  void wait_for_done(std::uint32_t orders);

  // The others: waits until so many orders were sent since the first, and takes none. From any thread.
  void wait_for_sent(std::uint32_t orders);
  // Any rank, from any thread: says something of itself; adds up what the others say.
  void note(Note which, std::uint64_t value);
  std::uint64_t noted(Note which) const;

  // Returns when every rank has come as far. left: not read where all ranks share one memory.
  void meet(const Left& left = {});
  // From any thread: waits until ranks [begin, end) have come to so many meetings since the first.
  void wait_for_met(index_t begin, index_t end, std::uint32_t meetings);
  // For a rank on another machine: it has come to so many, and what it left lies here.
  void met(std::uint32_t meetings);
  // What this rank has left for the last meeting but one, or for the last: for no others is it known.
  Left left(std::uint32_t meeting) const;
  // From the beginning of the memory.
  index_t offset_of(const void* place) const;

  const RanksShape& shape() const { return shape_; }
  index_t rank() const { return rank_; }
  // A rank's sums of the layers with turn `turn` (0 or 1): rows of as many numbers as the layer has.
  float* sums(index_t turn, index_t rank) const;
  // Rows of all ranks' columns, of what is put together in the turn `turn`: likewise.
  char* gathered(index_t turn) const { return gathered_ + turn * shape_.max_tokens * shape_.gathered_row_bytes; }
  char* expert_rows() const { return expert_rows_; }
  char* staging() const { return staging_; }
  char* logits() const { return logits_; }
  // Of the order that rank 0 sends next; of the one that another has heard.
  std::int32_t* mail() const { return mail_ + place() * kMailInts; }
  char* payload() const { return payload_ + place() * shape_.payload_bytes; }
  char* rotated() const { return rotated_; }
  // One of the KV memories that adjacent ranks keep together.
  char* kv(index_t copy) const { return kv_ + copy * shape_.kv_bytes; }
  // What is computed over it: rows of all heads' queries, and states of partitions. One layer's, since all meet after each.
  char* queries(index_t copy) const { return queries_ + copy * shape_.max_tokens * shape_.query_row_bytes; }
  float* partials(index_t copy) const { return partials_ + copy * shape_.partial_floats; }
  // Where the step lies of the order that rank 0 sends next, or of the one that another has heard.
  Step step() const { return step_at(place()); }
  // Entries of each block table of a row with the `tokens`-th token as its last.
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
  std::uint32_t sent_ = 1;  // orders; the first is to be there
  Head* head_;
  Line* lines_;
  Order* orders_;
  Step step_{};  // its arrays at the first place, in the shared memory
  std::int32_t* table_;
  std::int32_t* mail_;
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

// Appends: wait until every rank is here, in steps that have such rows. left: but for how many rows.
void append_meeting(Program* program, Ranks* ranks, Extent extent, const Left& left = {});

}  // namespace qt
