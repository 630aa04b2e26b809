// Limits of this machine: memory read bandwidth and multiply-add rate in registers. Kernels are compared with these figures.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kReadBytes = 1 << 18;       // bytes of one read item
inline constexpr index_t kMultiplyRounds = 1 << 16;  // rounds of one multiply item, 24 vector operations each
inline constexpr index_t kMatrixRounds = 1 << 13;    // rounds of one matrix item, four products of full registers each

struct LimitCall {
  const char* memory;
  index_t bytes;
};

struct LimitKernels {
  void (*read)(const void* limit_call, index_t begin, index_t end);
  void (*floats)(const void*, index_t begin, index_t end);  // fp32
  void (*pairs)(const void*, index_t begin, index_t end);   // bf16
  void (*bytes)(const void*, index_t begin, index_t end);   // unsigned times signed bytes
  index_t lanes;
  // Matrix unit; null where the instruction set has none.
  void (*matrix_pairs)(const void*, index_t begin, index_t end);  // bf16
  void (*matrix_bytes)(const void*, index_t begin, index_t end);  // signed times unsigned bytes
};

QT_DECLARE_KERNELS(LimitKernels, limits)

}  // namespace qt
