#include "pool.hpp"

#include <memory>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace qt {
namespace {

constexpr int kSpins = 400;  // pauses of some 10 to 50 ns: about the longest wait between two works of a step

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

template <class Value>
void wait_while(const std::atomic<Value>& word, Value value) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (word.load(std::memory_order_acquire) != value) return;
    pause();
  }
  word.wait(value, std::memory_order_acquire);
}

// Pieces of work done since the process began. Each thread counts on a cache line of its own; who reads them does so at any
// time, even while the pool is made anew.
struct alignas(64) Count {
  std::atomic<std::uint64_t> value{0};
};

constexpr int kCounts = 64;
Count counts[kCounts];

void count_piece(int thread) { counts[thread % kCounts].value.fetch_add(1, std::memory_order_relaxed); }

index_t end_of(const Work& work, index_t begin) {
  return begin + work.grain < work.count ? begin + work.grain : work.count;
}

#if defined(__linux__)
// The cores that this process may use, in order.
std::vector<int> usable_cores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (sched_getaffinity(0, sizeof set, &set) == 0)
    for (int core = 0; core < CPU_SETSIZE; ++core)
      if (CPU_ISSET(core, &set)) cores.push_back(core);
  return cores;
}

void stay_on(pthread_t thread, int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  pthread_setaffinity_np(thread, sizeof set, &set);
}
#endif

}  // namespace

Pool::Pool(int threads, bool pin) {
  for (int i = 1; i < threads; ++i) workers_.emplace_back([this, i] { work(i); });
#if defined(__linux__)
  if (pin) {
    const std::vector<int> cores = usable_cores();
    if (int(cores.size()) >= threads) {
      stay_on(pthread_self(), cores[0]);
      for (int i = 1; i < threads; ++i) stay_on(workers_[i - 1].native_handle(), cores[i]);
    }
  }
#else
  (void)pin;
#endif
}

Pool::~Pool() {
  stopping_ = true;
  run_.fetch_add(1);
  run_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void Pool::run(const Work* list, index_t count) {
  if (workers_.empty()) {
    for (index_t i = 0; i < count; ++i)
      for (index_t begin = 0, end; begin < list[i].count; begin = end) {
        end = end_of(list[i], begin);
        list[i].run(list[i].call, begin, end);
        count_piece(0);
      }
    return;
  }
  const std::lock_guard<std::mutex> only(callers_);
  open_.store(false);
  while (inside_.load() != 0) std::this_thread::yield();  // stragglers of the last run, which find nothing to do there
  list_.assign(list, list + count);
  length_ = count;
  if (index_t(progress_.size()) < count) progress_ = std::vector<Progress>(count);
  const std::uint32_t run = run_.load(std::memory_order_relaxed) + 1;
  for (index_t i = 0; i < count; ++i) {
    progress_[i].taken.store(std::uint64_t(run) << 32, std::memory_order_relaxed);
    progress_[i].left.store(std::uint32_t(list[i].count), std::memory_order_relaxed);
  }
  open_.store(true);
  run_.store(run);
  run_.notify_all();
  go_through(run, 0);
}

void Pool::work(int thread) {
  std::uint32_t seen = 0;
  while (true) {
    wait_while(run_, seen);
    seen = run_.load();
    if (stopping_) return;
    inside_.fetch_add(1);
    if (open_.load() && run_.load() == seen) go_through(seen, thread);
    inside_.fetch_sub(1);
  }
}

void Pool::go_through(std::uint32_t run, int thread) {
  for (index_t i = 0; i < length_; ++i) {
    Progress& progress = progress_[i];
    index_t begin, end;
    while (take(progress, run, list_[i], begin, end)) {
      list_[i].run(list_[i].call, begin, end);
      count_piece(thread);
      const std::uint32_t done = std::uint32_t(end - begin);
      if (progress.left.fetch_sub(done, std::memory_order_acq_rel) == done) progress.left.notify_all();
    }
    for (std::uint32_t left; (left = progress.left.load(std::memory_order_acquire)) != 0;) wait_while(progress.left, left);
  }
}

bool Pool::take(Progress& progress, std::uint32_t run, const Work& work, index_t& begin, index_t& end) {
  std::uint64_t taken = progress.taken.load(std::memory_order_relaxed);
  while (true) {
    begin = index_t(taken & 0xFFFFFFFFu);
    if (std::uint32_t(taken >> 32) != run || begin >= work.count) return false;
    end = end_of(work, begin);
    const std::uint64_t next = (std::uint64_t(run) << 32) | std::uint64_t(end);
    if (progress.taken.compare_exchange_weak(taken, next, std::memory_order_relaxed)) return true;
  }
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

// Makes the pool anew; nothing may be running. Returns the number of threads.
QT_EXPORT int qt_set_threads(int threads, int pin) {
  qt::the_pool() = std::make_unique<qt::Pool>(threads < 1 ? 1 : threads, pin != 0);
  return qt::pool().threads();
}

QT_EXPORT int qt_threads() { return qt::pool().threads(); }

// Grows while anything is computed: whoever wonders whether a long step makes progress reads it, from any thread.
QT_EXPORT std::uint64_t qt_pieces_done() { return qt::pieces_done(); }
