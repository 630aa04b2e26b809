#include "pool.hpp"

#include <algorithm>
#include <memory>
#include <queue>

#include "cores.hpp"

namespace qt {
namespace {

constexpr int kMostSpins = 4000;  // pauses of 10 to 50 ns each: 64 threads need about as long to sleep and wake
// About the longest wait between two works of a step on few threads. A sleeping thread does not measure a spin; after the long
// waits of a prefill, this minimum lets it detect short waits again.
constexpr int kFewestSpins = 400;
constexpr index_t kShare = 2;  // a take is at most 1 / kShare of a thread's share of the remaining pieces
constexpr index_t kAheadBytes = 128 << 10;  // prefetch limit of a waiting thread: half of a small L2 cache
constexpr index_t kLine = 64, kLinesAtOnce = 4;

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Number of pieces done since the process started. Each thread counts on its own cache line. Any thread may read the counts at
// any time, even while qt_set_threads replaces the pool.
struct alignas(64) Count {
  std::atomic<std::uint64_t> value{0};
};

constexpr int kCounts = 256;  // threads with a higher index share cache lines
Count counts[kCounts];

void count_piece(int thread) { counts[thread % kCounts].value.fetch_add(1, std::memory_order_relaxed); }

index_t least(index_t a, index_t b) { return a < b ? a : b; }

// Number of pieces of one take when `left` pieces remain.
index_t size_of_piece(const Work& work, index_t left, index_t threads) {
  const index_t size = least(left / (threads * kShare), work.grain);
  return size < 1 ? 1 : size;
}

// Waits until `done(word)` is true; the thread that changes the word notifies. Spins for about twice its recent waits, then
// sleeps. It counts as one wait, even if the value changes several times.
template <class Value, class Done, class SpinLimit>
void wait_until(const std::atomic<Value>& word, Done done, SpinLimit& spin_limit) {
  const int most = std::clamp(2 * spin_limit.usual, std::min(kFewestSpins, spin_limit.most), spin_limit.most);
  for (int spin = 0; spin < most; ++spin) {
    if (done(word.load(std::memory_order_acquire))) {
      spin_limit.usual += (spin - spin_limit.usual) / 8;
      return;
    }
    pause();
  }
  spin_limit.usual -= spin_limit.usual / 4;
  for (Value now; !done(now = word.load(std::memory_order_acquire));) word.wait(now, std::memory_order_acquire);
}

}  // namespace

Pool::Pool(int threads, bool pin) {
  const std::vector<int>& usable = usable_processors();
  if (int(usable.size()) >= threads) {
    most_spins_ = kMostSpins;
    if (pin) processors_ = in_order_of_cores(usable, "/sys");
  }
  callers_spin_limit_ = new_spin_limit();
  if (!processors_.empty()) stay_on(processors_[0]);
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
  stopping_ = true;
  run_.fetch_add(1);
  run_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

template <class Value>
void Pool::wait_while(const std::atomic<Value>& word, Value value, SpinLimit& spin_limit) {
  wait_until(word, [value](Value now) { return now != value; }, spin_limit);
}

void Pool::run(const Work* list, index_t count) {
  run_lasting(list, count);
  // A thread that was suspended while it looked ahead may not have noticed the end yet.
  if (std::any_of(list, list + count, [](const Work& work) { return work.region || work.late; })) settle();
}

void Pool::settle() {
  const std::lock_guard<std::mutex> only(callers_);
  close();
}

void Pool::close() {
  open_.store(false);
  while (inside_.load() != 0) std::this_thread::yield();  // late threads of the previous run; they find no work
}

void Pool::run_lasting(const Work* list, index_t count) {
  if (workers_.empty()) {
    for (index_t i = 0; i < count; ++i) {
      const Work& work = list[i].late ? *list[i].late : list[i];
      for (index_t begin = 0, end; begin < work.count; begin = end) {
        end = least(begin + work.grain, work.count);
        work.run(work.call, begin, end);
        count_piece(0);
      }
    }
    return;
  }
  const std::lock_guard<std::mutex> only(callers_);
  close();
  list_.assign(list, list + count);
  length_ = count;
  if (index_t(progress_.size()) < count) progress_ = std::vector<Progress>(count);
  const std::uint32_t run = run_.load(std::memory_order_relaxed) + 1;
  for (index_t i = 0; i < count; ++i)
    if (!list[i].late) begin(progress_[i], run, list[i]);
  open_.store(true);
  run_.store(run);
  run_.notify_all();
  go_through(run, 0, callers_spin_limit_);
}

void Pool::begin(Progress& progress, std::uint32_t run, const Work& work) const {
  progress.work = work;
  const index_t first = size_of_piece(work, work.count, threads());
  const index_t firsts = least(least(threads(), kMostFirsts) * first, work.count);
  progress.taken.store(std::uint64_t(run) << 32 | std::uint64_t(firsts), std::memory_order_relaxed);
  for (auto& bits : progress.firsts) bits.store(0, std::memory_order_relaxed);
  progress.left.store(std::uint32_t(work.count), std::memory_order_relaxed);
}

void Pool::work(int thread) {
  if (!processors_.empty()) stay_on(processors_[thread]);
  SpinLimit between_runs = new_spin_limit(), in_run = new_spin_limit();
  std::uint32_t seen = 0;
  while (true) {
    wait_while(run_, seen, between_runs);
    seen = run_.load();
    if (stopping_) return;
    inside_.fetch_add(1);
    if (open_.load() && run_.load() == seen) go_through(seen, thread, in_run);
    inside_.fetch_sub(1);
  }
}

void Pool::go_through(std::uint32_t run, int thread, SpinLimit& spin_limit) {
  Ahead ahead;
  for (index_t i = 0; i < length_; ++i) {
    Progress& progress = progress_[i];
    const Work& work = progress.work;
    index_t begin, end;
    while (take(progress, run, work, thread, begin, end)) {
      work.run(work.call, begin, end);
      count_piece(thread);
      // The work before a late work has one piece. No thread passes it before this piece is done, so its thread starts the late
      // works here.
      for (index_t j = i + 1; !list_[i].late && j < length_ && list_[j].late; ++j)
        this->begin(progress_[j], run, *list_[j].late);
      const std::uint32_t done = std::uint32_t(end - begin);
      if (progress.left.fetch_sub(done, std::memory_order_acq_rel) == done) progress.left.notify_all();
    }
    if (progress.left.load(std::memory_order_acquire) == 0) continue;
    look_ahead(ahead, i, thread);
    wait_for(progress, ahead, spin_limit);
  }
}

bool Pool::take(Progress& progress, std::uint32_t run, const Work& work, int thread, index_t& begin, index_t& end) const {
  const index_t first = size_of_piece(work, work.count, threads());
  const auto take_first_of = [&](int owner) {
    begin = owner * first, end = least(begin + first, work.count);
    const std::uint64_t bit = std::uint64_t(1) << owner % 64;
    std::atomic<std::uint64_t>& bits = progress.firsts[owner / 64];
    if (begin >= work.count || bits.load(std::memory_order_relaxed) & bit) return false;
    return !(bits.fetch_or(bit, std::memory_order_relaxed) & bit);
  };
  std::uint64_t taken = progress.taken.load(std::memory_order_relaxed);
  if (std::uint32_t(taken >> 32) != run) return false;
  if (thread < kMostFirsts && take_first_of(thread)) return true;
  while (true) {
    begin = index_t(taken & 0xFFFFFFFFu);
    if (begin >= work.count) break;
    end = begin + size_of_piece(work, work.count - begin, threads());
    const std::uint64_t next = (std::uint64_t(run) << 32) | std::uint64_t(end);
    if (progress.taken.compare_exchange_weak(taken, next, std::memory_order_relaxed)) return true;
  }
  for (int owner = 0; owner < least(threads(), kMostFirsts); ++owner)  // first pieces of threads that have not arrived
    if (take_first_of(owner)) return true;
  return false;
}

// Finds the next work after `after` with a read region, and the first pieces of this thread in it.
void Pool::look_ahead(Ahead& ahead, index_t after, int thread) const {
  index_t next = after + 1;
  bool late_known = list_[after].late != nullptr;  // true while all late works up to `next` are described
  for (; next < length_; ++next) {
    late_known = late_known && list_[next].late != nullptr;
    if (list_[next].late && !late_known) {
      ahead = {};
      return;
    }
    if (progress_[next].work.region != nullptr && progress_[next].work.count != 0) break;
  }
  if (next == ahead.work) return;
  ahead = {.work = next};
  if (next >= length_ || thread >= kMostFirsts) return;
  const Work& work = progress_[next].work;
  const index_t first = size_of_piece(work, work.count, threads());
  ahead.piece = thread * first, ahead.pieces_end = least(ahead.piece + first, work.count);
  ahead.bytes = kAheadBytes;
}

void Pool::wait_for(Progress& progress, Ahead& ahead, SpinLimit& spin_limit) const {
  while (ahead.bytes > 0) {
    if (progress.left.load(std::memory_order_acquire) == 0) return;
    if (ahead.left.lines == 0) {
      if (ahead.piece >= ahead.pieces_end) break;
      const Work& work = progress_[ahead.work].work;
      ahead.left = work.region(work.call, ahead.piece++);
    }
    for (index_t line = 0; line < kLinesAtOnce && ahead.left.lines > 0; ++line) {
      __builtin_prefetch(ahead.left.memory + ahead.at, 0, 2);
      ahead.at += kLine, ahead.bytes -= kLine;
      if (ahead.at >= ahead.left.bytes) ahead.left.memory += ahead.left.stride, --ahead.left.lines, ahead.at = 0;
    }
  }
  wait_until(progress.left, [](std::uint32_t left) { return left == 0; }, spin_limit);
}

Balance balance_of(const Work& work, index_t threads) {
  Balance balance;
  using Thread = std::pair<index_t, index_t>;  // time at which it is free; its index
  std::priority_queue<Thread, std::vector<Thread>, std::greater<>> free;
  for (index_t thread = 0; thread < threads; ++thread) free.push({0, thread});
  for (index_t begin = 0, end; begin < work.count; begin = end, ++balance.takes) {
    // The first take of each thread is its fixed one. Together these equal consecutive takes of that size.
    const index_t left = balance.takes < threads ? work.count : work.count - begin;
    end = threads == 1 ? least(begin + work.grain, work.count)
                       : least(begin + size_of_piece(work, left, threads), work.count);
    index_t cost = 0;
    for (index_t piece = begin; piece < end; ++piece) cost += work.cost ? work.cost(work.call, piece) : work.each_cost;
    const auto [since, thread] = free.top();
    free.pop();
    free.push({since + cost, thread});
    balance.cost += cost;
    balance.busiest = std::max(balance.busiest, since + cost);
  }
  return balance;
}

namespace {
std::unique_ptr<Pool>& the_pool() {
  static std::unique_ptr<Pool> pool = std::make_unique<Pool>(1, false);
  return pool;
}
}  // namespace

Pool& pool() { return *the_pool(); }

std::uint64_t pieces_done() {
  std::uint64_t sum = 0;
  for (const Count& count : counts) sum += count.value.load(std::memory_order_relaxed);
  return sum;
}

}  // namespace qt

// Replaces the pool; no work may be running. pin: pin threads to processors. Returns the number of threads.
QT_EXPORT int qt_set_threads(int threads, int pin) {
  qt::the_pool() = std::make_unique<qt::Pool>(threads < 1 ? 1 : threads, pin != 0);
  return qt::pool().threads();
}

QT_EXPORT int qt_threads() { return qt::pool().threads(); }

// Returns the number of pieces done since the process started. A watchdog reads it from any thread: it grows while a step
// computes.
QT_EXPORT std::uint64_t qt_pieces_done() { return qt::pieces_done(); }
