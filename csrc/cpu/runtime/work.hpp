// Unit of work of the thread pool: a number of independent pieces. Independent of the instruction set.
#pragma once

#include <cstdint>

#define QT_EXPORT extern "C" __attribute__((visibility("default")))

using index_t = std::int64_t;

namespace qt {

// Number formats of activations, weights and KV. fp8 is e4m3; only caches have it.
enum class Dtype : int { bf16 = 0, fp16 = 1, fp32 = 2, int8 = 3, int4 = 4, fp8 = 5 };

// Activation functions, with the names of `quintet.executor.backends.cpu.ops.activation`. A gated layer computes the function
// of a gate times the up value. relu2: the square of relu. quick_gelu: x sigmoid(1.702 x). clamped_swiglu (gated layers only):
// g / (1 + e^-ag) (u + 1) with gates g <= l and ups u in [-l, l] (gpt-oss; LinearCall has a, l).
enum class Activation : int {
  none = 0, silu = 1, gelu_tanh = 2, gelu = 3, relu = 4, relu2 = 5, quick_gelu = 6, sigmoid = 7, clamped_swiglu = 32
};
inline constexpr int kActivations = 8;  // functions of one number

// Memory that a piece reads: `lines` runs of `bytes`, `stride` bytes apart.
struct Region {
  const char* memory;
  index_t bytes, stride, lines;
};

// Pieces [0, count) of one call. The assignment of pieces to threads, and their order, is not fixed. So the output of a piece
// must depend on that piece only, and no two pieces may write the same address.
struct Work {
  index_t count = 0;
  index_t grain = 1;  // most consecutive pieces of one take
  void (*run)(const void* call, index_t begin, index_t end) = nullptr;
  const void* call = nullptr;  // the kernel's arguments, valid until Pool::run returns, or until Pool::settle
  // Memory that a piece reads, if it is large; else null. A thread that waits for an earlier work prefetches the start of its
  // next piece.
  Region (*region)(const void* call, index_t piece) = nullptr;
  // For load-balance reports only; execution does not read these fields. cost: cost of a piece, in units of about one
  // multiplication and addition; null: every piece costs `each_cost`. bytes: weights and KV read. bytes_again: the part of them
  // that an earlier piece has read already. States are read and written, so they count twice.
  index_t (*cost)(const void* call, index_t piece) = nullptr;
  index_t each_cost = 1;
  index_t bytes = 0, bytes_again = 0;
  // Not null: a late work. An earlier work of the list writes the description at this address, because the amount of work
  // depends on its results. The last work before it that is not late has one piece and writes the description.
  const Work* late = nullptr;
};

}  // namespace qt
