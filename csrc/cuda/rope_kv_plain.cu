// Rotary embedding and KV write for layers that rope_kv.cu does not support. These have adjacent pairs, a rotation that begins
// inside a head, values of another width than keys, queries scaled by position, or norms with a weight offset. Not optimized.
//
// Ownership: a block of 128 threads per (token, head of queries, keys or values). The head is in shared memory as fp32. Thread
// t owns numbers t, t + 128 ...; of rotated pairs, pairs t, t + 128 ...
// Bytes: each number is read once and written once. Limiter: latency, as most threads of a block are idle.
// Reduction order of the norm: a thread adds its squares ascending, then `block_sum` over the block. It depends on the head's
// width only, not on the batch size. Rounds where the reference does (executor/backends/cpu/ops/rope_kv_write.py). These are
// the normed number, its product with the weight (with an offset once, after both) and the product with the sine. The rotated
// number and its product with the position scale follow.
#include "device.cuh"
#include "pointwise.cuh"

namespace quintet {

constexpr int ROPE_THREADS = 128, ROPE_MAX_DIM = 576;

// The heads of all tokens: contiguous within a token, `stride` numbers from one token to the next.
template <class T>
struct TokenHeads {
  const T* first;
  long long stride;
};

struct Rotary {
  int dim, first, interleaved;
};

// Scale of a query by its position.
struct Growth {
  float growth;
  int period, shift, in_parts;
  __device__ __forceinline__ float factor(int position) const {
    const int shifted = position + shift > 0 ? position + shift : 0;
    const float periods = in_parts ? float(shifted) / float(period) : float(shifted / period);
    return fmaf(growth, log1pf(periods), 1.0f);
  }
};

template <class T, class K>
__device__ __forceinline__ void rope_kv_plain(
    TokenHeads<T> q, TokenHeads<T> k, TokenHeads<T> v, T* out, const T* cos, const T* sin, const T* q_norm, const T* k_norm,
    float eps, float offset, K* keys, K* values, const int* kv_rows, const int* positions, int num_heads, int num_kv_heads,
    int head_dim, int value_dim, const Rotary& rotary, long long block_stride, int block_size, const Growth& growth,
    float key_scale, float value_scale) {
  __shared__ float x[ROPE_MAX_DIM];
  const int token = blockIdx.x, all = blockIdx.y, thread = threadIdx.x;
  const bool is_query = all < num_heads, is_value = all >= num_heads + num_kv_heads;
  const int head = is_query ? all : all - num_heads - (is_value ? num_kv_heads : 0);
  const int kv_row = kv_rows[token], width = is_value ? value_dim : head_dim;
  T* query = out + ((long long)token * num_heads + head) * head_dim;
  if (kv_row < 0) {
    for (int i = thread; is_query && i < width; i += ROPE_THREADS) query[i] = from_float<T>(0.0f);
    return;
  }
  const TokenHeads<T>& heads = is_query ? q : is_value ? v : k;
  const T* from = heads.first + token * heads.stride + (long long)head * width;
  float squares = 0.0f;
  for (int i = thread; i < width; i += ROPE_THREADS) {
    const float one = to_float(from[i]);
    squares = fmaf(one, one, squares);
    x[i] = one;
  }
  const T* weight = is_value ? nullptr : is_query ? q_norm : k_norm;
  if (weight != nullptr) {
    const float scale = rsqrtf(block_sum<ROPE_THREADS>(squares) / float(width) + eps);
    for (int i = thread; i < width; i += ROPE_THREADS) {
      const float normed = x[i] * scale, factor = to_float(weight[i]);
      x[i] = offset == 0.0f ? rounded<T>(rounded<T>(normed) * factor) : rounded<T>(normed * (offset + factor));
    }
  }
  __syncthreads();
  const int pairs = is_value ? 0 : rotary.dim / 2;
  for (int i = thread; i < pairs; i += ROPE_THREADS) {
    const int at = rotary.first + (rotary.interleaved ? 2 * i : i), other = at + (rotary.interleaved ? 1 : pairs);
    const long long angle = (long long)token * rotary.dim + i;
    const float c = to_float(cos[angle]), s = to_float(sin[angle]), a = x[at], b = x[other];
    x[at] = rounded<T>(fmaf(a, c, rounded<T>(-b * s)));
    x[other] = rounded<T>(fmaf(b, c, rounded<T>(a * s)));
  }
  __syncthreads();
  if (is_query) {
    const float factor = growth.growth != 0.0f ? growth.factor(positions[token]) : 1.0f;
    for (int i = thread; i < width; i += ROPE_THREADS) query[i] = from_float<T>(x[i] * factor);
  } else {
    const int block = kv_row / block_size, place = kv_row - block * block_size;
    K* to = is_value ? values : keys;
    to += block * block_stride + (long long)(head * block_size + place) * width;
    const float scale = is_value ? value_scale : key_scale;
    for (int i = thread; i < width; i += ROPE_THREADS) to[i] = from_float<K>(sizeof(K) == 1 ? __fdiv_rn(x[i], scale) : x[i]);
  }
}

}  // namespace quintet

using namespace quintet;

// q: [tokens, heads, head_dim], k: [tokens, KV heads, head_dim], v: [tokens, KV heads, value_dim]. q_stride, k_stride,
// v_stride: numbers from one token to the next. out: [tokens, heads, head_dim].
// cos, sin: [tokens, rotary_dim], the second half repeats the first. q_norm, k_norm: [head_dim], or both null.
// keys, values: [KV blocks, KV heads, block_size, head_dim or value_dim], KV blocks block_stride numbers apart.
// kv_rows: [tokens], KV block * block_size + position in it; -1: padding, which writes no KV and gets zero queries. positions:
// [tokens].
// key_scale, value_scale: divisors of an fp8 cache; unused for other formats.
#define QT_ROPE_KV_PLAIN(name, T, K)                                                                                   \
  QT_KERNEL(quintet::ROPE_THREADS, name,                                                                               \
            (const T* q, long long q_stride, const T* k, long long k_stride, const T* v, long long v_stride, T* out,   \
             const T* cos, const T* sin, const T* q_norm, const T* k_norm, float eps, float offset, K* keys,           \
             K* values, const int* kv_rows, const int* positions, int num_heads, int num_kv_heads, int head_dim,       \
             int value_dim, int rotary_dim, int rotary_first, int interleaved, long long block_stride, int block_size, \
             float growth, int period, int shift, int in_parts, float key_scale, float value_scale)) {                 \
    rope_kv_plain<T, K>({q, q_stride}, {k, k_stride}, {v, v_stride}, out, cos, sin, q_norm, k_norm, eps, offset, keys, \
                        values, kv_rows, positions, num_heads, num_kv_heads, head_dim, value_dim,                      \
                        Rotary{rotary_dim, rotary_first, interleaved}, block_stride, block_size,                       \
                        Growth{growth, period, shift, in_parts}, key_scale, value_scale);                              \
  }

QT_ROPE_KV_PLAIN(rope_kv_plain_bf16, bf16, bf16)
QT_ROPE_KV_PLAIN(rope_kv_plain_fp16, fp16, fp16)
QT_ROPE_KV_PLAIN(rope_kv_plain_fp32, float, float)
QT_ROPE_KV_PLAIN(rope_kv_plain_bf16_fp8kv, bf16, fp8)
QT_ROPE_KV_PLAIN(rope_kv_plain_fp16_fp8kv, fp16, fp8)
QT_ROPE_KV_PLAIN(rope_kv_plain_fp32_fp8kv, float, fp8)
