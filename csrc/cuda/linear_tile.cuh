// What the kernels of linear.cu and linear_coded.cu share: tiles staged through shared memory, the order of the sum over the
// depth, and how blocks that hold parts of one sum meet. Does not know how products are made, nor what a weight looks like: a
// Product does, and its Weight.
//
// The order, which depends on the depth and nothing else. The depth is cut into a few chunks of a length given by the
// host (chunk_units times 128 bytes of a row). A chunk's products are summed from zero in ascending order in one fp32
// accumulator; the chunks' sums are added in ascending order in fp32; then the bias; then one rounding. A block either
// goes through all chunks itself, or does one of them and leaves its sum in `partials`, where the block that arrives last
// adds them: the same additions in the same order, so the same bits whatever the tile, the split and the other rows.
#pragma once

namespace quintet {

constexpr int CHUNK_UNIT = 128;  // bytes of a row: what chunks are multiples of
constexpr int BAND = 8;  // tiles of rows that take turns on one tile of columns before the next: both stay in L2

// The offset in a stage of a pack of 16 bytes, of rows of PACKS packs. The packs of a row change places by the row's
// number, so that the same pack of eight rows in turn lies in eight different groups of four banks: reading it has no
// conflict.
template <int PACKS>
__device__ __forceinline__ int staged(int row, int pack) {
  static_assert(PACKS == 4 || PACKS == 8, "eight rows of 128 bytes, or four pairs of rows of 64");
  return (row * PACKS + (pack ^ (row / (8 / PACKS) % PACKS))) * 16;
}

struct LinearProblem {
  int num_rows, columns, depth;
  long long x_stride, out_stride;  // numbers between two rows
  int chunk_units;
  int wide = 0;  // whether results are fp32, not rounded to a format of 16 bits
};

// Adding to it leaves every number as it is; to +0.0 not: -0.0 would become +0.0.
constexpr float NOTHING = -0.0f;

// Start to copy `ROWS` rows of a matrix, one step deep, into a stage; zeros where the matrix has ended.
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

// A weight as checkpoints have it: [columns, depth] numbers of T.
template <class T, int THREADS, int PACKS, int N>
struct RowMajorWeight {
  static constexpr int STAGE_BYTES = N * PACKS * 16;
  const T* numbers;

  // Start to copy N columns, the step that begins at k, into a stage; zeros from end_k on.
  __device__ __forceinline__ void copy(
      unsigned char* stage, const LinearProblem& problem, int first_column, int k, int end_k) const {
    copy_rows<T, THREADS, PACKS, N>(stage, numbers, problem.depth, first_column, problem.columns, k, end_k);
  }
};

// y[TILE_M, TILE_N] by one block of Product::THREADS threads. Each thread owns Product::FRAGMENTS groups of four results.
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

  // Where this block's tile begins, of all tiles of the problem.
  static __device__ __forceinline__ void place(const LinearProblem& problem, int& first_row, int& first_column) {
    const int tiles_n = (problem.columns + Product::TILE_N - 1) / Product::TILE_N;
    const int tiles_m = (problem.num_rows + Product::TILE_M - 1) / Product::TILE_M;
    const int band = int(blockIdx.x) / (BAND * tiles_n);
    const int in_band = int(blockIdx.x) % (BAND * tiles_n);
    const int band_height = tiles_m - band * BAND < BAND ? tiles_m - band * BAND : BAND;
    first_row = (band * BAND + in_band % band_height) * Product::TILE_M;
    first_column = in_band / band_height * Product::TILE_N;
  }

  // The tile that begins there.
  static __device__ __forceinline__ void compute(
      unsigned char* shared, const T* x, const Weight& weight, const Out* bias, Out* out, float* partials, int* tickets,
      const LinearProblem& problem, int first_row, int first_column) {
    const bool is_split = gridDim.y > 1;
    const int all_steps = (problem.depth + STEP - 1) / STEP;
    const int chunk_steps = problem.chunk_units * (CHUNK_UNIT / (PACKS * 16));
    const int first = is_split ? int(blockIdx.y) * chunk_steps : 0;
    const int end = is_split && first + chunk_steps < all_steps ? first + chunk_steps : all_steps;

    // Beyond the last step: zeros, and nothing is read. A branch would keep the copies apart from the products around them.
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

    // The sum of the chunks before this one: after the stages, where registers would be too many. A thread's own groups.
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
      copy_async_wait<STAGES - 2>();  // the oldest of this thread's groups: this step's
      __syncthreads();                // all threads' copies; all are done with the stage that is filled next
      const unsigned char* here = shared + stage * STAGE_BYTES;
      Product::add(
          sum, here, here + X_BYTES, weight, [&] { fill(step + STAGES - 1, stage == 0 ? STAGES - 1 : stage - 1); });
      stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    copy_async_wait<0>();  // the zeros after the last step: they would arrive in what the next block may own
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) {
      const float4 all = joined(is_first, total + f * THREADS, sum[f]);
      sum[f][0] = all.x, sum[f][1] = all.y, sum[f][2] = all.z, sum[f][3] = all.w;
    }

    if (is_split && !meet(shared, sum, partials, tickets, first_row, problem)) return;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) Product::store(f, sum[f], weight, bias, out, first_row, first_column, problem);
  }

  // The chunks before, if there are any, and one more.
  static __device__ __forceinline__ float4 joined(bool is_first, const float4* before, const float (&sum)[4]) {
    if (is_first) return make_float4(sum[0], sum[1], sum[2], sum[3]);
    return make_float4(before->x + sum[0], before->y + sum[1], before->z + sum[2], before->w + sum[3]);
  }

  // Leave this chunk's sums for the last block of the tile to arrive; that one adds all and returns true.
  static __device__ __forceinline__ bool meet(
      unsigned char* shared, float (&sum)[FRAGMENTS][4], float* partials, int* tickets, int first_row,
      const LinearProblem& problem) {
    // A thread's group of four is 16 bytes, a group of the whole block contiguous; rows beyond the last are left out.
    constexpr long long CHUNK = (long long)FRAGMENTS * THREADS * 4;
    float* of_tile = partials + (long long)blockIdx.x * gridDim.y * CHUNK + threadIdx.x * 4;
    float* mine = of_tile + blockIdx.y * CHUNK;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
      if (first_row + Product::row(f) < problem.num_rows)
        *reinterpret_cast<float4*>(mine + f * THREADS * 4) =
            make_float4(sum[f][0], sum[f][1], sum[f][2], sum[f][3]);
    __threadfence();  // what this thread wrote is there before the ticket that says so
    __syncthreads();
    int* place = reinterpret_cast<int*>(shared + STAGES * STAGE_BYTES);  // no stage, where zeros may still arrive
    if (threadIdx.x == 0) *place = atomicAdd(tickets + blockIdx.x, 1);
    __syncthreads();
    if (*place + 1 != int(gridDim.y)) return false;
    __threadfence();  // what the others wrote before their tickets is read after this one
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
