// Test kernels for the primitives of device.cuh and for the emulator, some of them wrong on purpose. Blocks of 32 threads
// unless stated otherwise. The engine does not use them.
#include "device.cuh"

using namespace quintet;

// out[lane] = result of each shuffle for values[lane]: seven rows of 32.
QT_KERNEL(32, selftest_shuffles, (const float* values, float* out)) {
  int lane = threadIdx.x;
  float value = values[lane];
  out[lane] = __shfl_sync(FULL_WARP, value, 5);
  out[32 + lane] = __shfl_sync(FULL_WARP, value, lane * 7, 8);
  out[64 + lane] = __shfl_xor_sync(FULL_WARP, value, 9);
  out[96 + lane] = __shfl_down_sync(FULL_WARP, value, 3);
  out[128 + lane] = __shfl_up_sync(FULL_WARP, value, 3, 16);
  out[160 + lane] = lane < 16 ? __shfl_xor_sync(0x0000ffffu, value, 1) : __shfl_xor_sync(0xffff0000u, value, 2);
  out[192 + lane] = float(__popc(__ballot_sync(FULL_WARP, value > 0.0f))) + 100.0f * __any_sync(FULL_WARP, lane == 7) +
                    1000.0f * __all_sync(FULL_WARP, lane != 7);
}

// d[16, 8] = a[16, 16] * b[8, 16]^T; both operands pass shared memory and ldmatrix.
template <class T>
__device__ __forceinline__ void multiply(const T* a, const T* b, float* d) {
  __shared__ __align__(16) T tile_a[16 * 16];
  __shared__ __align__(16) T tile_b[16 * 16];
  int lane = threadIdx.x;
  copy_async_16(tile_a + lane * 8, a + lane * 8);
  copy_async_16(tile_b + lane * 8, b + lane * 8, lane < 16);
  copy_async_commit();
  copy_async_wait<0>();
  __syncwarp();
  uint32_t fragment_a[4], fragment_b[4];
  load_matrix_x4(fragment_a, tile_a + (lane % 16) * 16 + lane / 16 * 8);
  load_matrix_x4(fragment_b, tile_b + (lane % 8) * 16 + lane / 8 % 2 * 8);
  float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  uint32_t half_b[2] = {fragment_b[0], fragment_b[1]};
  mma_16x8x16<T>(sums, fragment_a, half_b);
  int row = lane / 4, column = lane % 4 * 2;
  d[row * 8 + column] = sums[0];
  d[row * 8 + column + 1] = sums[1];
  d[(row + 8) * 8 + column] = sums[2];
  d[(row + 8) * 8 + column + 1] = sums[3];
}
QT_KERNEL(32, selftest_multiply_bf16, (const bf16* a, const bf16* b, float* d)) { multiply<bf16>(a, b, d); }
QT_KERNEL(32, selftest_multiply_fp16, (const fp16* a, const fp16* b, float* d)) { multiply<fp16>(a, b, d); }

// d[16, 8] = a[16, 32] * b[8, 32]^T of e4m3 numbers, by the fp8 instruction and by two fp16 instructions.
QT_KERNEL(32, selftest_multiply_fp8, (const fp8* a, const fp8* b, float* d, float* by_fp16)) {
  const int lane = threadIdx.x, g = lane / 4, q = lane % 4 * 4;
  auto four = [](const fp8* numbers) { return *reinterpret_cast<const uint32_t*>(numbers); };
  const uint32_t fragment_a[4] = {
      four(a + g * 32 + q), four(a + (g + 8) * 32 + q), four(a + g * 32 + q + 16), four(a + (g + 8) * 32 + q + 16)};
  const uint32_t fragment_b[2] = {four(b + g * 32 + q), four(b + g * 32 + q + 16)};
  for (int pass = 0; pass < 2; ++pass) {
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (pass == 0) mma_16x8x32_fp8(sums, fragment_a, fragment_b);
    else mma_16x8x32_fp8_by_fp16(sums, fragment_a, fragment_b);
    float* out = pass == 0 ? d : by_fp16;
    for (int i = 0; i < 4; ++i) out[(g + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
  }
}

// out[8 * 8 * i ...] = matrix i, stored from its fragments: four contiguous 8x8 matrices.
QT_KERNEL(32, selftest_matrices, (const uint16_t* matrices, uint16_t* plain, uint16_t* transposed)) {
  QT_DYNAMIC_SHARED(shared);
  uint16_t* tile = reinterpret_cast<uint16_t*>(shared);
  int lane = threadIdx.x;
  for (int i = lane; i < 4 * 64; i += 32) tile[i] = matrices[i];
  __syncwarp();
  uint32_t r[4];
  for (int pass = 0; pass < 2; ++pass) {
    if (pass == 0) load_matrix_x4(r, tile + lane * 8);
    else load_matrix_x4_transposed(r, tile + lane * 8);
    uint16_t* out = pass == 0 ? plain : transposed;
    for (int i = 0; i < 4; ++i) {
      out[i * 64 + lane * 2] = uint16_t(r[i] & 0xffffu);
      out[i * 64 + lane * 2 + 1] = uint16_t(r[i] >> 16);
    }
  }
}

// Blocks of 128: out[block * 128 ...] = sum and maximum of the block's values; computed twice to reuse the shared arrays.
QT_KERNEL(128, selftest_reductions, (const float* values, float* sums, float* maxima)) {
  int at = blockIdx.x * 128 + threadIdx.x;
  float value = values[at];
  float sum = block_sum<128>(value);
  float maximum = block_max<128>(value);
  sums[at] = sum + block_sum<128>(1.0f);
  maxima[at] = maximum + block_max<128>(float(threadIdx.x));
}

// Every conversion of count numbers: 16 and 8 bits to float, float to each, and fp8 pairs to pairs of 16 bits.
QT_KERNEL(128, selftest_widen, (const bf16* a, const fp16* b, const fp8* c, float* wide_a, float* wide_b, float* wide_c,
                                uint32_t* pairs_a, uint32_t* pairs_b, int count)) {
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= count) return;
  wide_a[i] = to_float(a[i]);
  wide_b[i] = to_float(b[i]);
  wide_c[i] = to_float(c[i]);
  uint16_t two = uint16_t(c[i].bits | uint32_t(c[i ^ 1].bits) << 8);
  pairs_a[i] = widen_fp8_pair<bf16>(two);
  pairs_b[i] = widen_fp8_pair<fp16>(two);
}
QT_KERNEL(128, selftest_narrow, (const float* values, bf16* a, fp16* b, fp8* c, uint32_t* pairs, int count)) {
  int i = blockIdx.x * 128 + threadIdx.x;
  if (i >= count) return;
  a[i] = from_float<bf16>(values[i]);
  b[i] = from_float<fp16>(values[i]);
  c[i] = from_float<fp8>(values[i]);
  pairs[i] = pack_pair<bf16>(values[i], -values[i]);
}

// Doubles every number in packs of each format, one pack per thread.
template <class T>
__device__ __forceinline__ void double_pack(const T* in, T* out) {
  Pack<T> pack = load_pack(in + threadIdx.x * Pack<T>::SIZE);
#pragma unroll
  for (int i = 0; i < Pack<T>::SIZE; ++i) pack.set(i, 2.0f * pack.get(i));
  store_pack(out + threadIdx.x * Pack<T>::SIZE, pack);
}
QT_KERNEL(32, selftest_packs, (const bf16* a, const fp16* b, const fp8* c, const float* d, bf16* out_a, fp16* out_b,
                               fp8* out_c, float* out_d)) {
  double_pack(a, out_a);
  double_pack(b, out_b);
  double_pack(c, out_c);
  double_pack(d, out_d);
}

// Blocks of 64, 1 KiB of dynamic shared memory. Each thread copies 16 bytes and reads those of the next thread. `waits`: waits
// for its copy. `meets`: waits at a barrier. Without either, it reads data that have not arrived.
QT_KERNEL(64, selftest_copies, (const int* in, int* out, int waits, int meets)) {
  QT_DYNAMIC_SHARED(shared);
  int thread = threadIdx.x;
  copy_async_16(shared + 16 * thread, in + 4 * thread);
  copy_async_commit();
  if (waits) copy_async_wait<0>();
  if (meets) __syncthreads();
  int4 quad = *reinterpret_cast<const int4*>(shared + 16 * ((thread + 1) % 64));
  *reinterpret_cast<int4*>(out + 4 * thread) = quad;
}

// Two groups in flight: after the wait, the first has arrived and the second may not have.
QT_KERNEL(32, selftest_groups, (const int* in, int* first, int* second)) {
  QT_DYNAMIC_SHARED(shared);
  int thread = threadIdx.x;
  copy_async_16(shared + 16 * thread, in + 4 * thread);
  copy_async_commit();
  copy_async_16(shared + 512 + 16 * thread, in + 128 + 4 * thread, thread < 16);
  copy_async_commit();
  copy_async_wait<1>();
  *reinterpret_cast<int4*>(first + 4 * thread) = *reinterpret_cast<const int4*>(shared + 16 * thread);
  copy_async_wait<0>();
  *reinterpret_cast<int4*>(second + 4 * thread) = *reinterpret_cast<const int4*>(shared + 512 + 16 * thread);
}

// Counters shared by all threads of all blocks.
QT_KERNEL(64, selftest_atomics, (int* count, int* highest, float* sum)) {
  int thread = blockIdx.x * 64 + threadIdx.x;
  atomicAdd(count, 1);
  atomicMax(highest, thread);
  atomicAdd(sum, 0.5f);
}

// Indices: out[thread of the grid] = x, y, z of thread and block.
QT_KERNEL(64, selftest_indices, (int* out)) {
  int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  int* mine = out + 6 * (block * int(blockDim.x * blockDim.y * blockDim.z) + thread);
  mine[0] = threadIdx.x, mine[1] = threadIdx.y, mine[2] = threadIdx.z;
  mine[3] = blockIdx.x, mine[4] = blockIdx.y, mine[5] = blockIdx.z;
}

// Wrong on purpose: a barrier is missing between a write and the next thread's read.
QT_KERNEL(64, selftest_race, (int* out)) {
  __shared__ int values[64];
  int thread = threadIdx.x;
  values[thread] = thread;
  __syncthreads();
  int next = values[(thread + 1) % 64];
  values[thread] = next;
  out[thread] = values[(thread + 1) % 64];
}

// Wrong on purpose; `way` selects the mistake.
QT_KERNEL(64, selftest_wrong, (int* out, int way)) {
  QT_DYNAMIC_SHARED(shared);
  int thread = threadIdx.x;
  if (way == 0 && thread == 40) return;
  if (way == 1 && thread >= 32) __syncwarp();
  if (way == 2 && thread == 3) __syncthreads();
  if (way == 3) out[thread] = thread == 5 ? __shfl_xor_sync(FULL_WARP, thread, 1) : __shfl_sync(FULL_WARP, thread, 1);
  if (way == 4) __syncwarp(0x2u);
  if (way == 5) *reinterpret_cast<int4*>(out + 1) = make_int4(1, 2, 3, 4);
  if (way == 6) shared[1024 + thread] = 0;
  if (way == 7) copy_async_16(out, out);
  if (way == 8 && thread % 32 != 9) __syncwarp();
  if (way == 9) out[64 + thread] = 1;
  if (way == 10) out[thread] = thread / out[thread];
  if (way == 0 || way == 8) __syncthreads();
}
