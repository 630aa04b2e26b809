// What this machine can do at most: reading memory, multiplying in registers. Kernels are measured against it.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kReadBytes = 1 << 18;       // one item of reading
inline constexpr index_t kMultiplyRounds = 1 << 16;  // one item of multiplying: so many times 24 vector operations
inline constexpr index_t kMatrixRounds = 1 << 13;    // or so many times four products of whole registers of the matrix unit

struct LimitCall {
  const char* memory;
  index_t bytes;
};

struct LimitKernels {
  void (*read)(const void* limit_call, index_t begin, index_t end);
  void (*floats)(const void*, index_t begin, index_t end);  // fp32
  void (*pairs)(const void*, index_t begin, index_t end);   // bf16
  void (*bytes)(const void*, index_t begin, index_t end);   // unsigned by signed bytes
  index_t lanes;
  // In the matrix unit; null where there is none.
  void (*matrix_pairs)(const void*, index_t begin, index_t end);  // bf16
  void (*matrix_bytes)(const void*, index_t begin, index_t end);  // signed by unsigned bytes
};

QT_DECLARE_KERNELS(LimitKernels, limits)

}  // namespace qt
