// What the kernels of linear.cu share: tiles staged through shared memory, the order of the sum over the depth, and how
// blocks that hold parts of one sum meet. Does not know how products are made: a Product (in linear.cu) does.
//
// The order, which depends on the depth and nothing else. The depth is cut into a few chunks of a length given by the
// host (chunk_steps steps of 128 bytes). A chunk's products are summed from zero in ascending order in one fp32
// accumulator; the chunks' sums are added in ascending order in fp32; then the bias; then one rounding. A block either
// goes through all chunks itself, or does one of them and leaves its sum in `partials`, where the block that arrives last
// adds them: the same additions in the same order, so the same bits whatever the tile, the split and the other rows.
#pragma once

namespace quintet {

constexpr int STEP_BYTES = 128;  // of a row, in one stage
constexpr int STEP_PACKS = STEP_BYTES / 16;
constexpr int BAND = 8;  // tiles of rows that take turns on one tile of columns before the next: both stay in L2

// The offset in a stage of a pack of 16 bytes. Rows are 128 bytes, and their packs change places by the row's number, so
// that the same pack of eight rows in turn lies in eight different groups of four banks: reading it has no conflict.
__device__ __forceinline__ int staged(int row, int pack) { return row * STEP_BYTES + ((pack ^ (row & 7)) * 16); }

struct LinearProblem {
  int num_rows, columns, depth;
  long long x_stride, out_stride;  // numbers between two rows
  int chunk_steps;
};

// Adding to it leaves every number as it is; to +0.0 not: -0.0 would become +0.0.
constexpr float NOTHING = -0.0f;

// y[TILE_M, TILE_N] by one block of Product::THREADS threads. Each thread owns Product::FRAGMENTS groups of four results.
template <class T, class Product, int STAGES>
struct LinearTile {
  static constexpr int THREADS = Product::THREADS;
  static constexpr int FRAGMENTS = Product::FRAGMENTS;
  static constexpr int STEP = STEP_BYTES / int(sizeof(T));
  static constexpr int PACK = 16 / int(sizeof(T));
  static constexpr int X_BYTES = Product::TILE_M * STEP_BYTES;
  static constexpr int STAGE_BYTES = X_BYTES + Product::TILE_N * STEP_BYTES;
  static_assert(STAGES >= 2, "a stage is filled while another is read");

  // Start to copy `ROWS` rows of a matrix, one step deep, into a stage; zeros where the matrix has ended.
  template <int ROWS>
  static __device__ __forceinline__ void copy(
      unsigned char* stage, const T* matrix, long long stride, int first, int end, int k, int depth) {
    constexpr int ROWS_AT_ONCE = THREADS / STEP_PACKS;
    static_assert(ROWS % ROWS_AT_ONCE == 0, "every thread copies the same number of packs");
    const int pack = threadIdx.x % STEP_PACKS;
    const int row = threadIdx.x / STEP_PACKS;
    const T* source = matrix + (long long)(first + row) * stride + k + pack * PACK;
    const bool inside = k + pack * PACK < depth;
#pragma unroll
    for (int i = 0; i < ROWS; i += ROWS_AT_ONCE) {
      copy_async_16(stage + staged(row + i, pack), source, inside && first + row + i < end);
      source += ROWS_AT_ONCE * stride;
    }
  }

  static __device__ __forceinline__ void run(
      unsigned char* shared, const T* x, const T* weight, const T* bias, T* out, float* partials, int* tickets,
      const LinearProblem& problem) {
    const int tiles_n = (problem.columns + Product::TILE_N - 1) / Product::TILE_N;
    const int tiles_m = (problem.num_rows + Product::TILE_M - 1) / Product::TILE_M;
    const int band = int(blockIdx.x) / (BAND * tiles_n);
    const int in_band = int(blockIdx.x) % (BAND * tiles_n);
    const int band_height = tiles_m - band * BAND < BAND ? tiles_m - band * BAND : BAND;
    const int first_row = (band * BAND + in_band % band_height) * Product::TILE_M;
    const int first_column = in_band / band_height * Product::TILE_N;

    const bool is_split = gridDim.y > 1;
    const int all_steps = (problem.depth + STEP - 1) / STEP;
    const int first = is_split ? int(blockIdx.y) * problem.chunk_steps : 0;
    const int end = is_split && first + problem.chunk_steps < all_steps ? first + problem.chunk_steps : all_steps;

    auto fill = [&](int step, int stage) {
      unsigned char* into = shared + stage * STAGE_BYTES;
      copy<Product::TILE_M>(
          into, x, problem.x_stride, first_row, problem.num_rows, step * STEP, problem.depth);
      copy<Product::TILE_N>(
          into + X_BYTES, weight, problem.depth, first_column, problem.columns, step * STEP, problem.depth);
    };
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
      if (first + i < end) fill(first + i, i);
      copy_async_commit();
    }

    float sum[FRAGMENTS][4], total[FRAGMENTS][4];
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[f][e] = 0.0f, total[f][e] = NOTHING;

    int stage = 0, in_chunk = 0;
    for (int step = first; step < end; ++step) {
      copy_async_wait<STAGES - 2>();  // the oldest of this thread's groups: this step's
      __syncthreads();                // everybody's; and everybody is done with the stage that is filled next
      const int ahead = step + STAGES - 1;
      if (ahead < end) fill(ahead, stage == 0 ? STAGES - 1 : stage - 1);
      copy_async_commit();  // an empty group too: the wait above counts them
      const unsigned char* here = shared + stage * STAGE_BYTES;
      Product::add(sum, here, here + X_BYTES);
      stage = stage + 1 == STAGES ? 0 : stage + 1;
      if (++in_chunk == problem.chunk_steps || step + 1 == end) {
        in_chunk = 0;
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
          for (int e = 0; e < 4; ++e) total[f][e] += sum[f][e], sum[f][e] = 0.0f;
      }
    }

    if (is_split && !meet(shared, total, partials, tickets, first_row, problem)) return;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f) Product::store(f, total[f], bias, out, first_row, first_column, problem);
  }

  // Leave this chunk's sums for the last block of the tile to arrive; that one adds all and returns true.
  static __device__ __forceinline__ bool meet(
      unsigned char* shared, float (&total)[FRAGMENTS][4], float* partials, int* tickets, int first_row,
      const LinearProblem& problem) {
    // A thread's group of four is 16 bytes, a group of the whole block contiguous; rows beyond the last are left out.
    constexpr long long CHUNK = (long long)FRAGMENTS * THREADS * 4;
    float* of_tile = partials + (long long)blockIdx.x * gridDim.y * CHUNK + threadIdx.x * 4;
    float* mine = of_tile + blockIdx.y * CHUNK;
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
      if (first_row + Product::row(f) < problem.num_rows)
        *reinterpret_cast<float4*>(mine + f * THREADS * 4) =
            make_float4(total[f][0], total[f][1], total[f][2], total[f][3]);
    __threadfence();  // what this thread wrote is there before the ticket that says so
    __syncthreads();
    int* place = reinterpret_cast<int*>(shared);  // no copy is under way and nobody reads a stage any more
    if (threadIdx.x == 0) *place = atomicAdd(tickets + blockIdx.x, 1);
    __syncthreads();
    if (*place + 1 != int(gridDim.y)) return false;
    __threadfence();  // what the others wrote before their tickets is read after this one
    if (threadIdx.x == 0) tickets[blockIdx.x] = 0;  // for the next launch
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) total[f][e] = NOTHING;
    for (int chunk = 0; chunk < int(gridDim.y); ++chunk) {
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        if (first_row + Product::row(f) >= problem.num_rows) continue;
        const float4 part = *reinterpret_cast<const float4*>(of_tile + chunk * CHUNK + f * THREADS * 4);
        total[f][0] += part.x, total[f][1] += part.y, total[f][2] += part.z, total[f][3] += part.w;
      }
    }
    return true;
  }
};

}  // namespace quintet
