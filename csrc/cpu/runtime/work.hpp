// What a kernel hands to the threads: a number of independent pieces of work. Knows no instruction set.
#pragma once

#include <cstdint>

#define QT_EXPORT extern "C" __attribute__((visibility("default")))

using index_t = std::int64_t;

namespace qt {

// The number formats of activations, weights and KV. fp8 is e4m3, and a cache's alone.
enum class Dtype : int { bf16 = 0, fp16 = 1, fp32 = 2, int8 = 3, int4 = 4, fp8 = 5 };

// Named alike in `quintet.executor.backends.cpu.ops.activation`. The result of a gated layer is the function of a gate times the up beside it.
// relu2: the square of relu; quick_gelu: x sigmoid(1.702 x). Of gated layers alone: clamped_swiglu is g / (1 + e^-ag) (u + 1)
// with gates g of at most l and ups u between -l and l (gpt-oss; LinearCall has a, l).
enum class Activation : int {
  none = 0, silu = 1, gelu_tanh = 2, gelu = 3, relu = 4, relu2 = 5, quick_gelu = 6, sigmoid = 7, clamped_swiglu = 32
};
inline constexpr int kActivations = 8;  // of one number

// What a piece reads: `lines` runs of `bytes`, `stride` bytes from one to the next.
struct Region {
  const char* memory;
  index_t bytes, stride, lines;
};

// Pieces [0, count) of one call. Which thread does which piece, and in which order, is not fixed; so what a piece writes
// must depend on nothing but the piece, and no two may write the same place.
struct Work {
  index_t count = 0;
  index_t grain = 1;  // consecutive pieces a thread takes at a time, at most
  void (*run)(const void* call, index_t begin, index_t end) = nullptr;
  const void* call = nullptr;  // the kernel's own description, alive until the work is done
  // What a piece reads, if it is much: a thread that waits for an earlier work fetches the beginning of what it will take.
  Region (*region)(const void* call, index_t piece) = nullptr;
  // For reports of load balance; running reads none of it. What a piece costs beside others of the step, in about
  // the time of a multiplication and addition, or null: `each_cost`, all alike; bytes of weights and KV that are read, and
  // how many of them once more after another piece had read them; of states, which are read and written, twice as many.
  index_t (*cost)(const void* call, index_t piece) = nullptr;
  index_t each_cost = 1;
  index_t bytes = 0, bytes_again = 0;
  // Not this work, but what is written here by the time that all works before it in the list are done: where how much there is
  // to do depends on what they compute. The last of them that is not late itself has one piece, which writes it.
  const Work* late = nullptr;
};

}  // namespace qt
