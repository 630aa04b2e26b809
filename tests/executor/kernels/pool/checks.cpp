// Internals of the thread pool of csrc/cpu, for test_thread_pool.py: spins before a thread sleeps, and counts of tasks.
#include <chrono>

#include "pool.cpp"

namespace {

// Arguments of a work that are freed when the run has returned.
struct Freed {
  std::atomic<bool> is_freed{false};
  std::atomic<int> late_looks{0};
};

void wait_us(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// A region takes longer than the rest of the run, as if its thread was suspended.
qt::Region slow_region(const void* call, index_t) {
  wait_us(2000);
  Freed& freed = *static_cast<Freed*>(const_cast<void*>(call));
  freed.late_looks += freed.is_freed;
  return {};
}

struct SpinLimit {
  int usual, most;
};

// Return the spins of a wait that ends after `ends_after` spins, or the spins before it sleeps if that is sooner. The limit is 4
// or more.
int spins_of(SpinLimit& limit, int ends_after) {
  const std::atomic<int> word{0};
  const int before = limit.usual;
  int looks = 0;
  // The limit decreases just before the thread sleeps; the wait then ends.
  qt::wait_until(word, [&](int) { return looks++ == ends_after || limit.usual != before; }, limit);
  return looks - 1;
}

}  // namespace

// Write the spins before sleep: at first, after many waits of `spins` spins, and after `endless` waits without end.
extern "C" void learn(int most, int spins, int endless, int* out) {
  constexpr int kEndless = 1 << 30;
  SpinLimit limit{most / 8, most};
  const auto before_sleep = [&] {
    SpinLimit copy = limit;
    return spins_of(copy, kEndless);
  };
  out[0] = before_sleep();
  for (int i = 0; i < 100; ++i) spins_of(limit, spins);
  out[1] = before_sleep();
  for (int i = 0; i < endless; ++i) spins_of(limit, kEndless);
  out[2] = before_sleep();
}

// Return the number of tasks that threads count, of 20 works of `count` tasks.
extern "C" std::uint64_t counted(int threads, index_t count) {
  qt::Pool pool(threads, false);
  const std::uint64_t before = qt::pieces_done();
  const qt::Work work{count, 1, [](const void*, index_t, index_t) {}};
  for (int i = 0; i < 20; ++i) pool.run(&work, 1);
  return qt::pieces_done() - before;
}

// Return the number of looks ahead that read their work's arguments after the run, in 20 runs of two works.
extern "C" int late_looks(int threads) {
  qt::Pool pool(threads, false);
  Freed freed[20];
  for (Freed& each : freed) {
    const qt::Work works[] = {
        {threads, 1, [](const void*, index_t begin, index_t) { wait_us(begin == 0 ? 300 : 1); }, &each},
        {threads, 1, [](const void*, index_t, index_t) {}, &each, slow_region}};
    pool.run(works, 2);
    each.is_freed = true;
  }
  pool.settle();
  int found = 0;
  for (const Freed& each : freed) found += each.late_looks;
  return found;
}

// Write the distance in bytes between two threads' counters, and the offset of the first one in its cache line.
extern "C" void counter_layout(int* out) {
  out[0] = int(reinterpret_cast<char*>(&qt::counts[1]) - reinterpret_cast<char*>(&qt::counts[0]));
  out[1] = int(reinterpret_cast<std::uintptr_t>(&qt::counts[0]) % 64);
}
