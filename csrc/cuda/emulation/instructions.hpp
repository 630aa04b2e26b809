// CPU emulation of asynchronous copies and matrix instructions, with the signatures of device.cuh. Included by device.cuh after
// the number formats.
#pragma once

#include <sched.h>
#include <time.h>

#include "block.hpp"

namespace quintet {

namespace emulation {

inline void check_aligned(const void* address, const char* what) {
  if (reinterpret_cast<uintptr_t>(address) % 16) fail("%s: address %p is not a multiple of 16", what, address);
}
inline void check_shared(const void* address, const char* what) {
  check_aligned(address, what);
  if (!is_shared(address, 16)) fail("%s: address %p is not in the block's shared memory", what, address);
}

struct Rows {
  const void* row;
  uint32_t* result;
};

// Eight rows of 16 bytes are read from shared memory together if each is in a different eighth of its 128-byte line of banks.
inline void count_conflicts(void** rows) {
  int here[8] = {}, most = 0;
  for (int i = 0; i < 8; ++i) {
    int& count = here[reinterpret_cast<uintptr_t>(static_cast<Rows*>(rows[i])->row) / 16 % 8];
    bool again = false;  // the same row again costs nothing
    for (int j = 0; j < i; ++j) again |= static_cast<Rows*>(rows[j])->row == static_cast<Rows*>(rows[i])->row;
    count += !again;
    if (count > most) most = count;
  }
  ++block.num_matrix_loads;
  block.num_bank_conflicts += most - 1;
}

inline void resolve_load_matrix(void** brought, bool transposed) {
  for (int matrix = 0; matrix < 4; ++matrix) {
    count_conflicts(brought + matrix * 8);
    uint16_t elements[8][8];
    for (int row = 0; row < 8; ++row) memcpy(elements[row], static_cast<Rows*>(brought[matrix * 8 + row])->row, 16);
    for (int lane = 0; lane < LANES; ++lane) {
      int i = lane / 4, j = lane % 4 * 2;
      uint32_t low = transposed ? elements[j][i] : elements[i][j];
      uint32_t high = transposed ? elements[j + 1][i] : elements[i][j + 1];
      static_cast<Rows*>(brought[lane])->result[matrix] = low | high << 16;
    }
  }
}
inline void resolve_load_matrix_plain(void** brought, unsigned) { resolve_load_matrix(brought, false); }
inline void resolve_load_matrix_transposed(void** brought, unsigned) { resolve_load_matrix(brought, true); }
inline constexpr Collective LOAD_MATRIX{"load_matrix_x4", resolve_load_matrix_plain};
inline constexpr Collective LOAD_MATRIX_TRANSPOSED{"load_matrix_x4_transposed", resolve_load_matrix_transposed};

inline void whole_warp(const Collective& collective, void* brought) {
  if (block.warps[block.current / LANES].present != ~0u) fail("%s needs a warp of 32 threads", collective.name);
  together(collective, ~0u, brought);
}

struct Fragments {
  float* d;
  const uint32_t* a;
  const uint32_t* b;
};

// Every product is exact in float; products are added to d in sequence, k ascending.
template <class T>
inline void resolve_multiply(void** brought, unsigned) {
  auto number = [](uint32_t pair, int half) { return to_float(T{uint16_t(pair >> (16 * half))}); };
  float a[16][16], b[16][8], d[16][8];
  for (int lane = 0; lane < LANES; ++lane) {
    auto* mine = static_cast<Fragments*>(brought[lane]);
    int g = lane / 4, c = lane % 4 * 2;
    for (int i = 0; i < 4; ++i)
      for (int half = 0; half < 2; ++half) a[g + i % 2 * 8][c + i / 2 * 8 + half] = number(mine->a[i], half);
    for (int i = 0; i < 2; ++i)
      for (int half = 0; half < 2; ++half) b[c + i * 8 + half][g] = number(mine->b[i], half);
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][c + i % 2] = mine->d[i];
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 16; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < 4; ++i)
      static_cast<Fragments*>(brought[lane])->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}
template <class T>
inline constexpr Collective MULTIPLY{"mma_16x8x16", resolve_multiply<T>};

inline void resolve_multiply_fp8(void** brought, unsigned) {
  auto number = [](uint32_t four, int i) { return to_float(fp8{uint8_t(four >> (8 * i))}); };
  float a[16][32], b[32][8], d[16][8];
  for (int lane = 0; lane < LANES; ++lane) {
    auto* mine = static_cast<Fragments*>(brought[lane]);
    int g = lane / 4, q = lane % 4 * 4;
    for (int i = 0; i < 4; ++i)
      for (int byte = 0; byte < 4; ++byte) a[g + i % 2 * 8][q + i / 2 * 16 + byte] = number(mine->a[i], byte);
    for (int i = 0; i < 2; ++i)
      for (int byte = 0; byte < 4; ++byte) b[q + i * 16 + byte][g] = number(mine->b[i], byte);
    for (int i = 0; i < 4; ++i) d[g + i / 2 * 8][lane % 4 * 2 + i % 2] = mine->d[i];
  }
  for (int row = 0; row < 16; ++row)
    for (int k = 0; k < 32; ++k)
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
  for (int lane = 0; lane < LANES; ++lane)
    for (int i = 0; i < 4; ++i)
      static_cast<Fragments*>(brought[lane])->d[i] = d[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
}
inline constexpr Collective MULTIPLY_FP8{"mma_16x8x32_fp8", resolve_multiply_fp8};

}  // namespace emulation

// Fills the target with garbage; the bytes are copied when this thread waits for their group. A reader that is too early, or
// that still reads the old data, sees NaN.
inline void copy_async_16(void* shared, const void* global, bool valid = true) {
  using namespace emulation;
  check_shared(shared, "copy_async_16");
  if (valid) check_aligned(global, "copy_async_16");
  Thread& thread = block.threads[block.current];
  memset(shared, GARBAGE, 16);
  auto* source = static_cast<const unsigned char*>(global);
  thread.copies.push_back({static_cast<unsigned char*>(shared), valid ? source : nullptr, thread.group});
}

inline void copy_async_commit() { ++emulation::block.threads[emulation::block.current].group; }

template <int N>
inline void copy_async_wait() {
  using namespace emulation;
  Thread& thread = block.threads[block.current];
  size_t kept = 0;
  for (const Copy& copy : thread.copies) {
    bool arrived = copy.group < thread.group && thread.group - copy.group > unsigned(N);
    if (!arrived) thread.copies[kept++] = copy;
    else if (copy.source) memcpy(copy.target, copy.source, 16);
    else memset(copy.target, 0, 16);
  }
  thread.copies.resize(kept);
}

inline void load_matrix_x4(uint32_t (&r)[4], const void* row_in_shared) {
  emulation::check_shared(row_in_shared, "load_matrix_x4");
  emulation::Rows mine{row_in_shared, r};
  emulation::whole_warp(emulation::LOAD_MATRIX, &mine);
}

inline void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row_in_shared) {
  emulation::check_shared(row_in_shared, "load_matrix_x4_transposed");
  emulation::Rows mine{row_in_shared, r};
  emulation::whole_warp(emulation::LOAD_MATRIX_TRANSPOSED, &mine);
}

template <class T>
inline void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::Fragments mine{d, a, b};
  emulation::whole_warp(emulation::MULTIPLY<T>, &mine);
}

// As in the PTX manual: products of four numbers per register, k ascending.
inline void mma_16x8x32_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  emulation::Fragments mine{d, a, b};
  emulation::whole_warp(emulation::MULTIPLY_FP8, &mine);
}

inline uint4 load_stream_16(const void* global) {
  emulation::check_aligned(global, "load_stream_16");
  uint4 quad;
  memcpy(&quad, global, 16);
  return quad;
}

inline void store_release_system(unsigned* address, unsigned value) { __atomic_store_n(address, value, __ATOMIC_RELEASE); }
inline unsigned load_acquire_system(const unsigned* address) { return __atomic_load_n(address, __ATOMIC_ACQUIRE); }

inline long long device_time_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1000000000ll + now.tv_nsec;
}

// The kernel of another rank runs in another thread of the test and may need this processor.
inline void look_away() { sched_yield(); }

}  // namespace quintet
