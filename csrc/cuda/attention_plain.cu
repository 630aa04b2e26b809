// Attention over the paged cache without matrix instructions: fp32 models, and head shapes that the other kernels do not
// support, such as values of another width than keys. Not optimized.
//
// Ownership: a block of 128 threads per (token, head), over all visible positions, 128 at a time. Thread t computes the score
// of position t, the block the maximum and the sum, then thread t accumulates columns t, t + 128 ... of the values. Query and
// weights are in shared memory, sums in registers.
// Bytes: all visible positions of the cache once per query head, head_dim + value_dim numbers per position; FLOPs: twice as
// many. Limiter: L2 and instruction issue.
// Reduction order: positions ascending within a tile of 128 fixed positions, tiles ascending; tiles without visible positions
// are skipped. It depends on the token's positions only, not on the batch size.
#include "device.cuh"

#include "attention_softmax.cuh"

namespace quintet {

constexpr int PLAIN_THREADS = 128;
constexpr int PLAIN_MAX_DIM = 576, PLAIN_MAX_VALUE_DIM = 512;

template <class T, class KV>
__device__ __forceinline__ void attention_plain(
    T* out, const T* q, const KV* keys, const KV* values, const int* slots, const int* positions, const int* token_rows,
    const int* block_table, const float* alibi, const float* sinks, int num_heads, int num_kv_heads, int head_dim,
    int value_dim, int value_stride, int block_size, int max_blocks, int q_stride, const AttentionWindow& mask,
    long long block_stride, const Scores& scores, float value_scale) {
  constexpr int PER_THREAD = PLAIN_MAX_VALUE_DIM / PLAIN_THREADS;
  __shared__ float query[PLAIN_MAX_DIM];
  __shared__ float weights[PLAIN_THREADS];
  __shared__ long long places[PLAIN_THREADS];
  const int token = blockIdx.x, head = blockIdx.y, thread = threadIdx.x;
  const int row = token_rows[token];
  T* to = out + ((long long)token * num_heads + head) * value_dim;
  if (row < 0) {
    for (int i = thread; i < value_dim; i += PLAIN_THREADS) to[i] = from_float<T>(0.0f);
    return;
  }
  const int last = positions[token];
  const int first = mask.first(last);
  const int kv_head = head / (num_heads / num_kv_heads);
  const int* blocks = block_table + (long long)slots[row] * max_blocks;
  const float unit = scores.unit(), slope = alibi != nullptr ? alibi[head] : 0.0f;
  const T* from = q + (long long)token * q_stride + (long long)head * head_dim;
  for (int i = thread; i < head_dim; i += PLAIN_THREADS) query[i] = to_float(from[i]);

  float sums[PER_THREAD] = {}, normalizer = 0.0f, most = UNSEEN;
  for (int tile = first / PLAIN_THREADS * PLAIN_THREADS; tile <= last; tile += PLAIN_THREADS) {
    __syncthreads();  // the query is stored; the weights of the previous tile are no longer read
    const int position = tile + thread;
    const bool seen = position >= first && position <= last;
    float score = UNSEEN;
    if (seen) {
      const int block = position / block_size;
      const int place = kv_head * block_size + position % block_size;
      places[thread] = blocks[block] * block_stride + (long long)place * value_stride;
      const KV* key = keys + blocks[block] * block_stride + (long long)place * head_dim;
      float product = 0.0f;
      for (int i = 0; i < head_dim; ++i) product = fmaf(query[i], to_float(key[i]), product);
      score = scores.plain ? product : scores.logit(product, slope, position - last);
    }
    const Rise rise(most, block_max<PLAIN_THREADS>(score), unit);
    const float weight = seen ? rise.weight(score, unit) : 0.0f;
    most = rise.most;
    weights[thread] = weight;
    normalizer = fmaf(normalizer, rise.shrink, block_sum<PLAIN_THREADS>(weight));  // its barriers make the weights visible to
                                                                                   // all threads

    const int begin = first > tile ? first - tile : 0;
    const int end = last - tile + 1 < PLAIN_THREADS ? last - tile + 1 : PLAIN_THREADS;
#pragma unroll
    for (int i = 0; i < PER_THREAD; ++i) {
      const int column = i * PLAIN_THREADS + thread;
      if (column >= value_dim) continue;
      float sum = sums[i] * rise.shrink;
      for (int j = begin; j < end; ++j) sum = fmaf(weights[j], to_float(values[places[j] + column]), sum);
      sums[i] = sum;
    }
  }
  const float share = share_of(normalizer, most, unit, sinks != nullptr ? sinks + head : nullptr) * value_scale;
#pragma unroll
  for (int i = 0; i < PER_THREAD; ++i) {
    const int column = i * PLAIN_THREADS + thread;
    if (column < value_dim) to[column] = from_float<T>(sums[i] * share);
  }
}

}  // namespace quintet

// keys, values: [KV blocks, KV heads, block_size, head_dim or value_dim], block_stride numbers from one KV block to the next.
// value_stride: numbers from one value to the next, so that values may be the beginning of keys.
#define QT_ATTENTION_PLAIN(suffix, T, KV)                                                                              \
  QT_KERNEL(quintet::PLAIN_THREADS, attention_plain##suffix,                                                           \
            (void* out, const void* q, const void* keys, const void* values, const int* slots, const int* positions,   \
             const int* token_rows, const int* block_table, const float* alibi, const float* sinks, int num_heads,     \
             int num_kv_heads, int head_dim, int value_dim, int value_stride, int block_size, int max_blocks,          \
             int q_stride, int window, int chunk, long long block_stride, float scale, float soft_cap,             \
             float value_scale)) {                                                                                     \
    const quintet::Scores scores{scale, soft_cap, soft_cap == 0.0f && alibi == nullptr};                               \
    quintet::attention_plain<T, KV>((T*)out, (const T*)q, (const KV*)keys, (const KV*)values, slots, positions,        \
                                    token_rows, block_table, alibi, sinks, num_heads, num_kv_heads, head_dim,          \
                                    value_dim, value_stride, block_size, max_blocks, q_stride,                         \
                                    quintet::AttentionWindow{window, chunk}, block_stride, scores, value_scale);                 \
  }

QT_ATTENTION_PLAIN(_fp32, float, float)
QT_ATTENTION_PLAIN(_bf16, quintet::bf16, quintet::bf16)
QT_ATTENTION_PLAIN(_fp16, quintet::fp16, quintet::fp16)
QT_ATTENTION_PLAIN(_fp32_fp8kv, float, quintet::fp8)
QT_ATTENTION_PLAIN(_bf16_fp8kv, quintet::bf16, quintet::fp8)
QT_ATTENTION_PLAIN(_fp16_fp8kv, quintet::fp16, quintet::fp8)
