// y = x . weight^T (+ bias) with a quantized weight of 4-bit or 8-bit codes: (code - zero) * scale - minimum, or a float of
// that width times a scale. Adjacent inputs of a column form a group with one zero point, scale and minimum. x: [num_rows,
// depth] in fp16 or bf16.
//
// Ownership: blocks, warps and stages as in linear.cu, with tiles of 64 columns. A step is 64 of the depth, 128 bytes of each
// row of x. The weight of a step is read in bricks: 16 columns, 512 or 1024 contiguous bytes. A lane's codes in a brick are 16
// or 32 contiguous bytes; one load from shared memory gives its fragments of the step's products (after Frantar, Castro, Chen,
// Hoefler, Alistarh, MARLIN, 2024, section 3.4; codes.cuh describes our order). Codes are converted to the format of x in
// registers, exactly.
// Bytes: a step of 16 rows is 2 KiB of x (less for fewer rows), 2 or 4 KiB of codes and 256 bytes for each group. Limiter:
// memory up to about 32 rows. 8 stages have 14 or 28 KiB of codes in flight per block. Three or four blocks share a Hopper
// multiprocessor, so they exceed the required 40 KiB (4.8 TB/s times 1 us over 132 multiprocessors). Beyond 32 rows the limiter
// is matrix instructions and code conversion, a quarter of the products' instructions for a tile of 64 rows.
//
// Reduction order: a run of 16, 32 or 64 inputs is summed from zero by matrix instructions, k ascending, in fp32. The run's sum
// times its scale is added to the chunk with one rounding. With minima, the minimum times the run's sum of x is then subtracted
// with one rounding. Chunks as in linear_tile.cuh. The order depends on depth and groups, not on the batch size, the tile or
// the split.
#include "device.cuh"
#include "codes.cuh"
#include "linear_tile.cuh"
#include "linear_tensor.cuh"

using namespace quintet;

namespace {

constexpr int BRICK_COLUMNS = 16, STEP_DEPTH = 64;
constexpr int MOST_RUNS = 4;  // of 16 k in a step

// Bricks [columns / 16, steps], each [16 bytes of 4 k steps of 16, or of 2 and 2][lanes][16 bytes]. Scales, zeros and minima:
// [groups, width]; `width` is the columns, rounded up to 64. zeros and minima may be null.
template <int BITS, int N, int THREADS>
struct CodedWeight {
  static constexpr int BRICK_BYTES = BRICK_COLUMNS * STEP_DEPTH * BITS / 8;
  static constexpr int CODES = N / BRICK_COLUMNS * BRICK_BYTES;
  static constexpr int SCALES = MOST_RUNS * N * 4, ZEROS = MOST_RUNS * N;
  static constexpr int STAGE_BYTES = CODES + 2 * SCALES + ZEROS;
  static_assert(CODES % (THREADS * 16) == 0, "every thread copies the same number of packs of codes");
  static_assert(MOST_RUNS * N / 4 <= THREADS, "and at most one of scales, minima and zeros");

  const unsigned char* codes;
  const float* scales;
  const unsigned char* zeros;
  const float* minima;
  int width, steps;
  int run_shift;    // a run is 16 << run_shift inputs
  int group_shift;  // a group is 1 << group_shift runs

  // Bytes of the codes and number of groups of one weight, if several weights are contiguous.
  __device__ __forceinline__ long long num_bytes() const { return (long long)(width / BRICK_COLUMNS) * steps * BRICK_BYTES; }
  __device__ __forceinline__ int num_groups() const { return (((steps * MOST_RUNS) >> run_shift) - 1 >> group_shift) + 1; }

  __device__ __forceinline__ CodedWeight at(int index) const {
    const long long before = (long long)index * num_groups() * width;
    return {codes + index * num_bytes(), scales + before, zeros ? zeros + before : nullptr,
            minima ? minima + before : nullptr, width, steps, run_shift, group_shift};
  }

  // Starts the copy of N columns of the step at k into a stage; zeros from end_k on.
  __device__ __forceinline__ void copy(
      unsigned char* stage, const LinearProblem&, int first_column, int k, int end_k) const {
    const bool inside = k < end_k;
    const int step = k / STEP_DEPTH;
    constexpr int PACKS_OF_BRICK = BRICK_BYTES / 16;
#pragma unroll
    for (int i = 0; i < CODES / 16; i += THREADS) {
      const int pack = i + threadIdx.x, brick = first_column / BRICK_COLUMNS + pack / PACKS_OF_BRICK;
      const unsigned char* source = codes + ((long long)brick * steps + step) * BRICK_BYTES + pack % PACKS_OF_BRICK * 16;
      copy_async_16(stage + pack * 16, source, inside);
    }
    const int runs = MOST_RUNS >> run_shift;
    const int run = int(threadIdx.x) / (N / 4), run_of_zeros = int(threadIdx.x) / (N / 16);
    if (run < runs) {
      const long long from = (long long)(step * runs + run >> group_shift) * width + first_column + threadIdx.x % (N / 4) * 4;
      const bool begins = inside && k + (run << run_shift) * 16 < end_k;
      copy_async_16(stage + CODES + threadIdx.x * 16, scales + from, begins);
      if (minima) copy_async_16(stage + CODES + SCALES + threadIdx.x * 16, minima + from, begins);
    }
    if (zeros && run_of_zeros < runs) {
      const long long from =
          (long long)(step * runs + run_of_zeros >> group_shift) * width + first_column + threadIdx.x % (N / 16) * 16;
      const bool begins = inside && k + (run_of_zeros << run_shift) * 16 < end_k;
      copy_async_16(stage + CODES + 2 * SCALES + threadIdx.x * 16, zeros + from, begins);
    }
  }
};

template <class T, template <class> class Codes, int M, int N, int WARPS_M, int WARPS_N>
struct CodedProduct : TensorTile<T, M, N, WARPS_M, WARPS_N> {
  using Tile = TensorTile<T, M, N, WARPS_M, WARPS_N>;
  using Tile::FRAGMENTS, Tile::TALL, Tile::THREADS, Tile::WARP_N, Tile::WIDE;
  using Tile::column, Tile::lane, Tile::warp_column, Tile::warp_row;
  using Code = Codes<T>;
  static constexpr int PACKS = 8;
  using Weight = CodedWeight<Code::BITS, N, THREADS>;
  static constexpr int BRICKS = WARP_N / BRICK_COLUMNS;
  static constexpr int WORDS_OF_K = Code::BITS / 4, WORDS = 4 * WORDS_OF_K;  // of a brick, per lane
  static_assert(STEP_DEPTH * 2 == PACKS * 16, "steps of the codes are steps of x");

  // Calls `refill` after the first products.
  template <class Refill>
  static __device__ __forceinline__ void add(
      float (&sum)[FRAGMENTS][4], const unsigned char* x, const unsigned char* stage, const Weight& weight,
      Refill refill) {
    const int x_row = warp_row() + lane() % 16, x_half = lane() / 16;
    const int first_brick = warp_column() / BRICK_COLUMNS;
    const float* scales = reinterpret_cast<const float*>(stage + Weight::CODES);
    const float* minima = reinterpret_cast<const float*>(stage + Weight::CODES + Weight::SCALES);
    const unsigned char* zeros = stage + Weight::CODES + 2 * Weight::SCALES;
    const int in_run = (1 << weight.run_shift) - 1;

    uint32_t words[BRICKS][WORDS];
#pragma unroll
    for (int brick = 0; brick < BRICKS; ++brick)
#pragma unroll
      for (int i = 0; i < WORDS; i += 4) {
        const uint4 quad = *reinterpret_cast<const uint4*>(
            stage + (first_brick + brick) * Weight::BRICK_BYTES + (i / 4 * 32 + lane()) * 16);
        words[brick][i] = quad.x, words[brick][i + 1] = quad.y, words[brick][i + 2] = quad.z, words[brick][i + 3] = quad.w;
      }
    uint32_t a[2][TALL][4];  // double-buffered: loads of the next step overlap the products
    auto load = [&](int k) {
#pragma unroll
      for (int i = 0; i < TALL; ++i) load_matrix_x4(a[k % 2][i], x + staged<PACKS>(x_row + i * 16, 2 * k + x_half));
    };
    load(0);

    float part[FRAGMENTS][4], x_part[TALL][4];  // of the run: the sum of products, and of x
    uint32_t less[WIDE];
#pragma unroll
    for (int k = 0; k < PACKS / 2; ++k) {
      if (2 * k + 2 < PACKS) load(k + 1);
      const int run = k >> weight.run_shift;
      if ((k & in_run) == 0) {
#pragma unroll
        for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
          for (int e = 0; e < 4; ++e) part[f][e] = 0.0f;
#pragma unroll
        for (int i = 0; i < TALL; ++i)
#pragma unroll
          for (int e = 0; e < 4; ++e) x_part[i][e] = 0.0f;
#pragma unroll
        for (int j = 0; j < WIDE; ++j)
          less[j] = Code::less(
              weight.zeros ? uint32_t(zeros[run * N + warp_column() + j * 8 + lane() / 4]) : weight.minima ? 0u : Code::ZERO);
      }
#pragma unroll
      for (int j = 0; j < WIDE; ++j) {
        uint32_t b[2];
        Code::fragments(words[j / 2] + k * WORDS_OF_K, j % 2, less[j], b);
#pragma unroll
        for (int i = 0; i < TALL; ++i) mma_16x8x16<T>(part[i * WIDE + j], a[k % 2][i], b);
      }
      if (weight.minima) {
        const uint32_t ones[2] = {LargePair<T>::ONES, LargePair<T>::ONES};
#pragma unroll
        for (int i = 0; i < TALL; ++i) mma_16x8x16<T>(x_part[i], a[k % 2][i], ones);
      }
      if (k == 0) refill();
      if ((k & in_run) != in_run) continue;
#pragma unroll
      for (int f = 0; f < FRAGMENTS; ++f) {
        const float2 scale = *reinterpret_cast<const float2*>(scales + run * N + column(f));
        sum[f][0] = fmaf(scale.x, part[f][0], sum[f][0]), sum[f][1] = fmaf(scale.y, part[f][1], sum[f][1]);
        sum[f][2] = fmaf(scale.x, part[f][2], sum[f][2]), sum[f][3] = fmaf(scale.y, part[f][3], sum[f][3]);
        if (!weight.minima) continue;
        const float2 least = *reinterpret_cast<const float2*>(minima + run * N + column(f));
        const float(&of_x)[4] = x_part[f / WIDE];
        sum[f][0] = fmaf(-least.x, of_x[0], sum[f][0]), sum[f][1] = fmaf(-least.y, of_x[1], sum[f][1]);
        sum[f][2] = fmaf(-least.x, of_x[2], sum[f][2]), sum[f][3] = fmaf(-least.y, of_x[3], sum[f][3]);
      }
    }
  }
};

}  // namespace

// Grid, shared memory, `partials` and `tickets` as in linear.cu; a stage is M * 128 bytes and the weight's STAGE_BYTES. Rows of
// x and the weight's arrays are 16-byte aligned. `width`: the columns, rounded up to 64. `wide`: as in linear.cu.
// `tiles`: null, or grouped rows with a weight and a bias per group, as in LINEAR_GROUPS of linear.cu; `num_rows` is then the
// number of tiles.
#define CODED(SHAPE, T, STAGES, BLOCKS, ...)                                                                          \
  QT_KERNEL_OCCUPANCY(                                                                                                \
      (__VA_ARGS__::THREADS), BLOCKS, coded_##SHAPE,                                                                  \
      (const T* x, const unsigned char* codes, const float* scales, const unsigned char* zeros, const float* minima,  \
       const T* bias, T* out, float* partials, int* tickets, const int* tiles, int num_rows, int columns, int depth,  \
       long long x_stride, long long out_stride, int chunk_units, int width, int run_shift, int group_shift,          \
       int wide)) {                                                                                                   \
    QT_DYNAMIC_SHARED(shared);                                                                                        \
    using Tile = LinearTile<T, __VA_ARGS__, STAGES>;                                                                  \
    __VA_ARGS__::Weight weight{codes, scales, zeros, minima,                                                          \
                               width, (depth + STEP_DEPTH - 1) / STEP_DEPTH, run_shift, group_shift};                 \
    LinearProblem problem{num_rows, columns, depth, x_stride, out_stride, chunk_units, wide};                         \
    int first_row, first_column;                                                                                      \
    if (tiles) {                                                                                                      \
      const int tile = int(blockIdx.x) % num_rows, group = tiles[tile];                                               \
      if (group < 0) return;                                                                                          \
      first_row = tiles[num_rows + tile], first_column = int(blockIdx.x) / num_rows * __VA_ARGS__::TILE_N;            \
      problem.num_rows = tiles[2 * num_rows + tile];                                                                  \
      weight = weight.at(group);                                                                                      \
      if (bias) bias += (long long)group * columns;                                                                   \
    } else {                                                                                                          \
      Tile::place(problem, first_row, first_column);                                                                  \
    }                                                                                                                 \
    Tile::compute(shared, x, weight, bias, out, partials, tickets, problem, first_row, first_column);                 \
  }

#define CODED_OF(CODES, SUFFIX, T)                                                     \
  CODED(16x64_##CODES##_##SUFFIX, T, 8, 3, CodedProduct<T, CODES, 16, 64, 1, 4>)       \
  CODED(32x64_##CODES##_##SUFFIX, T, 6, 3, CodedProduct<T, CODES, 32, 64, 1, 4>)       \
  CODED(64x64_##CODES##_##SUFFIX, T, 4, 2, CodedProduct<T, CODES, 64, 64, 2, 2>)
#define CODED_16_BITS(CODES) CODED_OF(CODES, bf16, bf16) CODED_OF(CODES, fp16, fp16)

CODED_16_BITS(Int4)
CODED_16_BITS(Int8)
CODED_16_BITS(Fp8)
CODED_16_BITS(Fp4)
