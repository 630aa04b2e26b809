// Common part of the linear kernels: tiles staged through shared memory, the reduction order over the depth, and the merge of
// partial sums of several blocks. A Product computes products; its Weight copies the weight.
//
// Reduction order: it depends on the depth only. The depth is cut into a few chunks of a length given by the host (chunk_units
// times 128 bytes of a row). The products of a chunk are summed from zero, ascending, in one fp32 accumulator. The chunks' sums
// are added ascending in fp32, then the bias, then one rounding. A block computes all chunks, or one chunk; it then stores the
// sum in `partials`; the last block to arrive adds the chunks. Both do the same additions in the same order, so the bits are
// independent of the tile, the split and the batch size.
#pragma once

namespace quintet {

constexpr int CHUNK_UNIT = 128;  // bytes of a row; chunks are multiples of it
constexpr int BAND = 8;  // tiles of rows that use one tile of columns before the next: both stay in L2

// Offset in a stage of a pack of 16 bytes, for rows of PACKS packs. The packs of a row are permuted by the row's index. So the
// same pack of eight consecutive rows is in eight different groups of four banks, and reads have no bank conflict.
template <int PACKS>
__device__ __forceinline__ int staged(int row, int pack) {
  static_assert(PACKS == 4 || PACKS == 8, "eight rows of 128 bytes, or four pairs of rows of 64");
  return (row * PACKS + (pack ^ (row / (8 / PACKS) % PACKS))) * 16;
}

struct LinearProblem {
  int num_rows, columns, depth;
  long long x_stride, out_stride;  // in numbers, between two rows
  int chunk_units;
  int wide = 0;  // 1: results are fp32, not rounded to a 16-bit format
};

// Neutral element of addition; +0.0 is not, since -0.0 would become +0.0.
constexpr float NOTHING = -0.0f;

// Starts the copy of `ROWS` rows of a matrix, one step deep, into a stage; zeros beyond the matrix.
template <class T, int THREADS, int PACKS, int ROWS>
__device__ __forceinline__ void copy_rows(
    unsigned char* stage, const T* matrix, long long stride, int first, int end, int k, int end_k) {
  constexpr int PACK = 16 / int(sizeof(T));
  constexpr int ROWS_AT_ONCE = THREADS / PACKS;
  static_assert(ROWS % ROWS_AT_ONCE == 0, "every thread copies the same number of packs");
  const int pack = threadIdx.x % PACKS;
  const int row = threadIdx.x / PACKS;
  const T* source = matrix + (long long)(first + row) * stride + k + pack * PACK;
  const bool inside = k + pack * PACK < end_k;
#pragma unroll
  for (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
    copy_async_16(stage + staged<PACKS>(row + i, pack), source, inside && first + row + i < end);
    source += ROWS_AT_ONCE * stride;
  }
}

// A weight in the layout of checkpoints: [columns, depth] numbers of T.
template <class T, int THREADS, int PACKS, int N>
struct RowMajorWeight {
  static constexpr int STAGE_BYTES = N * PACKS * 16;
  const T* numbers;

  // Starts the copy of N columns of the step at k into a stage; zeros from end_k on.
  __device__ __forceinline__ void copy(
      unsigned char* stage, const LinearProblem& problem, int first_column, int k, int end_k) const {
    copy_rows<T, THREADS, PACKS, N>(stage, numbers, problem.depth, first_column, problem.columns, k, end_k);
  }
};

// y[TILE_M, TILE_N] by one block of Product::THREADS threads. Each thread owns Product::FRAGMENTS fragments of four results.
template <class T, class Product, int STAGES>
struct LinearTile {
  using Weight = typename Product::Weight;
  using Out = typename Product::Out;
  static constexpr int THREADS = Product::THREADS;
  static constexpr int FRAGMENTS = Product::FRAGMENTS;
  static constexpr int PACKS = Product::PACKS;  // of a row, in one stage
  static constexpr int PACK = 16 / int(sizeof(T));
  static constexpr int STEP = PACKS * PACK;
  static constexpr int X_BYTES = Product::TILE_M * PACKS * 16;
  static constexpr int STAGE_BYTES = X_BYTES + Weight::STAGE_BYTES;
  static_assert(STAGE_BYTES % 16 == 0, "whole packs");
  static_assert(FRAGMENTS * THREADS * 4 == Product::TILE_M * Product::TILE_N, "every result has one owner");
  static_assert(STAGES >= 2, "a stage is filled while another is read");

  static __device__ __forceinline__ void run(
      unsigned char* shared, const T* x, const Weight& weight, const Out* bias, Out* out, float* partials, int* tickets,
      const LinearProblem& problem) {
    int first_row, first_column;
    place(problem, first_row, first_column);
    compute(shared, x, weight, bias, out, partials, tickets, problem, first_row, first_column);
  }

  // Computes the first row and column of this block's tile.
  static __device__ __forceinline__ void place(const LinearProblem& problem, int& first_row, int& first_column) {
    const int tiles_n = (problem.columns + Product::TILE_N - 1) / Product::TILE_N;
    const int tiles_m = (problem.num_rows + Product::TILE_M - 1) / Product::TILE_M;
    const int band = int(blockIdx.x) / (BAND * tiles_n);
    const int in_band = int(blockIdx.x) % (BAND * tiles_n);
    const int band_height = tiles_m - band * BAND < BAND ? tiles_m - band * BAND : BAND;
    first_row = (band * BAND + in_band % band_height) * Product::TILE_M;
    first_column = in_band / band_height * Product::TILE_N;
  }

  // Computes the tile at this position.
  static __device__ __forceinline__ void compute(
      unsigned char* shared, const T* x, const Weight& weight, const Out* bias, Out* out, float* partials, int* tickets,
      const LinearProblem& problem, int first_row, int first_column) {
    const bool is_split = gridDim.y > 1;
    const int all_steps = (problem.depth + STEP - 1) / STEP;
    const int chunk_steps = problem.chunk_units * (CHUNK_UNIT / (PACKS * 16));
    const int first = is_split ? int(blockIdx.y) * chunk_steps : 0;
    const int end = is_split && first + chunk_steps < all_steps ? first + chunk_steps : all_steps;

    // Steps beyond the last one copy zeros and read nothing. A branch would separate the copies from the products around them.
    const int end_k = end * STEP < problem.depth ? end * STEP : problem.depth;
    auto fill = [&](int step, int stage) {
      unsigned char* into = shared + stage * STAGE_BYTES;
      copy_rows<T, THREADS, PACKS, Product::TILE_M>(
          into, x, problem.x_stride, first_row, problem.num_rows, step * STEP, end_k);
      weight.copy(into + X_BYTES, problem, first_column, step * STEP, end_k);
      copy_async_commit();
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) fill(first + i, i);

    float sum[FRAGMENTS][4];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[f][e] = 0.0f;

    // Sum of the previous chunks, stored after the stages, since it would need too many registers. A thread owns its fragments.
    float4* total = reinterpret_cast<float4*>(shared + STAGES * STAGE_BYTES) + threadIdx.x;
    int stage = 0, in_chunk = 0;
    bool is_first = true;
    for (int step = first; step < end; ++step) {
      if (in_chunk == chunk_steps) {
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f) {
          total[f * THREADS] = joined(is_first, total + f * THREADS, sum[f]);
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[f][e] = 0.0f;
        }
        is_first = false;
        in_chunk = 0;
      }
      ++in_chunk;
      copy_async_wait<STAGES - 2>();  // waits for the oldest of this thread's groups: this step's
      __syncthreads();                // copies of all threads have arrived; the stage to be filled next is free
      const unsigned char* here = shared + stage * STAGE_BYTES;
      Product::add(
          sum, here, here + X_BYTES, weight, [&] { fill(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1); });
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copy_async_wait<0>();  // waits for the zeros after the last step: they could arrive in the next block's shared memory
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      const float4 all = joined(is_first, total + f * THREADS, sum[f]);
      sum[f][0] = all.x, sum[f][1] = all.y, sum[f][2] = all.z, sum[f][3] = all.w;
    }

    if (is_split && !meet(shared, sum, partials, tickets, first_row, problem)) return;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) Product::store(f, sum[f], weight, bias, out, first_row, first_column, problem);
  }

  // Adds a chunk to the previous chunks, if there are any.
  static __device__ __forceinline__ float4 joined(bool is_first, const float4* before, const float (&sum)[4]) {
    if (is_first) return make_float4(sum[0], sum[1], sum[2], sum[3]);
    return make_float4(before->x + sum[0], before->y + sum[1], before->z + sum[2], before->w + sum[3]);
  }

  // Stores this chunk's sums. The last block to arrive for the tile adds all chunks and returns true.
  static __device__ __forceinline__ bool meet(
      unsigned char* shared, float (&sum)[FRAGMENTS][4], float* partials, int* tickets, int first_row,
      const LinearProblem& problem) {
    // A thread's fragment of four is 16 bytes; the fragments of a block are contiguous. Rows beyond the last one are not
    // stored.
    constexpr long long CHUNK = (long long)FRAGMENTS * THREADS * 4;
    float* of_tile = partials + (long long)blockIdx.x * gridDim.y * CHUNK + threadIdx.x * 4;
    float* mine = of_tile + blockIdx.y * CHUNK;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
      if (first_row + Product::row(f) < problem.num_rows)
        *reinterpret_cast<float4*>(mine + f * THREADS * 4) =
            make_float4(sum[f][0], sum[f][1], sum[f][2], sum[f][3]);
    __threadfence();  // release: this thread's stores precede its ticket
    __syncthreads();
    int* place = reinterpret_cast<int*>(shared + STAGES * STAGE_BYTES);  // not in a stage, where zeros may still arrive
    if (threadIdx.x == 0) *place = atomicAdd(tickets + blockIdx.x, 1);
    __syncthreads();
    if (*place + 1 != int(gridDim.y)) return false;
    __threadfence();  // acquire: stores before the other blocks' tickets are visible
    if (threadIdx.x == 0) tickets[blockIdx.x] = 0;  // for the next launch
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[f][e] = NOTHING;
    for (int chunk = 0; chunk < int(gridDim.y); ++chunk) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        if (first_row + Product::row(f) >= problem.num_rows) continue;
        const float4 part = *reinterpret_cast<const float4*>(of_tile + chunk * CHUNK + f * THREADS * 4);
        sum[f][0] += part.x, sum[f][1] += part.y, sum[f][2] += part.z, sum[f][3] += part.w;
      }
    }
    return true;
  }
};

}  // namespace quintet
