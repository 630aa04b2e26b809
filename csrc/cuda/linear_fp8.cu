// y = x . weight^T (+ bias) in e4m3: rows of x are quantized to fp8 with one scale per row; the fp8 weight has one scale per
// column.
//
// quantize: a block of 128 threads owns a row, which is read twice (the second time from L2) and written once. Bytes: 3 per
// number. Limiter: memory bandwidth.
//
// Product: blocks, warps, stages and chunks as in linear.cu; a step is 128 bytes, 128 numbers of the depth. Per step a warp
// loads the same bytes as in linear.cu and multiplies twice as many numbers. Limiter: memory for few rows, then mma.sync.
//
// Reduction order: a step of 128 numbers is summed from zero by matrix instructions, k ascending; their fp8 sums keep fewer
// bits than fp32 (DeepSeek-AI, DeepSeek-V3 technical report, 2024, section 3.3.2). Steps ascending in fp32; chunks as in
// linear_tile.cuh; then the product of both scales, the bias, one rounding. It depends on the depth only, not on the batch
// size.
#include "device.cuh"
#include "linear_tile.cuh"
#include "linear_tensor.cuh"

using namespace quintet;

namespace {

constexpr int QUANTIZE_THREADS = 128;

template <class T>
__device__ __forceinline__ void quantize(const T* x, unsigned char* codes, float* scales, int depth, long long x_stride) {
  constexpr int PACK = Pack<T>::SIZE;
  const T* row = x + blockIdx.x * x_stride;
  float most = 0.0f;
  for (int i = threadIdx.x * PACK; i < depth; i += QUANTIZE_THREADS * PACK) {
    const Pack<T> pack = load_pack(row + i);
#pragma unroll
    for (int e = 0; e < PACK; ++e) most = fmaxf(most, fabsf(pack.get(e)));
  }
  most = block_max<QUANTIZE_THREADS>(most);
  const float scale = most > 0.0f ? most / FP8_MAX : 1.0f;
  if (threadIdx.x == 0) scales[blockIdx.x] = scale;
  unsigned char* out = codes + (long long)blockIdx.x * depth;
  for (int i = threadIdx.x * PACK; i < depth; i += QUANTIZE_THREADS * PACK) {
    const Pack<T> pack = load_pack(row + i);
    uint32_t words[PACK / 4];
#pragma unroll
    for (int e = 0; e < PACK; e += 4)
      words[e / 4] = uint32_t(fp8_bits_pair(pack.get(e) / scale, pack.get(e + 1) / scale)) |
                     uint32_t(fp8_bits_pair(pack.get(e + 2) / scale, pack.get(e + 3) / scale)) << 16;
#pragma unroll
    for (int word = 0; word < PACK / 4; ++word) reinterpret_cast<uint32_t*>(out + i)[word] = words[word];
  }
}

template <class Rows>
struct ScaledWeight : Rows {
  const float* of_columns;
  const float* of_rows;  // of x
};

template <class T, int M, int N, int WARPS_M, int WARPS_N>
struct Fp8Product : TensorTile<T, M, N, WARPS_M, WARPS_N> {
  using Tile = TensorTile<T, M, N, WARPS_M, WARPS_N>;
  using Tile::FRAGMENTS, Tile::TALL, Tile::THREADS, Tile::WIDE;
  using Tile::column, Tile::lane, Tile::row, Tile::warp_column, Tile::warp_row;
  static constexpr int PACKS = 8;
  using Weight = ScaledWeight<RowMajorWeight<fp8, THREADS, PACKS, N>>;

  // Calls `refill` after the first products.
  template <class Refill>
  static __device__ __forceinline__ void add(
      float (&sum)[FRAGMENTS][4], const unsigned char* x, const unsigned char* weight, const Weight&, Refill refill) {
    const int x_row = warp_row() + lane() % 16, x_half = lane() / 16;
    const int w_row = warp_column() + lane() % 8 + lane() / 16 * 8, w_half = lane() / 8 % 2;
    float part[FRAGMENTS][4] = {};
#pragma unroll
    for (int k = 0; k < PACKS / 2; ++k) {
      uint32_t a[TALL][4], b[WIDE][2];
#pragma unroll
      for (int i = 0; i < TALL; ++i) load_matrix_x4(a[i], x + staged<PACKS>(x_row + i * 16, 2 * k + x_half));
#pragma unroll
      for (int j = 0; j < WIDE; j += 2) {
        uint32_t two[4];
        load_matrix_x4(two, weight + staged<PACKS>(w_row + j * 8, 2 * k + w_half));
        b[j][0] = two[0], b[j][1] = two[1], b[j + 1][0] = two[2], b[j + 1][1] = two[3];
      }
#pragma unroll
      for (int i = 0; i < TALL; ++i)
#pragma unroll
        for (int j = 0; j < WIDE; ++j) mma_16x8x32_fp8(part[i * WIDE + j], a[i], b[j]);
      if (k == 0) refill();
    }
#pragma unroll
    for (int f = 0; f < FRAGMENTS; ++f)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[f][e] += part[f][e];
  }

  static __device__ __forceinline__ void store(
      int f, const float (&total)[4], const Weight& weight, const T* bias, T* out, int first_row, int first_column,
      const LinearProblem& problem) {
    float scaled[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int y_row = first_row + row(f) + e / 2 * 8, y_column = first_column + column(f) + e % 2;
      const bool inside = y_row < problem.num_rows && y_column < problem.columns;
      scaled[e] = inside ? total[e] * (weight.of_rows[y_row] * weight.of_columns[y_column]) : 0.0f;
    }
    Tile::store(f, scaled, weight, bias, out, first_row, first_column, problem);
  }
};

}  // namespace

// Grid: one block per row. depth is a multiple of 8; rows are 16-byte aligned.
#define QUANTIZE(SUFFIX, T)                                                                         \
  QT_KERNEL(                                                                                        \
      QUANTIZE_THREADS, fp8_quantize_##SUFFIX,                                                      \
      (const T* x, unsigned char* codes, float* scales, int depth, long long x_stride)) {           \
    quantize<T>(x, codes, scales, depth, x_stride);                                                 \
  }
QUANTIZE(bf16, bf16)
QUANTIZE(fp16, fp16)

// Grid, shared memory, `partials`, `tickets` and `wide` as in linear.cu. depth is a multiple of 16; x is contiguous.
#define FP8_LINEAR(SHAPE, T, STAGES, BLOCKS, ...)                                                                     \
  QT_KERNEL_OCCUPANCY(                                                                                                \
      (__VA_ARGS__::THREADS), BLOCKS, fp8_##SHAPE,                                                                    \
      (const fp8* x, const float* x_scales, const fp8* weight, const float* scales, const T* bias, T* out,            \
       float* partials, int* tickets, int num_rows, int columns, int depth, long long out_stride, int chunk_units,    \
       int wide)) {                                                                                                   \
    QT_DYNAMIC_SHARED(shared);                                                                                        \
    const LinearProblem problem{num_rows, columns, depth, depth, out_stride, chunk_units, wide};                      \
    const __VA_ARGS__::Weight both{{weight}, scales, x_scales};                                                       \
    LinearTile<fp8, __VA_ARGS__, STAGES>::run(shared, x, both, bias, out, partials, tickets, problem);                \
  }
#define FP8_LINEARS(SUFFIX, T)                                           \
  FP8_LINEAR(16x64_##SUFFIX, T, 6, 3, Fp8Product<T, 16, 64, 1, 4>)       \
  FP8_LINEAR(32x64_##SUFFIX, T, 5, 3, Fp8Product<T, 32, 64, 1, 4>)       \
  FP8_LINEAR(64x64_##SUFFIX, T, 3, 2, Fp8Product<T, 64, 64, 2, 2>)
FP8_LINEARS(bf16, bf16)
FP8_LINEARS(fp16, fp16)
