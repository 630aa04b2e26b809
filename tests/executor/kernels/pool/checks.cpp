// What the pool of csrc/cpu keeps to itself, for test_pool.py: how long a thread spins before it sleeps, and what threads count.
#include "pool.cpp"

namespace {

struct Patience {
  int usual, most;
};

// Spins of a wait that ends after so many of them; or that are spent before it sleeps, if that is sooner: patience is 4 or more.
int spins_of(Patience& patience, int ends_after) {
  const std::atomic<int> word{0};
  const int before = patience.usual;
  int looks = 0;
  // Who is about to sleep has lost some patience, and finds then that the wait is over.
  qt::wait_until(word, [&](int) { return looks++ == ends_after || patience.usual != before; }, patience);
  return looks - 1;
}

}  // namespace

// Spins before sleep at first; after many waits of `spins`; after `endless` more that had no end.
extern "C" void learn(int most, int spins, int endless, int* out) {
  constexpr int kForEver = 1 << 30;
  Patience patience{most / 8, most};
  const auto before_sleep = [&] {
    Patience copy = patience;
    return spins_of(copy, kForEver);
  };
  out[0] = before_sleep();
  for (int i = 0; i < 100; ++i) spins_of(patience, spins);
  out[1] = before_sleep();
  for (int i = 0; i < endless; ++i) spins_of(patience, kForEver);
  out[2] = before_sleep();
}

// How many pieces threads say that they have done, of 20 works of `count` that are taken one by one.
extern "C" std::uint64_t counted(int threads, index_t count) {
  qt::Pool pool(threads, false);
  const std::uint64_t before = qt::pieces_done();
  const qt::Work work{count, 1, [](const void*, index_t, index_t) {}};
  for (int i = 0; i < 20; ++i) pool.run(&work, 1);
  return qt::pieces_done() - before;
}

// Bytes from one thread's count to the next one's, and from a line's beginning to the first.
extern "C" void lie(int* out) {
  out[0] = int(reinterpret_cast<char*>(&qt::counts[1]) - reinterpret_cast<char*>(&qt::counts[0]));
  out[1] = int(reinterpret_cast<std::uintptr_t>(&qt::counts[0]) % 64);
}
