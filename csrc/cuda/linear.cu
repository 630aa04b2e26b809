// y = x . weight^T (+ bias): x [num_rows, depth], weight [columns, depth] in the layout of checkpoints, sums in fp32.
//
// Ownership: a block owns a tile of y; if the host splits the depth (gridDim.y > 1), it owns one chunk of that tile. It copies
// both operands through shared memory in steps of 64 or 128 bytes of depth, a few stages ahead.
// Tiles of 16 or 32 rows are for few tokens, where the limiter is the weight's bytes. They use 4 warps side by side and 64 KiB
// of shared memory. So three blocks on a Hopper multiprocessor (227 KiB) have about 100 KiB of weight in flight, more than the
// required 40 KiB (4.8 TB/s times 1 us over 132 multiprocessors).
// Tiles of 64 and 128 rows are for more tokens, where the limiter is matrix instructions. A 128x128 tile has 4 warps of 64x64.
// A step of 64 bytes is 1 MFLOP for 16 KiB copied and 32 KiB loaded to registers; shared memory delivers these in the time of
// the mma.sync instructions. Two blocks of 112 KiB use all registers, so that one multiplies while the other waits. The rate is
// that of mma.sync, on Hopper about two thirds of wgmma. These kernels are for --batch-invariant; otherwise cuBLAS is used.
//
// Reduction order: see linear_tile.cuh; it is independent of the batch size, the tile and the split. This requires that an
// element of an m16n8k16 product does not depend on its position in the tile. The hardware is designed so;
// tests/cuda/kernels/test_linear.py checks it.
#include "device.cuh"
#include "linear_tile.cuh"
#include "linear_tensor.cuh"

using namespace quintet;

namespace {

// Product on tensor cores. For 16 k, a warp loads WARP_M / 16 + WARP_N / 16 times 512 bytes from shared memory for WARP_M / 16
// * WARP_N / 8 products.
template <class T, int M, int N, int WARPS_M, int WARPS_N, int PACKS_OF_STEP>
struct TensorProduct : TensorTile<T, M, N, WARPS_M, WARPS_N> {
  using Tile = TensorTile<T, M, N, WARPS_M, WARPS_N>;
  using Tile::FRAGMENTS, Tile::TALL, Tile::THREADS, Tile::WIDE;
  using Tile::lane, Tile::warp_column, Tile::warp_row;
  static constexpr int PACKS = PACKS_OF_STEP;
  using Weight = RowMajorWeight<T, THREADS, PACKS, N>;

  // Calls `refill` after the first products, which hide its address computation.
  template <class Refill>
  static __device__ __forceinline__ void add(
      float (&sum)[FRAGMENTS][4], const unsigned char* x, const unsigned char* weight, const Weight&, Refill refill) {
    const int x_row = warp_row() + lane() % 16, x_half = lane() / 16;
    const int w_row = warp_column() + lane() % 8 + lane() / 16 * 8, w_half = lane() / 8 % 2;
    uint32_t a[2][TALL][4], b[2][WIDE][2];  // double-buffered: loads of the next step overlap the products
    auto load = [&](int k) {
#pragma unroll
      for (int i = 0; i < TALL; ++i) load_matrix_x4(a[k % 2][i], x + staged<PACKS>(x_row + i * 16, 2 * k + x_half));
#pragma unroll
      for (int j = 0; j < WIDE; j += 2) {
        uint32_t two[4];
        load_matrix_x4(two, weight + staged<PACKS>(w_row + j * 8, 2 * k + w_half));
        b[k % 2][j][0] = two[0], b[k % 2][j][1] = two[1];
        b[k % 2][j + 1][0] = two[2], b[k % 2][j + 1][1] = two[3];
      }
    };
    load(0);
#pragma unroll
    for (int k = 0; k < PACKS / 2; ++k) {
      if (2 * k + 2 < PACKS) load(k + 1);
#pragma unroll
      for (int i = 0; i < TALL; ++i)
#pragma unroll
        for (int j = 0; j < WIDE; ++j) mma_16x8x16<T>(sum[i * WIDE + j], a[k % 2][i], b[k % 2][j]);
      if (k == 0) refill();
    }
  }
};

// Product on fp32 units; each product is fused with its addition, k ascending. Thread (r, c) of 16 columns owns rows r + i *
// THREADS / 16, columns c + 16 * e: one fragment of four for each i. It reads TALL + 4 times 16 bytes for 16 * TALL products.
template <int M, int N, int NUM_THREADS>
struct FloatProduct {
  using Out = float;
  static constexpr int PACKS = 8;
  static constexpr int TILE_M = M, TILE_N = N;
  static constexpr int THREADS = NUM_THREADS;
  static constexpr int ROWS_AT_ONCE = THREADS / 16;
  static constexpr int FRAGMENTS = M / ROWS_AT_ONCE;
  using Weight = RowMajorWeight<float, THREADS, PACKS, N>;
  static_assert(N == 64 && M % ROWS_AT_ONCE == 0, "four columns a thread, whole groups");

  static __device__ __forceinline__ int row(int f) { return threadIdx.x / 16 + f * ROWS_AT_ONCE; }

  template <class Refill>
  static __device__ __forceinline__ void add(
      float (&sum)[FRAGMENTS][4], const unsigned char* x, const unsigned char* weight, const Weight&, Refill refill) {
    refill();
#pragma unroll
    for (int pack = 0; pack < PACKS; ++pack) {
      float4 a[FRAGMENTS], b[4];
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) a[f] = *reinterpret_cast<const float4*>(x + staged<PACKS>(row(f), pack));
#pragma unroll
      for (int e = 0; e < 4; ++e)
        b[e] = *reinterpret_cast<const float4*>(weight + staged<PACKS>(threadIdx.x % 16 + 16 * e, pack));
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float s = fmaf(a[f].x, b[e].x, sum[f][e]);
          s = fmaf(a[f].y, b[e].y, s);
          s = fmaf(a[f].z, b[e].z, s);
          sum[f][e] = fmaf(a[f].w, b[e].w, s);
        }
    }
  }

  static __device__ __forceinline__ void store(
      int f, const float (&total)[4], const Weight&, const float* bias, float* out, int first_row, int first_column,
      const LinearProblem& problem) {
    const int y_row = first_row + row(f);
    if (y_row >= problem.num_rows) return;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int y_column = first_column + threadIdx.x % 16 + 16 * e;
      if (y_column < problem.columns)
        out[y_row * problem.out_stride + y_column] = total[e] + (bias ? bias[y_column] : NOTHING);
    }
  }
};

}  // namespace

// Grid: tiles of rows times tiles of columns; chunks, or 1. Dynamic shared memory: stages of (M + N) * PACKS * 16 bytes, and M
// * N floats.
// x, weight and their strides are multiples of 16 bytes. `partials` and `tickets` (zeros) are used only with a split.
// wide: `out` is float for every T.
#define LINEAR(NAME, T, STAGES, BLOCKS, ...)                                                                          \
  QT_KERNEL_OCCUPANCY(                                                                                                \
      (__VA_ARGS__::THREADS), BLOCKS, NAME,                                                                           \
      (const T* x, const T* weight, const T* bias, T* out, float* partials, int* tickets, int num_rows, int columns,  \
       int depth, long long x_stride, long long out_stride, int chunk_units, int wide)) {                             \
    QT_DYNAMIC_SHARED(shared);                                                                                        \
    const LinearProblem problem{num_rows, columns, depth, x_stride, out_stride, chunk_units, wide};                   \
    LinearTile<T, __VA_ARGS__, STAGES>::run(shared, x, {weight}, bias, out, partials, tickets, problem);              \
  }

// Grouped product: each group of rows has its own weight. weight: [groups, columns, depth], bias: [groups, columns].
// tiles: [3, num_tiles]: for each tile of rows its group, its first row and the end of the group's rows; group -1: empty tile.
// Grid: tiles of rows, then of columns. Dynamic shared memory as above. The bits are those of a separate product per group.
#define LINEAR_GROUPS(NAME, T, STAGES, BLOCKS, ...)                                                                   \
  QT_KERNEL_OCCUPANCY(                                                                                                \
      (__VA_ARGS__::THREADS), BLOCKS, NAME,                                                                           \
      (const T* x, const T* weight, const T* bias, T* out, const int* tiles, int num_tiles, int columns, int depth,   \
       long long x_stride, long long out_stride, int chunk_units)) {                                                  \
    QT_DYNAMIC_SHARED(shared);                                                                                        \
    const int tile = int(blockIdx.x) % num_tiles, group = tiles[tile];                                                \
    if (group < 0) return;                                                                                            \
    const LinearProblem problem{tiles[2 * num_tiles + tile], columns, depth, x_stride, out_stride, chunk_units};      \
    LinearTile<T, __VA_ARGS__, STAGES>::compute(                                                                      \
        shared, x, {weight + (long long)group * columns * depth}, bias ? bias + (long long)group * columns : nullptr, \
        out, nullptr, nullptr, problem, tiles[num_tiles + tile],                                                      \
        int(blockIdx.x) / num_tiles * __VA_ARGS__::TILE_N);                                                           \
  }

// Number of blocks per multiprocessor: the limit of Hopper's shared memory, without fewer registers for more blocks.
#define LINEARS(SHAPE, ...) LINEAR(linear_##SHAPE, __VA_ARGS__) LINEAR_GROUPS(linear_groups_##SHAPE, __VA_ARGS__)
#define LINEAR_16_BITS(SUFFIX, T)                                        \
  LINEARS(16x64_##SUFFIX, T, 6, 3, TensorProduct<T, 16, 64, 1, 4, 8>)    \
  LINEARS(32x64_##SUFFIX, T, 5, 3, TensorProduct<T, 32, 64, 1, 4, 8>)    \
  LINEARS(64x64_##SUFFIX, T, 3, 3, TensorProduct<T, 64, 64, 2, 2, 8>)    \
  LINEARS(128x128_##SUFFIX, T, 3, 2, TensorProduct<T, 128, 128, 2, 2, 4>)

LINEAR_16_BITS(bf16, bf16)
LINEAR_16_BITS(fp16, fp16)
LINEARS(16x64_fp32, float, 4, 3, FloatProduct<16, 64, 128>)
LINEARS(64x64_fp32, float, 3, 2, FloatProduct<64, 64, 256>)
