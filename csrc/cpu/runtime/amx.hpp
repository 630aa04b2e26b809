// Intel AMX (matrix unit): eight registers of up to 16 rows of 64 bytes and their matrix products. The instruction set
// `amx_emulated` implements the same arithmetic in plain C++, bit for bit, for processors without AMX.
//
// Kernels use the class `Amx` only. Template arguments name the registers; a configuration fixes their shapes. Products, for
// rows m and columns n:
//
//   multiply_bf16<C, A, B>    C [m][n] fp32   A [m][pairs of bf16]           B [pairs][n][2] bf16
//   multiply_bytes<C, A, B>   C [m][n] int32  A [m][fours of signed bytes]   B [fours][n][4] unsigned bytes
//
// B has the layout of packed weights, keys and values. Shapes must match: C has the rows of A and the columns of B. The number
// of pairs or fours in A equals the number of rows of B.
//
// Arithmetic of TDPBF16PS (Intel, Architecture Instruction Set Extensions Programming Reference, 2023, TDPBF16PS; compared with
// a processor on 1.5 million random sums, docs/performance.md): for each m and n, two chains of fused operations start at zero,
//   even = fma(a[2 p], b[2 p], even)   and   odd = fma(a[2 p + 1], b[2 p + 1], odd)   over p ascending,
// then c = c + (even + odd). Rounding is to nearest even. At every step, inputs and results below the smallest normal number
// become zero of the same sign. MXCSR has no effect. Bytes: sums of products modulo 2^32, exact.
//
// A row of C depends only on the same row of A, so its bits are independent of the batch size.
#pragma once

#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kAmxRows = 16, kAmxRowBytes = 64, kAmxRegisters = 8;
inline constexpr index_t kAmxColumns = kAmxRowBytes / 4;  // of C and B
inline constexpr index_t kAmxPairs = 2 * kAmxRows;        // k of one multiply_bf16 on full registers
inline constexpr index_t kAmxFours = 4 * kAmxRows;        // k of one multiply_bytes on full registers

// Register shapes in the format of LDTILECFG.
struct alignas(64) AmxShapes {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};

  constexpr void set(int number, index_t some_rows, index_t bytes) {
    rows[number] = std::uint8_t(some_rows);
    row_bytes[number] = std::uint16_t(bytes);
  }
};
static_assert(sizeof(AmxShapes) == 64);

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define QT_AMX 1

class Amx {
 public:
  Amx() = default;
  Amx(const Amx&) = delete;
  Amx& operator=(const Amx&) = delete;
  ~Amx() { asm volatile("tilerelease" ::); }  // otherwise each thread switch saves eight kilobytes

  // Sets the register shapes; all registers are zero afterwards.
  __attribute__((always_inline)) void configure(const AmxShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }

  template <int R>
  __attribute__((always_inline)) void zero() {
    asm volatile("tilezero %%tmm%c0" ::"i"(R));
  }
  // Loads the rows of a register from memory, `stride` bytes apart.
  template <int R>
  __attribute__((always_inline)) void load(const void* from, index_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(R) : "memory");
  }
  template <int R>
  __attribute__((always_inline)) void store(void* to, index_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(R) : "memory");
  }
  template <int C, int A, int B>
  __attribute__((always_inline)) void multiply_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
  template <int C, int A, int B>
  __attribute__((always_inline)) void multiply_bytes() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
  }
};

#elif defined(QT_AMX_EMULATED)
#define QT_AMX 1

// Flushes numbers below the smallest normal number to zero of the same sign.
QT_INLINE f32v flushed(f32v value) {
  const i32v bits = as_bits(value);
  return as_float((bits & 0x7F800000) == 0 ? bits & all(std::int32_t(0x80000000)) : bits);
}

// a * b + c, rounded once. `fma` of simd.hpp rounds twice on processors without FMA; there the C library's fma is used.
QT_INLINE f32v fused(f32v a, f32v b, f32v c) {
#if defined(__FMA__) || defined(__aarch64__)
  return fma(a, b, c);
#else
  for (int i = 0; i < kLanes; ++i) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
#endif
}

static_assert(kDotBias == 0, "multiply_bytes takes dot_bytes as it is");

class Amx {
 public:
  void configure(const AmxShapes& shapes) {
    shapes_ = shapes;
    for (int r = 0; r < kAmxRegisters; ++r) {
      demand(shapes.rows[r] <= kAmxRows && shapes.row_bytes[r] <= kAmxRowBytes);
      std::memset(registers_[r], 0, sizeof registers_[r]);
    }
  }

  template <int R>
  void zero() {
    demand(rows(R) > 0);
    std::memset(registers_[R], 0, sizeof registers_[R]);
  }
  template <int R>
  void load(const void* from, index_t stride) {
    zero<R>();
    for (index_t r = 0; r < rows(R); ++r)
      std::memcpy(registers_[R][r], (const char*)from + r * stride, std::size_t(row_bytes(R)));
  }
  template <int R>
  void store(void* to, index_t stride) {
    demand(rows(R) > 0);
    for (index_t r = 0; r < rows(R); ++r)
      std::memcpy((char*)to + r * stride, registers_[R][r], std::size_t(row_bytes(R)));
  }

  template <int C, int A, int B>
  void multiply_bf16() {
    demand_shapes(C, A, B);
    const index_t pairs = rows(B), vectors = kAmxColumns / kLanes;
    f32v low[kAmxRows][kAmxColumns / kLanes], high[kAmxRows][kAmxColumns / kLanes];
    for (index_t p = 0; p < pairs; ++p)
      for (index_t v = 0; v < vectors; ++v) {
        const i32v both = load_bits(registers_[B][p] + v * kLanes * 4);
        low[p][v] = flushed(as_float(both << 16));
        high[p][v] = flushed(as_float(both & all(std::int32_t(0xFFFF0000))));
      }
    for (index_t m = 0; m < rows(A); ++m) {
      float* sums = (float*)registers_[C][m];
      f32v even[kAmxColumns / kLanes] = {}, odd[kAmxColumns / kLanes] = {};
      for (index_t p = 0; p < pairs; ++p) {
        const i32v both = spread_word(registers_[A][m] + p * 4);
        const f32v first = flushed(as_float(both << 16));
        const f32v second = flushed(as_float(both & all(std::int32_t(0xFFFF0000))));
        for (index_t v = 0; v < vectors; ++v) {
          even[v] = flushed(fused(first, low[p][v], even[v]));
          odd[v] = flushed(fused(second, high[p][v], odd[v]));
        }
      }
      for (index_t v = 0; v < vectors; ++v) {
        f32v sum;
        std::memcpy(&sum, sums + v * kLanes, sizeof sum);
        sum = flushed(flushed(sum) + flushed(even[v] + odd[v]));
        std::memcpy(sums + v * kLanes, &sum, sizeof sum);
      }
    }
    clear_padding(C, B);
  }

  template <int C, int A, int B>
  void multiply_bytes() {
    demand_shapes(C, A, B);
    for (index_t m = 0; m < rows(A); ++m)
      for (index_t v = 0; v < kAmxColumns / kLanes; ++v) {
        i32v sum = load_bits(registers_[C][m] + v * kLanes * 4);
        for (index_t p = 0; p < rows(B); ++p)
          sum = dot_bytes(sum, load_bits(registers_[B][p] + v * kLanes * 4), spread_word(registers_[A][m] + p * 4));
        std::memcpy(registers_[C][m] + v * kLanes * 4, &sum, sizeof sum);
      }
    clear_padding(C, B);
  }

 private:
  // Condition that the processor checks with an invalid-opcode exception.
  static void demand(bool holds) {
    if (!holds) __builtin_trap();
  }
  void demand_shapes(int c, int a, int b) const {
    demand(c != a && a != b && b != c && rows(c) == rows(a) && row_bytes(c) == row_bytes(b));
    demand(row_bytes(a) == 4 * rows(b) && row_bytes(b) % 4 == 0 && rows(c) > 0 && row_bytes(c) > 0);
  }
  // Sets the columns beyond those of B to zero.
  void clear_padding(int c, int b) {
    for (index_t m = 0; m < rows(c); ++m)
      std::memset(registers_[c][m] + row_bytes(b), 0, std::size_t(kAmxRowBytes - row_bytes(b)));
  }
  index_t rows(int r) const { return shapes_.rows[r]; }
  index_t row_bytes(int r) const { return shapes_.row_bytes[r]; }

  AmxShapes shapes_;
  alignas(64) char registers_[kAmxRegisters][kAmxRows][kAmxRowBytes];
};
#endif

}  // namespace
}  // namespace qt::QT_ISA
