// Thread pool: runs lists of Work, one list at a time. Its threads sleep between lists.
//
// Every thread traverses the list in order. It takes pieces of the current work until none is left, then waits until all pieces
// are done. A thread that has lost its core to another process blocks no other thread: the others take its pieces, and it
// catches up later. The first take of a thread is always the same range of pieces, unless another thread has done it already.
// Later takes are dynamic and shrink towards the end, so that all threads finish at nearly the same time.
//
// Late works (work.hpp): the thread that finishes the piece describing them also starts them, before any thread can reach them.
//
// A wait is a short spin, then a futex. Each thread adapts its spin limit: about twice its recent waits. So threads are awake
// at the end of a work, on two threads as on 64, and a thread with long waits sleeps soon. No thread spins if there are more
// threads than processors, since a spin would delay a working thread. A waiting thread prefetches the memory of its first piece
// of a coming work: memory bandwidth limits a step of few rows, and norms leave it idle.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "work.hpp"

namespace qt {

class Pool {
 public:
  // threads: number of compute threads, the caller of run() included. pin: each thread is pinned to a processor of the
  // process's affinity mask, on a core of its own while there are enough cores.
  Pool(int threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Returns when all work is done; `list` is copied. One caller at a time; concurrent callers block. No thread reads a call of
  // the list afterwards.
  void run(const Work* list, index_t count);
  // The same, but threads may call Work::region until settle() or the next run.
  void run_lasting(const Work* list, index_t count);
  // Returns when no thread reads a call of earlier lists.
  void settle();

 private:
  static constexpr index_t kMostFirsts = 256;  // threads with a fixed first take

  // Progress of one work of the list. The upper half of `taken` is the run's number, so that a thread of an earlier run takes
  // no piece.
  struct Progress {
    alignas(64) std::atomic<std::uint64_t> taken{0};    // pieces below this index are taken, except the fixed first takes
    std::atomic<std::uint64_t> firsts[kMostFirsts / 64]{};  // one bit per thread: its first take is done
    alignas(64) std::atomic<std::uint32_t> left{0};     // pieces not done; on its own cache line, because waiting threads poll
                                                        // it
    alignas(64) Work work;                              // of a late work: its description once it is known
  };

  // Spin limit of a thread before it sleeps, adapted to its recent waits.
  struct SpinLimit {
    int usual = 0;  // spins of recent waits
    int most = 0;   // 0: never spins
  };

  // Prefetch state of a thread in its first take of a coming work.
  struct Ahead {
    index_t work = -1, piece = 0, pieces_end = 0;
    Region left{};
    index_t at = 0, bytes = 0;  // offset in the first remaining line of the piece; bytes that may still be prefetched
  };

  void close();  // by the caller that holds `callers_`: no thread reads the last list any more, and none may enter
  void work(int thread);
  void go_through(std::uint32_t run, int thread, SpinLimit& spin_limit);
  // Initializes the progress of a described work, before any thread takes a piece of it.
  void begin(Progress& progress, std::uint32_t run, const Work& work) const;
  bool take(Progress& progress, std::uint32_t run, const Work& work, int thread, index_t& begin, index_t& end) const;
  void look_ahead(Ahead& ahead, index_t after, int thread) const;
  void wait_for(Progress& progress, Ahead& ahead, SpinLimit& spin_limit) const;
  template <class Value>
  static void wait_while(const std::atomic<Value>& word, Value value, SpinLimit& spin_limit);
  SpinLimit new_spin_limit() const { return {.usual = most_spins_ / 8, .most = most_spins_}; }

  std::vector<std::thread> workers_;
  std::vector<int> processors_;  // processor of each thread; empty: not pinned
  int most_spins_ = 0;
  SpinLimit callers_spin_limit_;  // of the caller of run()
  std::mutex callers_;
  std::vector<Work> list_;  // this and the next two change only while `inside_` is 0
  std::vector<Progress> progress_;
  index_t length_ = 0;
  std::atomic<std::uint32_t> run_{0};   // the current run's number; a change wakes the workers
  std::atomic<int> inside_{0};          // workers that may read the fields above
  std::atomic<bool> open_{false};       // whether workers may still enter the current run
  std::atomic<bool> stopping_{false};
};

// Simulated load of a pool of `threads` equally fast threads for one work.
struct Balance {
  index_t cost = 0, busiest = 0;  // of all pieces; of the busiest thread
  index_t takes = 0;              // number of takes
};
Balance balance_of(const Work& work, index_t threads);

// Returns the process's pool, created by the first qt_set_threads, or else with one thread.
Pool& pool();

// Number of pieces done by all threads since the process started; readable while they compute.
std::uint64_t pieces_done();

}  // namespace qt
