// The compute threads: they run one list of work after another, and park when there is none.
//
// A list is run like a captured graph: every thread goes through it in order and takes pieces of the current work until
// there are none, then waits until all of them are done. No thread has to arrive: when another process takes a thread's
// core, the others do its share, and it catches up when it comes back. The first piece that a thread takes is always the
// same (unless it comes so late that another has done it); the further ones are whatever is left, smaller towards the end,
// so that all are done at nearly the same time.
//
// Works that are late (work.hpp) are begun by the thread that has just found out what they are, before anybody passes it.
//
// Waiting is a short spin, then a futex. How short each thread learns: about twice as long as its waits have taken lately, so
// that the end of a work is met awake on 64 threads as on two, while a thread with long waits sleeps soon. No thread spins
// where there are more threads than processors: a spinning thread would delay a working one. While it waits a thread fetches what
// its first piece of a coming work reads: memory is what limits a step of few rows, and it should not stand still while rows are
// normed.
#pragma once

#include <atomic>
#include <mutex>
#include <thread>
#include <vector>

#include "work.hpp"

namespace qt {

class Pool {
 public:
  // threads: how many compute, the caller of run() included. pin: each stays on one of the processors that the process may
  // use, each on a core of its own as long as there are cores.
  Pool(int threads, bool pin);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return int(workers_.size()) + 1; }

  // Returns when all the work is done; `list` is copied. One caller at a time; others wait.
  void run(const Work* list, index_t count);

 private:
  static constexpr index_t kMostFirsts = 256;  // threads that have a first piece of their own

  // Progress through one work of the list. `taken` carries the run's number in its upper half, so that a thread that is
  // a run late takes nothing.
  struct Progress {
    alignas(64) std::atomic<std::uint64_t> taken{0};    // pieces before this are taken, but for threads' first ones
    std::atomic<std::uint64_t> firsts[kMostFirsts / 64]{};  // a bit for each thread with its first pieces taken
    alignas(64) std::atomic<std::uint32_t> left{0};     // on a line of its own: waiting threads read it all the time
    alignas(64) Work work;                              // a late one's once it is known; kept for a work that is late itself
  };

  // How long a thread spins before it sleeps, learned from how long it has waited.
  struct SpinLimit {
    int usual = 0;  // spins that waits have taken lately
    int most = 0;   // 0: never spins
  };

  // How far a thread has fetched what it will take first of a coming work.
  struct Ahead {
    index_t work = -1, piece = 0, pieces_end = 0;
    Region left{};
    index_t at = 0, bytes = 0;  // in the first line of what is left of the piece; that may still be fetched
  };

  void work(int thread);
  void go_through(std::uint32_t run, int thread, SpinLimit& spin_limit);
  // Before any thread takes of it: nothing is done of a work with known pieces.
  void begin(Progress& progress, std::uint32_t run, const Work& work) const;
  bool take(Progress& progress, std::uint32_t run, const Work& work, int thread, index_t& begin, index_t& end) const;
  void look_ahead(Ahead& ahead, index_t after, int thread) const;
  void wait_for(Progress& progress, Ahead& ahead, SpinLimit& spin_limit) const;
  template <class Value>
  static void wait_while(const std::atomic<Value>& word, Value value, SpinLimit& spin_limit);
  SpinLimit new_spin_limit() const { return {.usual = most_spins_ / 8, .most = most_spins_}; }

  std::vector<std::thread> workers_;
  std::vector<int> processors_;  // where threads stay; empty: anywhere
  int most_spins_ = 0;
  SpinLimit callers_spin_limit_;  // of the caller of run()
  std::mutex callers_;
  std::vector<Work> list_;  // this and the next two change only while no worker is inside
  std::vector<Progress> progress_;
  index_t length_ = 0;
  std::atomic<std::uint32_t> run_{0};   // the current run's number; changes wake the workers
  std::atomic<int> inside_{0};          // workers that may read what is above
  std::atomic<bool> open_{false};       // whether workers may still enter the current run
  std::atomic<bool> stopping_{false};
};

// What the threads of a pool of that size would have of a work, were all equally fast.
struct Balance {
  index_t cost = 0, busiest = 0;  // of all pieces; of the thread that has most
  index_t takes = 0;              // number of times that pieces are taken
};
Balance balance_of(const Work& work, index_t threads);

// The process's pool; made by the first call of qt_set_threads, or with one thread.
Pool& pool();

// Pieces of work that all threads have done since the process began; readable while they compute.
std::uint64_t pieces_done();

}  // namespace qt
