// CPU emulation of one thread block: a stack per thread; one thread runs until it waits. Implements scheduling (shuffled by a
// seed, so that a missing barrier is visible), barriers, and warp collectives. A deadlock is reported with kernel, block and
// thread.
#pragma once

#include <sys/mman.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "switch.hpp"

namespace quintet::emulation {
struct Index {
  unsigned x, y, z;
};
}  // namespace quintet::emulation

// Index variables of kernels. Exported, so that compilers do not treat them as constant across a stack switch.
extern "C" {
__attribute__((used, visibility("default"))) inline quintet::emulation::Index threadIdx, blockIdx, blockDim, gridDim;
}

namespace quintet::emulation {

constexpr int MAX_THREADS = 1024;
constexpr int LANES = 32;
constexpr size_t STACK_BYTES = 64 * 1024;
constexpr size_t PAGE_BYTES = 4096;
constexpr size_t MAX_SHARED_BYTES = 256 * 1024;
constexpr size_t CANARY_BYTES = 1024;
constexpr unsigned char GARBAGE = 0xff;  // NaN in every number format, -1 as an integer
constexpr unsigned char CANARY = 0xa5;

struct Launch {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  unsigned rank;  // 0; or from 1 on with several ranks (their kernels run in other threads): blocks in fixed order, threads
                  // shuffled
  unsigned long long seed;
};

struct Range {
  unsigned char* begin;
  size_t size;
};

// A collective of the lanes in a mask: the last lane to arrive calls `resolve` with the arguments of all.
struct Collective {
  const char* name;
  void (*resolve)(void** brought, unsigned mask);
};

struct Copy {
  unsigned char* target;
  const unsigned char* source;  // null: zeros
  unsigned group;
};

struct Thread {
  void* stack_pointer;
  Index index;
  const char* waits_for;  // null: running, ready, or returned
  bool returned;
  unsigned group;  // of asynchronous copies: number of commits so far
  std::vector<Copy> copies;
};

struct Warp {
  unsigned present;  // lanes that exist in the block
  unsigned waiting;
  unsigned masks[LANES];
  const Collective* collectives[LANES];
  void* brought[LANES];
};

struct Block {
  const char* kernel;
  void (*call)(void* function, void** arguments);
  void* function;
  void** arguments;
  unsigned long long seed, random;
  unsigned rank;
  int num_threads, num_arrived, num_returned, current;
  int ready[MAX_THREADS], ready_begin, num_ready;  // a ring
  void* outside;                                   // the launcher's stack
  char* stacks;
  unsigned char* memory;  // dynamic shared memory between two canaries
  unsigned char* shared;
  unsigned shared_bytes;
  const Range* statics;
  int num_statics;
  bool failed;
  char message[1024];
  unsigned long long num_matrix_loads, num_bank_conflicts;  // of the launch
  Thread threads[MAX_THREADS];
  Warp warps[MAX_THREADS / LANES];
};

inline Block block;

inline unsigned random_number() {  // xorshift (Marsaglia, 2003)
  block.random ^= block.random << 13;
  block.random ^= block.random >> 7;
  block.random ^= block.random << 17;
  return unsigned(block.random >> 32);
}

// Records an error; the launch has failed.
__attribute__((format(printf, 1, 0))) inline void note_failure(const char* format, va_list values) {
  const Thread& thread = block.threads[block.current];
  int used = snprintf(block.message, sizeof block.message, "%s: block (%u, %u, %u), thread (%u, %u, %u), seed %llu: ",
                      block.kernel, blockIdx.x, blockIdx.y, blockIdx.z, thread.index.x, thread.index.y, thread.index.z,
                      block.seed);
  vsnprintf(block.message + used, sizeof block.message - used, format, values);
  block.failed = true;
}

// Ends the launch with this message: no thread of the block runs again.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  va_list values;
  va_start(values, format);
  note_failure(format, values);
  va_end(values);
  void* nowhere;
  qt_switch(&nowhere, block.outside);
  __builtin_unreachable();
}

// Records an error from outside, after the threads have returned.
__attribute__((format(printf, 1, 2))) inline void report(const char* format, ...) {
  va_list values;
  va_start(values, format);
  note_failure(format, values);
  va_end(values);
}

inline void make_ready(int thread) {
  block.ready[(block.ready_begin + block.num_ready++) % MAX_THREADS] = thread;
}

[[noreturn]] inline void fail_for_ever_waiting() {
  int waiting = 0;
  for (int i = 0; i < block.num_threads; ++i)
    if (block.threads[i].waits_for) {
      if (!block.threads[block.current].waits_for) block.current = i;
      ++waiting;
    }
  const char* what = block.threads[block.current].waits_for;
  int same = 0;
  const Thread* other = nullptr;
  for (int i = 0; i < block.num_threads; ++i) {
    const char* theirs = block.threads[i].waits_for;
    if (theirs && strcmp(theirs, what) == 0) ++same;
    else if (theirs && !other) other = &block.threads[i];
  }
  char others[160] = "";
  if (other)
    snprintf(others, sizeof others, "; thread (%u, %u, %u) waits at %s", other->index.x, other->index.y, other->index.z,
             other->waits_for);
  fail("waits for ever at %s: %d of the block's %d threads wait there, %d have returned%s", what, same, block.num_threads,
       block.num_returned, others);
}

// Runs another thread; returns when this thread is ready and scheduled again.
inline void run_next() {
  if (block.num_ready == 0) fail_for_ever_waiting();
  int next = block.ready[block.ready_begin];
  block.ready_begin = (block.ready_begin + 1) % MAX_THREADS;
  --block.num_ready;
  int previous = block.current;
  if (next == previous) return;
  block.current = next;
  threadIdx = block.threads[next].index;
  qt_switch(&block.threads[previous].stack_pointer, block.threads[next].stack_pointer);
  asm volatile("" ::: "memory");
}

inline void make_all_ready() {
  int order[MAX_THREADS];
  for (int i = 0; i < block.num_threads; ++i) {
    int j = int((unsigned long long)(random_number()) * unsigned(i + 1) >> 32);
    order[i] = order[j];
    order[j] = i;
  }
  for (int i = 0; i < block.num_threads; ++i) make_ready(order[i]);
}

inline void barrier() {
  block.threads[block.current].waits_for = "__syncthreads()";
  if (++block.num_arrived == block.num_threads) {
    block.num_arrived = 0;
    for (int i = 0; i < block.num_threads; ++i) block.threads[i].waits_for = nullptr;
    make_all_ready();
  }
  run_next();
}

// Joins a collective of the lanes in `mask` with the argument `brought`; returns when it is done.
inline void together(const Collective& collective, unsigned mask, void* brought) {
  Warp& warp = block.warps[block.current / LANES];
  int lane = block.current % LANES, first = block.current - lane;
  if (!(mask >> lane & 1u)) fail("calls %s with mask 0x%08x, which does not name its own lane", collective.name, mask);
  mask &= warp.present;
  warp.masks[lane] = mask;
  warp.collectives[lane] = &collective;
  warp.brought[lane] = brought;
  warp.waiting |= 1u << lane;
  if ((warp.waiting & mask) != mask) {
    block.threads[block.current].waits_for = collective.name;
    run_next();
    return;
  }
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    int other = __builtin_ctz(rest);
    if (warp.collectives[other] != &collective || warp.masks[other] != mask)
      fail("is at %s with mask 0x%08x; lane %d of its warp is at %s with mask 0x%08x", collective.name, mask, other,
           warp.collectives[other]->name, warp.masks[other]);
  }
  if (collective.resolve) collective.resolve(warp.brought, mask);
  warp.waiting &= ~mask;
  unsigned start = random_number(), stride = start >> 8 | 1u;  // an odd stride visits every lane
  for (unsigned i = 0; i < LANES; ++i) {
    int other = int((start + stride * i) % LANES);
    if (other == lane || !(mask >> other & 1u)) continue;
    block.threads[first + other].waits_for = nullptr;
    make_ready(first + other);
  }
}

[[noreturn]] inline void thread_main() {
  block.call(block.function, block.arguments);
  Thread& thread = block.threads[block.current];
  thread.returned = true;
  if (++block.num_returned == block.num_threads) {
    void* nowhere;
    qt_switch(&nowhere, block.outside);
  }
  run_next();
  __builtin_unreachable();
}

inline bool is_shared(const void* address, size_t size) {
  auto* bytes = static_cast<const unsigned char*>(address);
  if (bytes >= block.shared && bytes + size <= block.shared + block.shared_bytes) return true;
  for (int i = 0; i < block.num_statics; ++i)
    if (bytes >= block.statics[i].begin && bytes + size <= block.statics[i].begin + block.statics[i].size) return true;
  return false;
}

// Dynamic shared memory is deliberately aligned to no more than 16 bytes.
inline void prepare_memory() {
  if (!block.memory) {
    size_t stacks_bytes = MAX_THREADS * STACK_BYTES;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    block.stacks = static_cast<char*>(mmap(nullptr, stacks_bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
    // The libraries of several ranks would exceed the process's limit of mappings.
    for (int i = 0; block.rank == 0 && i < MAX_THREADS; ++i) mprotect(block.stacks + i * STACK_BYTES, PAGE_BYTES, PROT_NONE);
    size_t bytes = MAX_SHARED_BYTES + 4 * CANARY_BYTES;
    block.memory = static_cast<unsigned char*>(mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0));
  }
  block.shared = block.memory + CANARY_BYTES + 16;
  memset(block.shared - CANARY_BYTES, CANARY, CANARY_BYTES);
  memset(block.shared, GARBAGE, block.shared_bytes);
  memset(block.shared + block.shared_bytes, CANARY, CANARY_BYTES);
  for (int i = 0; i < block.num_statics; ++i) memset(block.statics[i].begin, GARBAGE, block.statics[i].size);
}

inline void check_canaries() {
  for (size_t i = 0; i < CANARY_BYTES; ++i) {
    if (block.shared[block.shared_bytes + i] != CANARY)
      return report("a thread of the block wrote %zu bytes past its %u bytes of dynamic shared memory", i + 1,
                    block.shared_bytes);
    if (block.shared[-1 - long(i)] != CANARY)
      return report("a thread of the block wrote %zu bytes before its dynamic shared memory", i + 1);
  }
}

// Runs block `index` of the grid with fresh threads, until all return or one fails.
inline void run_block(Index index) {
  blockIdx = index;
  block.random = (block.seed + 1) * 0x9e3779b97f4a7c15ull + index.x + 0x10001ull * index.y + 0x1000003ull * index.z +
                 0x1000000007ull * block.rank;
  prepare_memory();
  block.num_arrived = block.num_returned = block.num_ready = block.ready_begin = 0;
  for (int i = 0; i < block.num_threads; ++i) {
    Thread& thread = block.threads[i];
    // Stacks start at different offsets in their pages; otherwise they would compete for the same cache lines.
    unsigned x = i % blockDim.x, y = i / blockDim.x % blockDim.y, z = i / blockDim.x / blockDim.y;
    thread.index = Index{x, y, z};
    thread.stack_pointer = prepare_stack(block.stacks + (i + 1) * STACK_BYTES - i % 64 * 192, thread_main);
    thread.waits_for = nullptr;
    thread.returned = false;
    thread.group = 0;
    thread.copies.clear();
  }
  for (int i = 0; i < block.num_threads; i += LANES) {
    int lanes = block.num_threads - i < LANES ? block.num_threads - i : LANES;
    block.warps[i / LANES].present = lanes == LANES ? ~0u : (1u << lanes) - 1u;
    block.warps[i / LANES].waiting = 0;
  }
  make_all_ready();
  block.current = block.ready[block.ready_begin++];
  --block.num_ready;
  threadIdx = block.threads[block.current].index;
  qt_switch(&block.outside, block.threads[block.current].stack_pointer);
  asm volatile("" ::: "memory");
  if (!block.failed) check_canaries();
}

}  // namespace quintet::emulation
