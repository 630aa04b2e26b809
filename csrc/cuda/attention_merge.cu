// Puts together what the splits of a line left in the workspace, after the decode and chunk kernels of a layer; gives
// padding tokens zeros; and sets the counts of taken pieces back for the next layer.
//
// A block per token, a warp per head in turn, lanes sharing the head's numbers. A token whose patch had one part costs
// its block a few loads: its result was written already.
// Bytes: 4 * head_dim + 8 per line and split, once. Limiter: latency.
// Order of reduction: splits ascending by `Fold`, as the other kernels do for splits they walk themselves.
#include "device.cuh"

#include "attention.cuh"

namespace quintet {

constexpr int MERGE_THREADS = 128;
constexpr int MERGE_MAX_DIM = 256;

template <class T>
__device__ __forceinline__ void attention_merge(
    T* out, const int* starts, const int* counts, const int* offsets, const int* token_rows, const Plan& decode_plan,
    const Plan& chunk_plan, const float* decode_sums, const float* decode_stats, const float* chunk_sums,
    const float* chunk_stats, int num_heads, int num_kv_heads, int head_dim, int chunk_patch, int window, float unit) {
  constexpr int WARPS = MERGE_THREADS / WARP_SIZE, PER_LANE = MERGE_MAX_DIM / WARP_SIZE;
  const int token = blockIdx.x, warp = threadIdx.x / WARP_SIZE, lane = threadIdx.x % WARP_SIZE;
  if (token == 0 && threadIdx.x == 0) {
    *decode_plan.taken() = 0;
    *chunk_plan.taken() = 0;
  }
  T* to = out + (long long)token * num_heads * head_dim;
  const int row = token_rows[token];
  if (row < 0) {
    for (int i = threadIdx.x; i < num_heads * head_dim; i += MERGE_THREADS) to[i] = from_float<T>(0.0f);
    return;
  }
  const int group = num_heads / num_kv_heads, start = starts[row], lines = counts[row] * group;
  const bool decode = is_decode(counts[row], group);
  const Plan& plan = decode ? decode_plan : chunk_plan;
  const int parts = plan.parts()[row];
  if (parts == 1) return;

  const int patch_lines = decode ? DECODE_PATCH : chunk_patch;
  const float* sums = decode ? decode_sums : chunk_sums;
  const float* stats = decode ? decode_stats : chunk_stats;
  const int size = plan.split_size(), base = plan.base()[row];
  const int first_split = seen_by(start, 0, 0, window).begin / size;
  for (int head = warp; head < num_heads; head += WARPS) {
    const int line = (token - offsets[row]) * group + head % group;
    const int patch = line / patch_lines;
    const int last_line = (patch + 1) * patch_lines < lines ? (patch + 1) * patch_lines - 1 : lines - 1;
    const Range range = seen_by(start, patch * patch_lines / group, last_line / group, window);
    if (range.begin / size == (range.end - 1) / size) continue;

    float total[PER_LANE] = {}, normalizer = 0.0f, most = UNSEEN;
    for (int split = range.begin / size; split <= (range.end - 1) / size; ++split) {
      const long long slot = base + (patch * parts + split - first_split) * num_kv_heads + head / group;
      const long long index = slot * patch_lines + line % patch_lines;
      const float part_most = stats[index * 2], part_normalizer = stats[index * 2 + 1];
      if (!has_seen(part_most)) continue;
      const bool is_first = !has_seen(most);
      const Fold fold(most, part_most, unit);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int column = i * WARP_SIZE + lane;
        if (column < head_dim) {
          const float part = sums[index * head_dim + column];
          total[i] = is_first ? part : fold(total[i], part);
        }
      }
      normalizer = is_first ? part_normalizer : fold(normalizer, part_normalizer);
      most = fold.most;
    }
    const float inverse = reciprocal(normalizer);
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = i * WARP_SIZE + lane;
      if (column < head_dim) to[head * head_dim + column] = from_float<T>(total[i] * inverse);
    }
  }
}

}  // namespace quintet

#define QT_ATTENTION_MERGE(suffix, T)                                                                                 \
  QT_KERNEL(quintet::MERGE_THREADS, attention_merge##suffix,                                                          \
            (void* out, const int* starts, const int* counts, const int* offsets, const int* token_rows,              \
             int* decode_plan, int* chunk_plan, const float* decode_sums, const float* decode_stats,                  \
             const float* chunk_sums, const float* chunk_stats, int max_rows, int num_heads, int num_kv_heads,        \
             int head_dim, int chunk_patch, int window, float scale, float soft_cap, const float* alibi)) {           \
    const quintet::Scores scores{scale, soft_cap, soft_cap == 0.0f && alibi == nullptr};                              \
    quintet::attention_merge<T>((T*)out, starts, counts, offsets, token_rows, quintet::Plan{decode_plan, max_rows},   \
                                quintet::Plan{chunk_plan, max_rows}, decode_sums, decode_stats, chunk_sums,           \
                                chunk_stats, num_heads, num_kv_heads, head_dim, chunk_patch, window, scores.unit());  \
  }

QT_ATTENTION_MERGE(_bf16, quintet::bf16)
QT_ATTENTION_MERGE(_fp16, quintet::fp16)
