// Accumulator layout of matrix instructions in a thread block: ownership by warp and lane, and the store of results.
// Independent of the operands.
#pragma once

namespace quintet {

// A warp owns WARP_M x WARP_N results as 16x8 matrix tiles. A lane has rows g and g + 8, columns c and c + 1 of each (g = lane
// / 4, c = 2 * (lane % 4)): one fragment of four.
template <class T, int M, int N, int WARPS_M, int WARPS_N>
struct TensorTile {
  using Out = T;
  static constexpr int TILE_M = M, TILE_N = N;
  static constexpr int THREADS = 32 * WARPS_M * WARPS_N;
  static constexpr int WARP_M = M / WARPS_M, WARP_N = N / WARPS_N;
  static constexpr int TALL = WARP_M / 16, WIDE = WARP_N / 8;
  static constexpr int FRAGMENTS = TALL * WIDE;
  static_assert(M % (16 * WARPS_M) == 0, "a warp's rows are whole matrix instructions");
  static_assert(N % (16 * WARPS_N) == 0, "a load of weights serves two of them");

  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int warp_row() { return threadIdx.x / 32 / WARPS_N * WARP_M; }
  static __device__ __forceinline__ int warp_column() { return threadIdx.x / 32 % WARPS_N * WARP_N; }

  // Position in the block's tile of the fragment's first pair; the second pair is eight rows below.
  static __device__ __forceinline__ int row(int f) { return warp_row() + f / WIDE * 16 + lane() / 4; }
  static __device__ __forceinline__ int column(int f) { return warp_column() + f % WIDE * 8 + lane() % 4 * 2; }

  template <class Weight>
  static __device__ __forceinline__ void store(
      int f, const float (&total)[4], const Weight&, const T* bias, T* out, int first_row, int first_column,
      const LinearProblem& problem) {
    const int y_column = first_column + column(f);
    if (y_column >= problem.columns) return;
    const bool has_second = y_column + 1 < problem.columns;
    const float bias_0 = bias ? to_float(bias[y_column]) : NOTHING;
    const float bias_1 = bias && has_second ? to_float(bias[y_column + 1]) : NOTHING;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int y_row = first_row + row(f) + half * 8;
      if (y_row >= problem.num_rows) continue;
      const float first = total[half * 2] + bias_0, second = total[half * 2 + 1] + bias_1;
      if (problem.wide) {
        float* sums = reinterpret_cast<float*>(out) + y_row * problem.out_stride + y_column;
        sums[0] = first;
        if (has_second) sums[1] = second;
        continue;
      }
      T* into = out + y_row * problem.out_stride + y_column;
      if (has_second && problem.out_stride % 2 == 0) {
        *reinterpret_cast<uint32_t*>(into) = pack_pair<T>(first, second);
      } else {  // with an odd stride, pairs of every other row are not aligned to words
        into[0] = from_float<T>(first);
        if (has_second) into[1] = from_float<T>(second);
      }
    }
  }
};

}  // namespace quintet
