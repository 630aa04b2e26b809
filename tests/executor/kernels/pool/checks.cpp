// Internals of the thread pool of csrc/cpu, for test_thread_pool.py: spins before a thread sleeps, and counts of tasks.
#include "pool.cpp"

namespace {

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

// Write the distance in bytes between two threads' counters, and the offset of the first one in its cache line.
extern "C" void counter_layout(int* out) {
  out[0] = int(reinterpret_cast<char*>(&qt::counts[1]) - reinterpret_cast<char*>(&qt::counts[0]));
  out[1] = int(reinterpret_cast<std::uintptr_t>(&qt::counts[0]) % 64);
}
