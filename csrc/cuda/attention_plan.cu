// Cuts a step's rows into pieces of attention work, once per step: how far rows are split, and where each row's pieces
// begin. Layers of one sight share a plan; lengths are read from the step's tables, so that one captured graph serves
// all lengths.
//
// Grid: (sights, 2): x a sight, y the kernel planned for (0 decode, 1 chunk). A block of 32 warps: warp w estimates how
// long the step takes with candidate w, lanes sharing the rows; the best candidate is taken, and the block writes prefix
// sums over the rows. A candidate is a split size where sizes are free, 128, 192, 256, 384 ... positions; where the size
// is fixed, since results depend on it, it is how many splits a row must have for them to be computed side by side, which
// changes no bit. The last candidate splits nothing and always fits the workspace.
//
// Work is counted in tiles of 64 positions, and a piece costs OVERHEAD tiles more (to fill its ring, to store its part, to
// merge it). Two bounds on the time of `workers` blocks that take pieces as they become free, and the better one counts:
//   rounds * longest piece          tight where all pieces are alike
//   all work / workers + longest    tight where they differ (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969)
//
// Bytes: 8 per row and warp, from L1; one block per sight, some microseconds. Limiter: latency. All sums are of ints, or
// in a fixed order; a row's plan depends on the others by design (which split sizes may: see AttentionPlan).
#include "device.cuh"

#include "attention.cuh"

namespace quintet {

constexpr int PLAN_THREADS = 1024;
constexpr int CANDIDATES = PLAN_THREADS / WARP_SIZE;
constexpr float OVERHEAD = 2.0f;
constexpr int NEVER = 1 << 30;

// What all rows have in common.
struct Cut {
  Sight sight;
  int group, kv_heads, patch, fixed_size;
  bool decode;

  __device__ __forceinline__ int patches(int count) const {
    bool mine = count > 0 && is_decode(count, group) == decode;
    return mine ? divide_up(count * group, patch) : 0;
  }
  // 2, 3, 4, 6, 8, 12, 16, 24 ... tiles.
  __device__ __forceinline__ int size(int candidate) const {
    if (fixed_size > 0) return fixed_size;
    return (candidate % 2 == 0 ? 2 : 3) << (candidate / 2) << 6;
  }
  // Splits of a row that are pieces of their own.
  __device__ __forceinline__ int parts(int start, int count, int candidate) const {
    Range range = seen_by(start, 0, count - 1, sight);
    int splits = (range.end - 1) / size(candidate) - range.begin / size(candidate) + 1;
    if (fixed_size <= 0) return splits;
    int least = candidate + 1 == CANDIDATES ? NEVER : candidate % 2 == 0 ? 2 << (candidate / 2) : 3 << (candidate / 2);
    return splits >= least ? splits : 1;
  }
};

__device__ __forceinline__ int warp_sum_int(int value) {
#pragma unroll
  for (int step = WARP_SIZE / 2; step > 0; step /= 2) value += __shfl_xor_sync(FULL_WARP, value, step);
  return value;
}

// The estimated time with one candidate, in tiles, by one warp; INF where its parts do not fit the workspace.
__device__ __forceinline__ float estimate(
    const Cut& cut, const int* starts, const int* counts, int num_rows, int candidate, int workers, int capacity) {
  int pieces = 0, stored = 0;
  float work = 0.0f, longest = 0.0f;
  for (int row = threadIdx.x % WARP_SIZE; row < num_rows; row += WARP_SIZE) {
    int patches = cut.patches(counts[row]);
    if (patches == 0) continue;
    int parts = cut.parts(starts[row], counts[row], candidate);
    int of_row = patches * parts * cut.kv_heads;
    Range first = seen_by(starts[row], 0, 0, cut.sight);
    Range last = seen_by(starts[row], counts[row] - 1, counts[row] - 1, cut.sight);
    // A patch in the middle of the row sees about as much as the average one.
    float average = (0.5f * float(first.end - first.begin) + 0.5f * float(last.end - last.begin)) / TILE + 1.0f;
    float most = float(last.end - last.begin) / TILE + 1.0f;
    pieces += of_row;
    if (parts > 1) stored += of_row;
    work += float(cut.kv_heads) * float(patches) * (average + OVERHEAD * float(parts));
    longest = fmaxf(longest, parts > 1 ? fminf(most, float(cut.size(candidate) / TILE)) : most);
  }
  pieces = warp_sum_int(pieces);
  stored = warp_sum_int(stored);
  work = warp_sum(work);
  longest = warp_max(longest) + OVERHEAD;
  if (stored > capacity && candidate + 1 < CANDIDATES) return INF;
  float rounds = float(divide_up(pieces, workers)) * longest;
  return fminf(rounds, work / float(workers) + longest);
}

// Sum of `value` over the threads before this one; `all` gets the sum over all.
__device__ __forceinline__ int sum_before(int value, int* of_warps, int& all) {
  int lane = threadIdx.x % WARP_SIZE, warp = threadIdx.x / WARP_SIZE;
  int sum = value;
#pragma unroll
  for (int step = 1; step < WARP_SIZE; step *= 2) {
    int before = __shfl_up_sync(FULL_WARP, sum, step);
    if (lane >= step) sum += before;
  }
  __syncthreads();
  if (lane == WARP_SIZE - 1) of_warps[warp] = sum;
  __syncthreads();
  int others = 0;
  all = 0;
#pragma unroll 4
  for (int other = 0; other < PLAN_THREADS / WARP_SIZE; ++other) {
    if (other < warp) others += of_warps[other];
    all += of_warps[other];
  }
  return others + sum - value;
}

}  // namespace quintet

using namespace quintet;

// tables: [sights, 2, stride]. sights: [sights, 2], window and chunk. workers, capacities (patches of the workspace) and the
// chunk kernel's patch as the host chose them.
QT_KERNEL_OCCUPANCY(PLAN_THREADS, 1, attention_plan,
          (const int* starts, const int* counts, const int* sights, int* tables, int num_rows, int max_rows, int stride,
           int group, int kv_heads, int chunk_patch, int fixed_size, int decode_workers, int chunk_workers,
           int decode_capacity, int chunk_capacity)) {
  __shared__ float times[CANDIDATES];
  __shared__ int of_warps[PLAN_THREADS / WARP_SIZE];
  const bool decode = blockIdx.y == 0;
  const Plan plan{tables + ((long long)blockIdx.x * 2 + blockIdx.y) * stride, max_rows};
  const Cut cut{{sights[2 * blockIdx.x], sights[2 * blockIdx.x + 1]}, group, kv_heads, decode ? DECODE_PATCH : chunk_patch, fixed_size, decode};
  const int warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;

  float time = estimate(cut, starts, counts, num_rows, warp, decode ? decode_workers : chunk_workers,
                        decode ? decode_capacity : chunk_capacity);
  if (lane == 0) times[warp] = time;
  __syncthreads();
  int best = CANDIDATES - 1;
#pragma unroll 4
  for (int candidate = CANDIDATES - 2; candidate >= 0; --candidate) {
    if (times[candidate] < times[best]) best = candidate;
  }

  int pieces_before = 0, stored_before = 0;
  for (int first = 0; first < num_rows; first += PLAN_THREADS) {
    int row = first + threadIdx.x;
    int patches = row < num_rows ? cut.patches(counts[row]) : 0;
    int parts = patches > 0 ? cut.parts(starts[row], counts[row], best) : 1;
    int pieces = patches * parts * kv_heads;
    int all_pieces, all_stored;
    int prefix = pieces_before + sum_before(pieces, of_warps, all_pieces);
    int base = stored_before + sum_before(parts > 1 ? pieces : 0, of_warps, all_stored);
    if (row < num_rows) {
      plan.prefix()[row] = prefix;
      plan.parts()[row] = parts;
      plan.base()[row] = base;
    }
    pieces_before += all_pieces;
    stored_before += all_stored;
  }
  if (threadIdx.x == 0) {
    plan.prefix()[num_rows] = pieces_before;
    plan.table[0] = cut.size(best);
    plan.table[1] = pieces_before;
    *plan.taken() = 0;
    *plan.finished() = 0;
  }
}
