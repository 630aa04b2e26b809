// y = x . weight^T (+ bias) for one to four rows of x, as fast as the weight can be read: 2 * rows / sizeof(T) FLOP a
// byte, so bandwidth is the limit and nothing else is near one.
//
// A warp owns two rows of the weight, or the part of them that other warps of its block leave it: `parts` warps share two
// rows where there are too few rows to fill the machine. Every lane copies its own packs into a ring in shared memory,
// seven steps ahead, and waits for nobody else. So 7 KiB are under way for each warp at any time, and six warps on a
// multiprocessor cover the 40 KiB that 4.8 TB/s times 1 us over 132 of them asks for; 32 KiB a block let seven blocks in.
// (Eight loads to registers would be under way too, if the assembler left them together: it moves each to its use.) x is
// read through L1, where it stays, one step ahead; each pack of it serves both rows.
//
// Order: a lane adds its packs in ascending order, each product fused with its addition; then the lanes in warp_sum's
// order, the warps in ascending order, the bias, one rounding. It depends on the shape of the weight (and on `parts`,
// which the host takes from that and the device), not on the rows of x. It is not the order of linear.cu: not for
// --batch-invariant.
#include "device.cuh"

using namespace quintet;

namespace {

constexpr int WARPS = 4;
constexpr int ROWS = 2;    // of the weight, by a warp
constexpr unsigned STAGES = 8;  // of 32 packs of each row

template <class T, int M>
__device__ __forceinline__ void matvec(
    unsigned char* shared, const T* x, const T* weight, const T* bias, T* out, int columns, int depth,
    long long x_stride, long long out_stride, int parts) {
  constexpr int PACK = Pack<T>::SIZE;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int part = warp % parts;
  const int column = (int(blockIdx.x) * (WARPS / parts) + warp / parts) * ROWS;
  const int num_packs = depth / PACK;
  const int num_steps = (num_packs + 31) / 32;

  const T* row[ROWS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)  // beyond the last one, the last one again: copied, never stored
    row[r] = weight + (long long)(column + r < columns ? column + r : columns - 1) * depth;

  uint4* ring = reinterpret_cast<uint4*>(shared) + warp * (STAGES * ROWS * 32) + lane;
  auto copy = [&](int step, unsigned stage) {
    const int pack = step * 32 + lane;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
      copy_async_16(ring + (stage * ROWS + r) * 32, row[r] + pack * PACK, pack < num_packs);
  };
  auto load = [&](int step, Pack<T>(&numbers)[M]) {
    const int pack = step * 32 + lane;
#pragma unroll
    for (int m = 0; m < M; ++m)
      numbers[m] = pack < num_packs ? load_pack(x + m * x_stride + pack * PACK) : zero_pack<T>();
  };

  int ahead = part;  // the step that is copied next; every `parts`-th one is this warp's
#pragma unroll
  for (unsigned stage = 0; stage < STAGES - 1; ++stage, ahead += parts) {
    if (ahead < num_steps) copy(ahead, stage);
    copy_async_commit();
  }
  Pack<T> next[M];
  load(part, next);

  float sum[ROWS][M];
#pragma unroll
  for (int r = 0; r < ROWS; ++r)
#pragma unroll
    for (int m = 0; m < M; ++m) sum[r][m] = 0.0f;

  unsigned stage = 0;
#pragma unroll 2
  for (int step = part; step < num_steps; step += parts, ahead += parts) {
    Pack<T> numbers[M];
#pragma unroll
    for (int m = 0; m < M; ++m) numbers[m] = next[m];
    load(step + parts, next);
    copy_async_wait<int(STAGES) - 2>();  // a lane reads nothing but its own copies: no barrier
    float w[ROWS][PACK];
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      const Pack<T> pack = as_pack<T>(ring[(stage * ROWS + r) * 32]);
#pragma unroll
      for (int i = 0; i < PACK; ++i) w[r][i] = pack.get(i);
    }
    if (ahead < num_steps) copy(ahead, (stage + STAGES - 1) % STAGES);  // where the step before this one lay
    copy_async_commit();
    stage = (stage + 1) % STAGES;
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
    for (int m = 0; m < M; ++m) out[m * out_stride + column + r] = from_float<T>(sum[r][m] + shift);
  }
}

}  // namespace

// Grid: columns over 2 * 4 / parts, rounded up; parts is 1, 2 or 4. 32 KiB of dynamic shared memory. x, weight and
// x_stride are multiples of 16 bytes.
#define MATVEC(SUFFIX, T, M)                                                                           \
  QT_KERNEL(                                                                                           \
      32 * WARPS, matvec_##M##_##SUFFIX,                                                               \
      (const T* x, const T* weight, const T* bias, T* out, int columns, int depth, long long x_stride, \
       long long out_stride, int parts)) {                                                             \
    QT_DYNAMIC_SHARED(shared);                                                                         \
    matvec<T, M>(shared, x, weight, bias, out, columns, depth, x_stride, out_stride, parts);           \
  }

#define MATVECS(SUFFIX, T) MATVEC(SUFFIX, T, 1) MATVEC(SUFFIX, T, 2) MATVEC(SUFFIX, T, 3) MATVEC(SUFFIX, T, 4)

MATVECS(bf16, bf16)
MATVECS(fp16, fp16)
MATVECS(fp32, float)
