// y = x . weight^T (+ bias) for one to four rows of x. Limiter: memory bandwidth of the weight, at 2 * rows / sizeof(T) FLOP
// per byte.
//
// Ownership: a warp owns a few rows of the weight. If there are too few rows for the device, `parts` warps of a block share
// them. Every lane copies its own packs into a ring in shared memory, some steps ahead, without waits for other warps. So 7 or
// 10 KiB are in flight per warp. Six warps per multiprocessor cover the required 40 KiB (4.8 TB/s times 1 us over 132
// multiprocessors); 32 or 48 KiB per block allow several blocks. (Loads to registers would not stay in flight: the assembler
// moves each load to its use.) x is read through L1, where it stays, one step ahead; each pack of x serves all rows of the
// warp. At that bandwidth a multiprocessor has about 200 instructions per KiB: one row of x takes 75, four take 130 (190 with
// two rows of the weight per warp).
//
// Reduction order: a lane adds its packs ascending, each product fused with its addition; then warp_sum over the lanes, the
// warps ascending, the bias, one rounding. It depends on `parts`, which the host derives from the shape of the weight, the
// number of rows and the device. It differs from the order of linear.cu, so the kernel is not used with --batch-invariant.
#include "device.cuh"

using namespace quintet;

namespace {

constexpr int WARPS = 4;

template <class T, int M>
__device__ __forceinline__ void matvec(
    unsigned char* shared, const T* x, const T* weight, const T* bias, T* out, int columns, int depth,
    long long x_stride, long long out_stride, int parts, int wide) {
  constexpr int ROWS = M <= 2 ? 2 : 4;    // of the weight, per warp
  constexpr int STAGES = M <= 2 ? 8 : 6;  // of 32 packs of each row
  constexpr int PACK = Pack<T>::SIZE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp % parts;
  const int column = (int(blockIdx.x) * (WARPS / parts) + warp / parts) * ROWS;
  const int num_packs = depth / PACK;
  const int stride = parts * 32;  // in packs, from one step of this warp to the next

  uint4* ring = reinterpret_cast<uint4*>(shared) + warp * (STAGES * ROWS * 32) + lane;
  int ahead = part * 32 + lane;  // index of the next pack to copy, and its address in the first row
  const T* source = weight + (long long)column * depth + ahead * PACK;
  auto copy = [&](int stage) {
    const T* from = source;
#pragma unroll
    for (int r = 0; r < ROWS; ++r, from += depth)
      copy_async_16(ring + (stage * ROWS + r) * 32, from, ahead < num_packs && column + r < columns);
    copy_async_commit();
    ahead += stride;
    source += stride * PACK;
  };
  int pack = part * 32 + lane;  // index of the next pack of x to load
  const T* x_source = x + pack * PACK;
  auto load = [&](Pack<T>(&numbers)[M]) {
    const T* from = x_source;
#pragma unroll
    for (int m = 0; m < M; ++m, from += x_stride)
      numbers[m] = pack < num_packs ? load_pack(from) : zero_pack<T>();
    pack += stride;
    x_source += stride * PACK;
  };

#pragma unroll
  for (int stage = 0; stage < STAGES - 1; ++stage) copy(stage);
  Pack<T> next[M];
  load(next);

  float sum[ROWS][M];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int m = 0; m < M; ++m) sum[r][m] = 0.0f;

  int stage = 0, before = STAGES - 1;
#pragma unroll 2
  for (int first = part * 32; first < num_packs; first += stride) {
    Pack<T> numbers[M];
#pragma unroll
    for (int m = 0; m < M; ++m) numbers[m] = next[m];
    load(next);
    copy_async_wait<STAGES - 2>();  // a lane reads only its own copies: no barrier
    float w[ROWS][PACK];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Pack<T> quad = as_pack<T>(ring[(stage * ROWS + r) * 32]);
#pragma unroll
      for (int i = 0; i < PACK; ++i) w[r][i] = quad.get(i);
    }
    copy(before);  // into the stage of the previous step
    before = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
#pragma unroll
    for (int m = 0; m < M; ++m)
#pragma unroll
      for (int i = 0; i < PACK; ++i) {
        const float number = numbers[m].get(i);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) sum[r][m] = fmaf(w[r][i], number, sum[r][m]);
      }
  }

#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int m = 0; m < M; ++m) sum[r][m] = warp_sum(sum[r][m]);

  if (parts > 1) {
    __shared__ float left[WARPS][ROWS][M];
    if (lane == 0)
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int m = 0; m < M; ++m) left[warp][r][m] = sum[r][m];
    __syncthreads();
    if (part != 0 || lane != 0) return;
#pragma unroll 1
    for (int other = 1; other < parts; ++other)
#pragma unroll
      for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int m = 0; m < M; ++m) sum[r][m] += left[warp + other][r][m];
  }
  if (lane != 0) return;
#pragma unroll
  for (int r = 0; r < ROWS; ++r) {
    if (column + r >= columns) return;
    const float shift = bias ? to_float(bias[column + r]) : 0.0f;
#pragma unroll
    for (int m = 0; m < M; ++m) {
      const long long at = m * out_stride + column + r;
      if (wide)
        reinterpret_cast<float*>(out)[at] = sum[r][m] + shift;
      else
        out[at] = from_float<T>(sum[r][m] + shift);
    }
  }
}

}  // namespace

// Grid: columns over rows of a warp * 4 / parts, rounded up; parts is 1, 2 or 4. Dynamic shared memory: 4 * STAGES * ROWS * 512
// bytes. x, weight and x_stride are multiples of 16 bytes. wide: `out` is float for every T.
#define MATVEC(SUFFIX, T, M)                                                                           \
  QT_KERNEL_OCCUPANCY(                                                                                 \
      32 * WARPS, (M <= 2 ? 7 : 3), matvec_##M##_##SUFFIX,                                             \
      (const T* x, const T* weight, const T* bias, T* out, int columns, int depth, long long x_stride, \
       long long out_stride, int parts, int wide)) {                                                   \
    QT_DYNAMIC_SHARED(shared);                                                                         \
    matvec<T, M>(shared, x, weight, bias, out, columns, depth, x_stride, out_stride, parts, wide);     \
  }

#define MATVECS(SUFFIX, T) MATVEC(SUFFIX, T, 1) MATVEC(SUFFIX, T, 2) MATVEC(SUFFIX, T, 3) MATVEC(SUFFIX, T, 4)

MATVECS(bf16, bf16)
MATVECS(fp16, fp16)
MATVECS(fp32, float)
