// CPU emulation of the CUDA language for kernels: declarations, intrinsics and the primitives of device.cuh. Each primitive
// follows the PTX manual and checks errors that a GPU does not report: alignment, missing lanes, addresses outside shared
// memory. Stateless; `block.hpp` runs the threads.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

#include <tuple>
#include <utility>

#include "block.hpp"
#include "guard.hpp"

#define __device__
#define __forceinline__ inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

#define QT_KERNEL(threads, name, parameters)                                                            \
  static void name parameters;                                                                          \
  extern "C" __attribute__((visibility("default"))) const quintet::emulation::Signature qt_kernel_##name; \
  const quintet::emulation::Signature qt_kernel_##name = quintet::emulation::describe(#name, threads, &name); \
  static void name parameters

#define QT_KERNEL_OCCUPANCY(threads, blocks, name, parameters) QT_KERNEL(threads, name, parameters)

#define QT_DYNAMIC_SHARED(name) unsigned char* name = quintet::emulation::block.shared

struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(8) float2 {
  float x, y;
};
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline int2 make_int2(int x, int y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float2 make_float2(float x, float y) { return {x, y}; }

inline float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __int_as_float(int bits) { return __builtin_bit_cast(float, bits); }
inline int __float_as_int(float x) { return __builtin_bit_cast(int, x); }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline long min(long a, long b) { return a < b ? a : b; }
inline long max(long a, long b) { return a > b ? a : b; }
inline long long min(long long a, long long b) { return a < b ? a : b; }
inline long long max(long long a, long long b) { return a > b ? a : b; }
inline unsigned long long min(unsigned long long a, unsigned long long b) { return a < b ? a : b; }
inline unsigned long long max(unsigned long long a, unsigned long long b) { return a > b ? a : b; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __fdividef(float a, float b) { return a / b; }
// Rounded as written on GPUs, never contracted to a multiply-add.
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = (unsigned long long)high << 32 | low;
  unsigned chosen = 0;
  for (int i = 0; i < 4; ++i) {
    if (selector >> (4 * i) & 8u) quintet::emulation::fail("__byte_perm: selector %#x asks for signs", selector);
    chosen |= unsigned(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
  }
  return chosen;
}
template <class T>
T __ldg(const T* address) {
  return *address;
}

inline void __syncthreads() { quintet::emulation::barrier(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
[[noreturn]] inline void __trap() { quintet::emulation::fail("executed __trap()"); }

// One thread runs at a time, so plain reads and writes are atomic.
template <class T, class Change>
T qt_exchange(T* address, Change change) {
  T old = *address;
  *address = change(old);
  return old;
}
template <class T>
T atomicAdd(T* address, T value) {
  return qt_exchange(address, [=](T old) { return T(old + value); });
}
template <class T>
T atomicMax(T* address, T value) {
  return qt_exchange(address, [=](T old) { return old > value ? old : value; });
}
template <class T>
T atomicMin(T* address, T value) {
  return qt_exchange(address, [=](T old) { return old < value ? old : value; });
}
template <class T>
T atomicOr(T* address, T value) {
  return qt_exchange(address, [=](T old) { return T(old | value); });
}
template <class T>
T atomicExch(T* address, T value) {
  return qt_exchange(address, [=](T) { return value; });
}
template <class T>
T atomicCAS(T* address, T expected, T value) {
  return qt_exchange(address, [=](T old) { return old == expected ? value : old; });
}

namespace quintet::emulation {

// Kinds of a kernel's parameters, as in `Kernel.kinds` of executor/backends/cuda/device.py.
template <class P>
constexpr char kind_of() {
  static_assert(std::is_pointer_v<P> || std::is_same_v<P, float> || (std::is_integral_v<P> && sizeof(P) >= 4),
                "a kernel's parameters are pointers, int, long long and float");
  if (std::is_pointer_v<P>) return 'p';
  if (std::is_same_v<P, float>) return 'f';
  return sizeof(P) == 4 ? 'i' : 'l';
}

// Description of a kernel, exported to Python as qt_kernel_<name>.
struct Signature {
  const char* name;
  const char* kinds;
  int max_threads;
  void (*call)(void* function, void** arguments);
  void* function;
};

template <class... P>
struct Parameters {
  static constexpr char kinds[] = {kind_of<P>()..., '\0'};
  template <size_t... I>
  static void spread(void (*function)(P...), void** arguments, std::index_sequence<I...>) {
    function(*static_cast<std::remove_const_t<P>*>(arguments[I])...);
  }
  static void call(void* function, void** arguments) {
    spread(reinterpret_cast<void (*)(P...)>(function), arguments, std::index_sequence_for<P...>());
  }
};

template <class... P>
Signature describe(const char* name, int threads, void (*function)(P...)) {
  return {name, Parameters<P...>::kinds, threads, Parameters<P...>::call, reinterpret_cast<void*>(function)};
}

inline float fp16_to_float(uint16_t bits) { return float(__builtin_bit_cast(_Float16, bits)); }
inline uint16_t float_to_fp16(float x) { return __builtin_bit_cast(uint16_t, _Float16(x)); }
inline float bf16_to_float(uint16_t bits) { return __uint_as_float(unsigned(bits) << 16); }
inline uint16_t float_to_bf16(float x) {
  if (x != x) return 0x7fff;  // as the instruction returns it
  unsigned word = __float_as_uint(x);
  return uint16_t((word + 0x7fffu + (word >> 16 & 1u)) >> 16);
}

struct Shuffle {
  unsigned long long value;
  int source;  // lane of the warp
};

inline void resolve_shuffle(void** brought, unsigned mask) {
  unsigned long long values[LANES];
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    int lane = __builtin_ctz(rest);
    values[lane] = static_cast<Shuffle*>(brought[lane])->value;
  }
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    auto* shuffle = static_cast<Shuffle*>(brought[__builtin_ctz(rest)]);
    // The value of a lane outside the mask is undefined.
    shuffle->value = mask >> shuffle->source & 1u ? values[shuffle->source] : ~0ull;
  }
}

inline constexpr Collective SHUFFLE{"__shfl_sync", resolve_shuffle};
inline constexpr Collective SHUFFLE_XOR{"__shfl_xor_sync", resolve_shuffle};
inline constexpr Collective SHUFFLE_DOWN{"__shfl_down_sync", resolve_shuffle};
inline constexpr Collective SHUFFLE_UP{"__shfl_up_sync", resolve_shuffle};

template <class T>
T shuffle(const Collective& collective, unsigned mask, T value, int source) {
  static_assert(std::is_arithmetic_v<T> && (sizeof(T) == 4 || sizeof(T) == 8), "shuffles move 4 or 8 bytes");
  Shuffle mine{0, source};
  memcpy(&mine.value, &value, sizeof value);
  together(collective, mask, &mine);
  memcpy(&value, &mine.value, sizeof value);
  return value;
}
inline int lane() { return block.current % LANES; }

inline void resolve_ballot(void** brought, unsigned mask) {
  unsigned votes = 0;
  for (unsigned rest = mask; rest; rest &= rest - 1)
    if (*static_cast<unsigned*>(brought[__builtin_ctz(rest)])) votes |= rest & -rest;
  for (unsigned rest = mask; rest; rest &= rest - 1) *static_cast<unsigned*>(brought[__builtin_ctz(rest)]) = votes;
}
inline constexpr Collective BALLOT{"__ballot_sync", resolve_ballot};
inline constexpr Collective ANY{"__any_sync", resolve_ballot};
inline constexpr Collective ALL{"__all_sync", resolve_ballot};
inline constexpr Collective SYNC_WARP{"__syncwarp", nullptr};

inline unsigned vote(const Collective& collective, unsigned mask, bool predicate) {
  unsigned mine = predicate;
  together(collective, mask, &mine);
  return mine;
}

// Argument of the -fsanitize=alignment,bounds handlers; only the beginning of their descriptors is read.
struct SourcePlace {
  const char* file;
  unsigned line, column;
};

}  // namespace quintet::emulation

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  int lane = quintet::emulation::lane();
  return quintet::emulation::shuffle(quintet::emulation::SHUFFLE, mask, value,
                                     (lane & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  int lane = quintet::emulation::lane(), source = lane ^ bits;
  bool inside = source < (lane & ~(width - 1)) + width;
  return quintet::emulation::shuffle(quintet::emulation::SHUFFLE_XOR, mask, value, inside ? source : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = quintet::emulation::lane();
  bool inside = (lane & (width - 1)) + int(delta) < width;
  return quintet::emulation::shuffle(quintet::emulation::SHUFFLE_DOWN, mask, value, inside ? lane + int(delta) : lane);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  int lane = quintet::emulation::lane();
  bool inside = (lane & (width - 1)) >= int(delta);
  return quintet::emulation::shuffle(quintet::emulation::SHUFFLE_UP, mask, value, inside ? lane - int(delta) : lane);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return quintet::emulation::vote(quintet::emulation::BALLOT, mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return quintet::emulation::vote(quintet::emulation::ANY, mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return quintet::emulation::vote(quintet::emulation::ALL, mask, predicate == 0) == 0;
}
inline void __syncwarp(unsigned mask = 0xffffffffu) {
  quintet::emulation::together(quintet::emulation::SYNC_WARP, mask, nullptr);
}

extern "C" {
inline void __attribute__((used)) __ubsan_handle_type_mismatch_v1(quintet::emulation::SourcePlace* place, uintptr_t address) {
  quintet::emulation::fail("%s:%u: address %#zx is not aligned for what is read or written there", place->file,
                           place->line, size_t(address));
}
inline void __attribute__((used)) __ubsan_handle_out_of_bounds(quintet::emulation::SourcePlace* place, uintptr_t index) {
  quintet::emulation::fail("%s:%u: index %zd is outside the array", place->file, place->line, ssize_t(index));
}

// Runs a whole grid; returns null, or an error message. The first block is random, so that no kernel depends on the order.
inline __attribute__((used, visibility("default"))) const char* qt_run(
    const quintet::emulation::Signature* kernel, const quintet::emulation::Launch* launch, void** arguments,
    const quintet::emulation::Range* statics, int num_statics, quintet::emulation::Buffer* buffers, int num_buffers) {
  using quintet::emulation::block;
  blockDim = {launch->block[0], launch->block[1], launch->block[2]};
  gridDim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  block.kernel = kernel->name;
  block.call = kernel->call;
  block.function = kernel->function;
  block.arguments = arguments;
  block.num_threads = int(blockDim.x * blockDim.y * blockDim.z);
  block.shared_bytes = launch->shared_bytes;
  block.statics = statics;
  block.num_statics = num_statics;
  block.seed = launch->seed;
  block.rank = launch->rank;
  block.failed = false;
  block.num_matrix_loads = block.num_bank_conflicts = 0;
  quintet::emulation::enter_guard(buffers, num_buffers, launch->rank == 0);
  for (int i = 0; kernel->kinds[i]; ++i) {
    auto* pointer = static_cast<void**>(arguments[i]);
    if (kernel->kinds[i] == 'p') *pointer = quintet::emulation::guarded(*pointer);
  }
  unsigned long long count = (unsigned long long)gridDim.x * gridDim.y * gridDim.z;
  unsigned long long first = launch->seed * 0x9e3779b97f4a7c15ull % count;
  for (unsigned long long i = 0; i < count && !block.failed; ++i) {
    unsigned long long at = (first + i) % count;
    quintet::emulation::run_block(
        {unsigned(at % gridDim.x), unsigned(at / gridDim.x % gridDim.y), unsigned(at / gridDim.x / gridDim.y)});
  }
  quintet::emulation::leave_guard(launch->rank == 0);
  return block.failed ? block.message : nullptr;
}

// Counters of the last launch: 8x8 matrices loaded by load_matrix_x4, and extra accesses by bank conflicts of their rows.
inline __attribute__((used, visibility("default"))) void qt_count(unsigned long long* loads, unsigned long long* conflicts) {
  *loads = quintet::emulation::block.num_matrix_loads;
  *conflicts = quintet::emulation::block.num_bank_conflicts;
}
}
