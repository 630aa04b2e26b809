#include "ranks.hpp"

#include <algorithm>
#include <cstring>
#include <thread>

#include "require.hpp"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace qt {
namespace {

constexpr index_t kStateEntries = 2;   // entries of a state table: read, written
constexpr long kNapNs = 50'000'000;  // longest sleep without a check

static_assert(std::atomic<std::uint32_t>::is_always_lock_free && sizeof(std::atomic<std::uint32_t>) == 4);

bool is_reached(std::uint32_t value, std::uint32_t turn) { return std::int32_t(value - turn) >= 0; }

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Futex wait across processes; std::atomic::wait supports threads of one process only.
void sleep_while(std::atomic<std::uint32_t>& word, std::uint32_t value) {
#if defined(__linux__)
  const timespec nap{0, kNapNs};
  syscall(SYS_futex, &word, FUTEX_WAIT, value, &nap, nullptr, 0);
#else
  if (word.load() == value) std::this_thread::yield();
#endif
}

void wake_all(std::atomic<std::uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

// Allocates consecutive parts of the shared memory.
class Parts {
 public:
  explicit Parts(char* memory) : memory_(memory) {}
  template <class Type>
  Type* take(index_t count) {
    char* const part = memory_ + bytes_;
    bytes_ += (count * index_t(sizeof(Type)) + 63) / 64 * 64;
    return reinterpret_cast<Type*>(part);
  }
  index_t bytes() const { return bytes_; }

 private:
  char* memory_;
  index_t bytes_ = 0;
};

template <class Type>
void copy(Type* to, const Type* from, index_t count) {
  if (count > 0) std::memcpy(to, from, std::size_t(count) * sizeof(Type));
}

}  // namespace

void Turn::reach(std::uint32_t turn) {
  value.store(turn);
  if (sleepers.load() != 0) wake_all(value);
}

void Turn::wait_for(std::uint32_t turn, int spins) {
  for (int spin = 0; spin < spins; ++spin) {
    if (is_reached(value.load(std::memory_order_acquire), turn)) return;
    pause();
  }
  sleepers.fetch_add(1);
  for (std::uint32_t now; !is_reached(now = value.load(), turn);) sleep_while(value, now);
  sleepers.fetch_sub(1);
}

struct Ranks::Head {
  Turn sent;
};

// Data written by one rank.
struct Ranks::Line {
  Turn done, barrier;
  alignas(64) std::atomic<std::uint64_t> notes[kNotes];
  Left left[2];  // alternating: no rank is two barriers ahead before the rows of the first are read
};

index_t Ranks::bytes(const RanksShape& shape) {
  return index_t(reinterpret_cast<std::intptr_t>(Ranks(shape, nullptr, 0, 0).partials_)) +
         shape.kv_copies * shape.partial_floats * index_t(sizeof(float));
}

Ranks::Ranks(const RanksShape& shape, void* memory, index_t rank, int spins) : shape_(shape), rank_(rank), spins_(spins) {
  QT_REQUIRE(shape.ranks >= 1 && rank >= 0 && rank < shape.ranks, "rank %lld of %lld", (long long)rank, (long long)shape.ranks);
  QT_REQUIRE(shape.depth >= 1 && (shape.depth & (shape.depth - 1)) == 0, "%lld orders under way", (long long)shape.depth);
  Parts parts(static_cast<char*>(memory));
  head_ = parts.take<Head>(1);
  lines_ = parts.take<Line>(shape.ranks);
  const index_t depth = shape.depth;
  orders_ = parts.take<Order>(depth);
  step_.token_ids = parts.take<std::int32_t>(depth * shape.max_tokens);
  step_.positions = parts.take<std::int64_t>(depth * shape.max_tokens);
  step_.row_slots = parts.take<std::int64_t>(depth * shape.max_rows);
  step_.row_starts = parts.take<std::int64_t>(depth * shape.max_rows);
  step_.row_counts = parts.take<std::int64_t>(depth * shape.max_rows);
  step_.row_offsets = parts.take<std::int64_t>(depth * shape.max_rows);
  step_.row_adapters = parts.take<std::int64_t>(depth * shape.max_rows);
  step_.output_tokens = parts.take<std::int64_t>(depth * shape.max_outputs);
  table_ = parts.take<std::int32_t>(depth * shape.tables * shape.slots * shape.table_stride);
  items_ = parts.take<std::int32_t>(depth * kItemInts);
  payload_ = parts.take<char>(depth * shape.payload_bytes);
  rotated_ = parts.take<char>(shape.max_tokens * shape.rotated_row_bytes);
  sums_ = parts.take<float>(2 * shape.ranks * shape.max_tokens * shape.sums_width);
  gathered_ = parts.take<char>(2 * shape.max_tokens * shape.gathered_row_bytes);
  expert_rows_ = parts.take<char>(shape.max_tokens * shape.experts_row_bytes);
  staging_ = parts.take<char>(shape.staging_bytes);
  logits_ = parts.take<char>(shape.max_outputs * shape.logits_row_bytes);
  kv_ = parts.take<char>(shape.kv_copies * shape.kv_bytes);
  queries_ = parts.take<char>(shape.kv_copies * shape.max_tokens * shape.query_row_bytes);
  partials_ = parts.take<float>(shape.kv_copies * shape.partial_floats);
  step_.block_table = table_;
  step_.block_table_stride = shape.table_stride;
  step_.block_table_group_stride = shape.slots * shape.table_stride;
}

void Ranks::wait_for_all() {
  for (index_t other = 1; other < shape_.ranks; ++other) lines_[other].done.wait_for(sent_, spins_);
}

Step Ranks::step_at(index_t place) const {
  Step step = step_;
  step.token_ids += place * shape_.max_tokens, step.positions += place * shape_.max_tokens;
  step.row_slots += place * shape_.max_rows, step.row_starts += place * shape_.max_rows;
  step.row_counts += place * shape_.max_rows, step.row_offsets += place * shape_.max_rows;
  step.row_adapters += place * shape_.max_rows, step.output_tokens += place * shape_.max_outputs;
  step.block_table += place * shape_.tables * shape_.slots * shape_.table_stride;
  return step;
}

void Ranks::make_room() {
  const std::uint32_t turn = sent_ + 1 - std::uint32_t(shape_.depth);
  for (index_t other = 1; other < shape_.ranks; ++other) lines_[other].done.wait_for(turn, spins_);
}

void Ranks::send(const Order& order, const Step* step) {
  make_room();
  Order& sent = orders_[place()];
  sent = order;
  if (step != nullptr) {
    const Step mine = step_at(place());
    std::int32_t* const tables = const_cast<std::int32_t*>(mine.block_table);
    const Step& s = *step;
    QT_REQUIRE(s.num_tokens <= shape_.max_tokens && s.num_rows <= shape_.max_rows && s.num_outputs <= shape_.max_outputs,
               "%lld tokens, %lld rows, %lld outputs", (long long)s.num_tokens, (long long)s.num_rows, (long long)s.num_outputs);
    sent.num_tokens = s.num_tokens, sent.num_rows = s.num_rows, sent.num_outputs = s.num_outputs;
    copy(mine.token_ids, s.token_ids, s.num_tokens);
    copy(mine.positions, s.positions, s.num_tokens);
    copy(mine.row_slots, s.row_slots, s.num_rows);
    copy(mine.row_starts, s.row_starts, s.num_rows);
    copy(mine.row_counts, s.row_counts, s.num_rows);
    copy(mine.row_offsets, s.row_offsets, s.num_rows);
    if (shape_.adapters > 0) copy(mine.row_adapters, s.row_adapters, s.num_rows);
    copy(mine.output_tokens, s.output_tokens, s.num_outputs);
    for (index_t row = 0; row < s.num_rows; ++row) {
      const index_t slot = s.row_slots[row], entries = table_entries(s.row_starts[row] + s.row_counts[row]);
      for (index_t table = 0; table < shape_.tables; ++table)
        copy(tables + table * step_.block_table_group_stride + slot * step_.block_table_stride,
             s.block_table + table * s.block_table_group_stride + slot * s.block_table_stride, entries);
    }
  }
  head_->sent.reach(++sent_);
}

Order Ranks::receive(Step& step) {
  head_->sent.wait_for(++sent_, spins_);
  const Order order = orders_[place()];
  const Rotation* const rotations = step.rotations;
  step = step_at(place());
  step.rotations = rotations;
  step.num_tokens = order.num_tokens, step.num_rows = order.num_rows, step.num_outputs = order.num_outputs;
  return order;
}

index_t Ranks::table_entries(index_t tokens) const {
  return std::max(kStateEntries, (tokens + shape_.block_size - 1) / shape_.block_size);
}

void Ranks::done() { lines_[rank_].done.reach(sent_); }

void Ranks::done_with(std::uint32_t orders) { lines_[rank_].done.reach(orders + 1); }

void Ranks::wait_for_done(std::uint32_t orders) {
  for (index_t other = 1; other < shape_.ranks; ++other) lines_[other].done.wait_for(orders + 1, spins_);
}

void Ranks::wait_for_sent(std::uint32_t orders) { head_->sent.wait_for(orders + 1, spins_); }

void Ranks::note(Note which, std::uint64_t value) { lines_[rank_].notes[index_t(which)].store(value); }

std::uint64_t Ranks::noted(Note which) const {
  std::uint64_t sum = 0;
  for (index_t other = 0; other < shape_.ranks; ++other)
    if (other != rank_) sum += lines_[other].notes[index_t(which)].load();
  return sum;
}

void Ranks::barrier(const Left& left) {
  const std::uint32_t turn = lines_[rank_].barrier.value.load(std::memory_order_relaxed) + 1;
  lines_[rank_].left[turn % 2] = left;
  lines_[rank_].barrier.reach(turn);
  for (index_t other = 0; other < shape_.ranks; ++other)
    if (other != rank_) lines_[other].barrier.wait_for(turn, spins_);
}

void Ranks::wait_for_barrier(index_t begin, index_t end, std::uint32_t count) {
  for (index_t rank = begin; rank < end; ++rank) lines_[rank].barrier.wait_for(count, spins_);
}

void Ranks::reach_barrier(std::uint32_t count) { lines_[rank_].barrier.reach(count); }

Left Ranks::left(std::uint32_t barrier) const { return lines_[rank_].left[barrier % 2]; }

index_t Ranks::offset_of(const void* place) const {
  return static_cast<const char*>(place) - reinterpret_cast<const char*>(head_);
}

float* Ranks::sums(index_t turn, index_t rank) const {
  return sums_ + (turn * shape_.ranks + rank) * shape_.max_tokens * shape_.sums_width;
}

}  // namespace qt

// Returns the bytes of zeroed memory that the ranks share.
QT_EXPORT index_t qt_ranks_bytes(const qt::RanksShape* shape) { return qt::Ranks::bytes(*shape); }

// Creates one rank's view of the shared memory, which the caller owns. spins: pauses of a wait before it sleeps.
QT_EXPORT qt::Ranks* qt_ranks_new(const qt::RanksShape* shape, void* memory, index_t rank, int spins) {
  return new qt::Ranks(*shape, memory, rank, spins);
}

// Rank 0: sends an order; see qt::Ranks::send. step: of an order of kind kRun; null for other kinds.
QT_EXPORT void qt_ranks_send(qt::Ranks* ranks, const qt::Order* order, const qt::Step* step) { ranks->send(*order, step); }

QT_EXPORT void qt_ranks_receive(qt::Ranks* ranks, qt::Order* order, qt::Step* step) { *order = ranks->receive(*step); }

QT_EXPORT void qt_ranks_done(qt::Ranks* ranks) { ranks->done(); }

QT_EXPORT void qt_ranks_done_with(qt::Ranks* ranks, index_t orders) { ranks->done_with(std::uint32_t(orders)); }

QT_EXPORT void qt_ranks_wait_for_done(qt::Ranks* ranks, index_t orders) { ranks->wait_for_done(std::uint32_t(orders)); }

QT_EXPORT void qt_ranks_wait_for_all(qt::Ranks* ranks) { ranks->wait_for_all(); }

// Addresses in the shared memory: logits of all ranks; rotary tables of the step's tokens; an order's items, of kItemInts
// integers.
QT_EXPORT void* qt_ranks_logits(qt::Ranks* ranks) { return ranks->logits(); }

QT_EXPORT void* qt_ranks_rotated(qt::Ranks* ranks) { return ranks->rotated(); }

QT_EXPORT std::int32_t* qt_ranks_items(qt::Ranks* ranks) { return ranks->items(); }

// Returns a KV memory that several ranks share.
QT_EXPORT char* qt_ranks_kv(qt::Ranks* ranks, index_t copy) {
  QT_REQUIRE(copy >= 0 && copy < ranks->shape().kv_copies, "KV memory %lld of %lld", (long long)copy,
             (long long)ranks->shape().kv_copies);
  return ranks->kv(copy);
}

// Returns the queries of all heads over this KV memory, in rows of `bytes`.
QT_EXPORT char* qt_ranks_queries(qt::Ranks* ranks, index_t copy, index_t bytes) {
  QT_REQUIRE(copy >= 0 && copy < ranks->shape().kv_copies && bytes > 0 && bytes <= ranks->shape().query_row_bytes,
             "KV memory %lld of %lld, rows of %lld bytes", (long long)copy, (long long)ranks->shape().kv_copies, (long long)bytes);
  return ranks->queries(copy);
}

QT_EXPORT char* qt_ranks_staging(qt::Ranks* ranks) { return ranks->staging(); }

QT_EXPORT void qt_ranks_barrier(qt::Ranks* ranks) { ranks->barrier(); }

// See qt::Ranks; for the process that forwards orders between machines.
QT_EXPORT void qt_ranks_wait_for_barrier(qt::Ranks* ranks, index_t begin, index_t end, index_t count) {
  ranks->wait_for_barrier(begin, end, std::uint32_t(count));
}

QT_EXPORT void qt_ranks_reach_barrier(qt::Ranks* ranks, index_t count) { ranks->reach_barrier(std::uint32_t(count)); }

QT_EXPORT void qt_ranks_left(const qt::Ranks* ranks, index_t barrier, qt::Left* left) {
  *left = ranks->left(std::uint32_t(barrier));
}

QT_EXPORT char* qt_ranks_payload(qt::Ranks* ranks) { return ranks->payload(); }

QT_EXPORT void qt_ranks_make_room(qt::Ranks* ranks) { ranks->make_room(); }

QT_EXPORT void qt_ranks_wait_for_sent(qt::Ranks* ranks, index_t orders) { ranks->wait_for_sent(std::uint32_t(orders)); }

QT_EXPORT void qt_ranks_note(qt::Ranks* ranks, index_t which, std::uint64_t value) { ranks->note(qt::Note(which), value); }

QT_EXPORT std::uint64_t qt_ranks_noted(qt::Ranks* ranks, index_t which) { return ranks->noted(qt::Note(which)); }

QT_EXPORT index_t qt_ranks_item_ints() { return qt::kItemInts; }

// Size in bytes of the structs with a Python layout.
QT_EXPORT index_t qt_ranks_shape_bytes() { return sizeof(qt::RanksShape); }

QT_EXPORT index_t qt_ranks_left_bytes() { return sizeof(qt::Left); }

QT_EXPORT index_t qt_ranks_order_bytes() { return sizeof(qt::Order); }
