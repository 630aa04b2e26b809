// Language of the kernels: declarations, asynchronous copies, matrix instructions and reductions. On a GPU most primitives are
// single instructions. Under QT_EMULATED (g++, no GPU) the files in emulation/ implement them on the CPU. So one source is
// compiled for sm_80, sm_90 and sm_100, and tested without a GPU.
//
// Compilers do not contract (-fmad=false), so two instances of a template round alike: a * b + c rounds twice and takes two
// instructions. Use fmaf for fused operations, as every inner loop does.
//
// Include this header first. All inline assembly of the project is here and in numbers.cuh; headers of the CUDA toolkit are not
// used.
#pragma once

#ifdef QT_EMULATED
#include "emulation/device.hpp"
#else

#ifdef __CUDACC_RTC__
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
#else
#include <cstdint>
#endif

// Declares a kernel with at most `threads` threads per block. Parameters are pointers, int, long long and float only. The body
// follows the macro.
#define QT_KERNEL(threads, name, parameters) extern "C" __global__ void __launch_bounds__(threads) name parameters

// Declares a kernel with at least `blocks` blocks per multiprocessor, which limits its registers.
#define QT_KERNEL_OCCUPANCY(threads, blocks, name, parameters) \
  extern "C" __global__ void __launch_bounds__(threads, blocks) name parameters

// Dynamic shared memory of the launch, 16-byte aligned.
#define QT_DYNAMIC_SHARED(name)                                             \
  extern __shared__ __align__(16) unsigned char quintet_dynamic_shared[]; \
  unsigned char* name = quintet_dynamic_shared

#endif

namespace quintet {

constexpr int WARP_SIZE = 32;
constexpr unsigned FULL_WARP = 0xffffffffu;
constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

}  // namespace quintet

#include "numbers.cuh"

#ifdef QT_EMULATED
#include "emulation/instructions.hpp"
#else

namespace quintet {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Starts the copy of 16 bytes from global to shared memory, bypassing registers and L1. If not `valid`, zeros are written and
// the source is not read. Both addresses are multiples of 16 bytes. The copy belongs to the group of the next commit.
__device__ __forceinline__ void copy_async_16(void* shared, const void* global, bool valid = true) {
  int size = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(size)
               : "memory");
}

// Closes the group of this thread's copies since the last commit; it may be empty.
__device__ __forceinline__ void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until all but the newest N groups of this thread have arrived; other threads see them after a barrier.
template <int N>
__device__ __forceinline__ void copy_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Loads four 8x8 matrices of 16-bit numbers. Lane l passes the (16-byte aligned) address of row l % 8 of matrix l / 8. It
// receives in r[i] columns 2 * (l % 4) and the next of row l / 4 of matrix i.
__device__ __forceinline__ void load_matrix_x4(uint32_t (&r)[4], const void* row_in_shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row_in_shared))
               : "memory");
}

// As load_matrix_x4, with each matrix transposed: lane l receives rows 2 * (l % 4) and the next of column l / 4.
__device__ __forceinline__ void load_matrix_x4_transposed(uint32_t (&r)[4], const void* row_in_shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row_in_shared))
               : "memory");
}

template <class T>
struct Multiply;
template <>
struct Multiply<bf16> {
  static __device__ __forceinline__ void run(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};
template <>
struct Multiply<fp16> {
  static __device__ __forceinline__ void run(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

// d[16, 8] += a[16, 16] * b[16, 8] by one warp, accumulated in float. With g = lane / 4 and c = 2 * (lane % 4):
//   a[0] = A[g, c..c+1]   a[1] = A[g + 8, c..c+1]   a[2] = A[g, c + 8..c + 9]   a[3] = A[g + 8, c + 8..c + 9]
//   b[0] = B[c..c+1, g]   b[1] = B[c + 8..c + 9, g]
//   d[0..1] = D[g, c..c+1]   d[2..3] = D[g + 8, c..c+1]
// So rows of A and columns of B are contiguous in memory.
template <class T>
__device__ __forceinline__ void mma_16x8x16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  Multiply<T>::run(d, a, b);
}

// Loads 16 bytes that are read once and not written during the kernel: weights, KV of past tokens.
__device__ __forceinline__ uint4 load_stream_16(const void* global) {
  uint4 quad;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
      : "l"(global));
  return quad;
}

// A word that another device writes or reads during this kernel. Writes before a release (also by other threads, before a
// barrier) are visible to the thread that acquires the value. After its next barrier they are visible to its whole block.
__device__ __forceinline__ void store_release_system(unsigned* address, unsigned value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
__device__ __forceinline__ unsigned load_acquire_system(const unsigned* address) {
  unsigned value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
  return value;
}

// Nanoseconds of a global timer, with a resolution of up to a millisecond.
__device__ __forceinline__ long long device_time_ns() {
  long long now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

// Pause between two polls of another device's word.
__device__ __forceinline__ void look_away() {}

}  // namespace quintet

#endif

namespace quintet {

// mma_16x8x32_fp8 as two fp16 products, with k in another order.
__device__ __forceinline__ void mma_16x8x32_fp8_by_fp16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint32_t upper = a[2 * half], lower = a[2 * half + 1];
    const uint32_t wide_a[4] = {
        fp8_pair_to_fp16_pair(uint16_t(upper)), fp8_pair_to_fp16_pair(uint16_t(lower)),
        fp8_pair_to_fp16_pair(uint16_t(upper >> 16)), fp8_pair_to_fp16_pair(uint16_t(lower >> 16))};
    const uint32_t wide_b[2] = {
        fp8_pair_to_fp16_pair(uint16_t(b[half])), fp8_pair_to_fp16_pair(uint16_t(b[half] >> 16))};
    mma_16x8x16<fp16>(d, wide_a, wide_b);
  }
}

#ifndef QT_EMULATED
// d[16, 8] += a[16, 32] * b[32, 8] of e4m3 numbers. With q = 4 * (lane % 4), registers hold four numbers instead of two:
//   a[0] = A[g, q..q+3]   a[1] = A[g + 8, q..q+3]   a[2] = A[g, q + 16..q + 19]   a[3] = A[g + 8, q + 16..q + 19]
//   b[0] = B[q..q+3, g]   b[1] = B[q + 16..q + 19, g]
// The instruction exists on sm_89 and later.
__device__ __forceinline__ void mma_16x8x32_fp8(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
#ifdef QT_FP8_INSTRUCTIONS
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  mma_16x8x32_fp8_by_fp16(d, a, b);
#endif
}
#endif

// 2^x in one instruction, to 2 units in the last place; subnormal results are flushed to 0. Attention needs one per score;
// exp2f takes three more instructions for subnormal results.
__device__ __forceinline__ float exp2_fast(float x) {
#ifdef QT_EMULATED
  return exp2f(x);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// Warp reductions. The butterfly's order is fixed. Every lane gets the same bits: at each step both partners add the same two
// numbers.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int step = WARP_SIZE / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}
__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int step = WARP_SIZE / 2; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, step));
  return value;
}

// Block reductions, called by all of exactly THREADS threads in one dimension. Every warp reduces the warps' results itself, in
// the same order. Two barriers; the first one allows immediate reuse of the shared array.
template <int THREADS>
__device__ __forceinline__ float block_sum(float value) {
  static_assert(THREADS % WARP_SIZE == 0 && THREADS <= 1024, "whole warps, and one warp holds a partial result of each");
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ float partial[WARPS];
  int lane = threadIdx.x % WARP_SIZE;
  value = warp_sum(value);
  __syncthreads();
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  return warp_sum(lane < WARPS ? partial[lane] : 0.0f);
}
template <int THREADS>
__device__ __forceinline__ float block_max(float value) {
  static_assert(THREADS % WARP_SIZE == 0 && THREADS <= 1024, "whole warps, and one warp holds a partial result of each");
  constexpr int WARPS = THREADS / WARP_SIZE;
  __shared__ float partial[WARPS];
  int lane = threadIdx.x % WARP_SIZE;
  value = warp_max(value);
  __syncthreads();
  if (lane == 0) partial[threadIdx.x / WARP_SIZE] = value;
  __syncthreads();
  return warp_max(lane < WARPS ? partial[lane] : -INF);
}

}  // namespace quintet
