// Divides a step's rows into attention work items, once per step: the number of splits per row and the offset of each row's
// work items. Layers with the same attention window share a plan. Lengths are read from the step's tables, so one captured graph
// serves all lengths.
//
// Grid: (attention windows, 2): x is an attention window, y the planned kernel (0 decode, 1 chunk). A block has 32 warps: warp
// w estimates the step's time with candidate w; its lanes share the rows. The block takes the best candidate and writes prefix
// sums over the rows. If the split size is free, a candidate is a split size: 128, 192, 256, 384 ... positions. If it is fixed,
// since results depend on it, a candidate is the least number of splits of a row for parallel computation; this changes no bit.
// The last candidate has no parallel splits and always fits the workspace.
//
// Work is measured in tiles of 64 positions. A work item costs OVERHEAD tiles more (ring fill, store of its part, merge). The
// estimate is the smaller of two bounds for `workers` blocks that take work items dynamically:
//   rounds * longest work item      tight for equal work items
//   all work / workers + longest    tight for unequal work items (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969)
//
// Bytes: 8 per row and warp, from L1; one block per attention window, some microseconds. Limiter: latency. All sums are of
// ints, or in a fixed order. By design a row's plan depends on the other rows (which split sizes may: see AttentionPlan).
#include "device.cuh"

#include "attention.cuh"

namespace quintet {

constexpr int PLAN_THREADS = 1024;
constexpr int CANDIDATES = PLAN_THREADS / WARP_SIZE;
constexpr float OVERHEAD = 2.0f;
constexpr int NEVER = 1 << 30;

// Parameters common to all rows.
struct Cut {
  AttentionWindow mask;
  int group, kv_heads, query_tile, fixed_size;
  bool decode;

  __device__ __forceinline__ int query_tiles(int count) const {
    bool mine = count > 0 && is_decode(count, group) == decode;
    return mine ? divide_up(count * group, query_tile) : 0;
  }
  // 2, 3, 4, 6, 8, 12, 16, 24 ... tiles.
  __device__ __forceinline__ int size(int candidate) const {
    if (fixed_size > 0) return fixed_size;
    return (candidate % 2 == 0 ? 2 : 3) << (candidate / 2) << 6;
  }
  // Splits of a row that are separate work items.
  __device__ __forceinline__ int parts(int start, int count, int candidate) const {
    Range range = seen_by(start, 0, count - 1, mask);
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

// Estimated time of one candidate, in tiles, by one warp; INF if its parts do not fit the workspace.
__device__ __forceinline__ float estimate(
    const Cut& cut, const int* starts, const int* counts, int num_rows, int candidate, int workers, int capacity) {
  int items = 0, stored = 0;
  float work = 0.0f, longest = 0.0f;
  for (int row = threadIdx.x % WARP_SIZE; row < num_rows; row += WARP_SIZE) {
    int query_tiles = cut.query_tiles(counts[row]);
    if (query_tiles == 0) continue;
    int parts = cut.parts(starts[row], counts[row], candidate);
    int of_row = query_tiles * parts * cut.kv_heads;
    Range first = seen_by(starts[row], 0, 0, cut.mask);
    Range last = seen_by(starts[row], counts[row] - 1, counts[row] - 1, cut.mask);
    // A query tile in the middle of the row sees about the average number of positions.
    float average = (0.5f * float(first.end - first.begin) + 0.5f * float(last.end - last.begin)) / TILE + 1.0f;
    float most = float(last.end - last.begin) / TILE + 1.0f;
    items += of_row;
    if (parts > 1) stored += of_row;
    work += float(cut.kv_heads) * float(query_tiles) * (average + OVERHEAD * float(parts));
    longest = fmaxf(longest, parts > 1 ? fminf(most, float(cut.size(candidate) / TILE)) : most);
  }
  items = warp_sum_int(items);
  stored = warp_sum_int(stored);
  work = warp_sum(work);
  longest = warp_max(longest) + OVERHEAD;
  if (stored > capacity && candidate + 1 < CANDIDATES) return INF;
  float rounds = float(divide_up(items, workers)) * longest;
  return fminf(rounds, work / float(workers) + longest);
}

// Exclusive prefix sum of `value` over the threads; `all` gets the total.
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

// tables: [attention windows, 2, stride]. windows: [attention windows, 2], window and chunk. The host chooses workers,
// capacities (query tiles of the workspace) and the chunk kernel's query tile.
QT_KERNEL_OCCUPANCY(PLAN_THREADS, 1, attention_plan,
          (const int* starts, const int* counts, const int* windows, int* tables, int num_rows, int max_rows, int stride,
           int group, int kv_heads, int chunk_query_tile, int fixed_size, int decode_workers, int chunk_workers,
           int decode_capacity, int chunk_capacity)) {
  __shared__ float times[CANDIDATES];
  __shared__ int of_warps[PLAN_THREADS / WARP_SIZE];
  const bool decode = blockIdx.y == 0;
  const Plan plan{tables + ((long long)blockIdx.x * 2 + blockIdx.y) * stride, max_rows};
  const AttentionWindow mask{windows[2 * blockIdx.x], windows[2 * blockIdx.x + 1]};
  const Cut cut{mask, group, kv_heads, decode ? DECODE_QUERY_TILE : chunk_query_tile, fixed_size, decode};
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

  int items_before = 0, stored_before = 0;
  for (int first = 0; first < num_rows; first += PLAN_THREADS) {
    int row = first + threadIdx.x;
    int query_tiles = row < num_rows ? cut.query_tiles(counts[row]) : 0;
    int parts = query_tiles > 0 ? cut.parts(starts[row], counts[row], best) : 1;
    int items = query_tiles * parts * kv_heads;
    int all_items, all_stored;
    int prefix = items_before + sum_before(items, of_warps, all_items);
    int base = stored_before + sum_before(parts > 1 ? items : 0, of_warps, all_stored);
    if (row < num_rows) {
      plan.prefix()[row] = prefix;
      plan.parts()[row] = parts;
      plan.base()[row] = base;
    }
    items_before += all_items;
    stored_before += all_stored;
  }
  if (threadIdx.x == 0) {
    plan.prefix()[num_rows] = items_before;
    plan.table[0] = cut.size(best);
    plan.table[1] = items_before;
    *plan.taken() = 0;
    *plan.finished() = 0;
  }
}
