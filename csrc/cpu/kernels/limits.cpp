// Benchmarks of the machine's limits, as references for the kernels. Read: sequential memory reads. Multiply: 24 independent
// accumulators in vector registers, or four AMX registers, at full rate. The results are not used.
#include "limits.hpp"

#include "amx.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

constexpr int kSums = kRegisters == 32 ? 24 : 12;

template <class Vector>
QT_INLINE void use(Vector& value) {
#if defined(__x86_64__)
  asm volatile("" : "+x"(value));
#elif defined(__aarch64__)
  asm volatile("" : "+w"(value));
#else
  asm volatile("" : "+m"(value));  // the register constraint differs between other processors
#endif
}

void read(const void* described, index_t begin, index_t end) {
  const LimitCall& call = *(const LimitCall*)described;
  constexpr index_t kVector = sizeof(i32v), kAtOnce = 8, kAhead = 4096;
  const char* from = call.memory + begin * kReadBytes;
  const index_t bytes = call.bytes - begin * kReadBytes, mine = (end - begin) * kReadBytes;
  const index_t count = bytes < mine ? bytes : mine;
  i32v sums[kAtOnce] = {};
  for (index_t i = 0; i + kAtOnce * kVector <= count; i += kAtOnce * kVector) {
#pragma GCC unroll 8
    for (index_t line = 0; line < kAtOnce * kVector; line += 64) __builtin_prefetch(from + i + kAhead + line, 0, 2);
#pragma GCC unroll 8
    for (index_t v = 0; v < kAtOnce; ++v) sums[v] = sums[v] ^ load_bits(from + i + v * kVector);
  }
#pragma GCC unroll 8
  for (index_t v = 0; v < kAtOnce; ++v) use(sums[v]);
}

template <class Vector, class Add>
QT_INLINE void multiply(index_t items, Vector a, Vector b, Vector start, Add add) {
  Vector sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) {
    sums[i] = start;
    use(sums[i]);  // otherwise the compiler merges the equal accumulators
  }
  for (index_t round = 0; round < items * kMultiplyRounds * 24 / kSums; ++round) {
    use(a);
#pragma GCC unroll 24
    for (int i = 0; i < kSums; ++i) sums[i] = add(sums[i], a, b);
  }
#pragma GCC unroll 24
  for (int i = 0; i < kSums; ++i) use(sums[i]);
}

void floats(const void*, index_t begin, index_t end) {
  multiply(end - begin, all(1.0f), all(1.0f), f32v{}, [](f32v sum, f32v a, f32v b) { return fma(a, b, sum); });
}

void pairs(const void*, index_t begin, index_t end) {
  multiply(end - begin, all(0x3F803F80), all(0x3F803F80), i32v{},
           [](i32v sum, i32v a, i32v b) { return as_bits(dot_pairs(as_float(sum), a, b)); });
}

void bytes(const void*, index_t begin, index_t end) {
  multiply(end - begin, all(0x01010101), all(0x01010101), i32v{},
           [](i32v sum, i32v a, i32v b) { return dot_bytes(sum, a, b); });
}

#if defined(__AMX_BF16__)
template <class Multiply>
QT_INLINE void multiply_matrices(index_t items, Multiply multiply) {
  AmxShapes shapes;
  for (int r = 0; r < kAmxRegisters; ++r) shapes.set(r, kAmxRows, kAmxRowBytes);
  Amx amx;
  amx.configure(shapes);
  for (index_t round = 0; round < items * kMatrixRounds; ++round) multiply(amx);
}

void matrix_pairs(const void*, index_t begin, index_t end) {
  multiply_matrices(end - begin, [](Amx& amx) {
    amx.multiply_bf16<0, 4, 6>();
    amx.multiply_bf16<1, 4, 7>();
    amx.multiply_bf16<2, 5, 6>();
    amx.multiply_bf16<3, 5, 7>();
  });
}

void matrix_bytes(const void*, index_t begin, index_t end) {
  multiply_matrices(end - begin, [](Amx& amx) {
    amx.multiply_bytes<0, 4, 6>();
    amx.multiply_bytes<1, 4, 7>();
    amx.multiply_bytes<2, 5, 6>();
    amx.multiply_bytes<3, 5, 7>();
  });
}
#else  // emulated AMX has no hardware limit
constexpr void (*matrix_pairs)(const void*, index_t, index_t) = nullptr, (*matrix_bytes)(const void*, index_t, index_t) = nullptr;
#endif

}  // namespace

const LimitKernels limits = {read, floats, pairs, bytes, kLanes, matrix_pairs, matrix_bytes};

}  // namespace qt::QT_ISA
