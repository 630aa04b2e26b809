// RMS norm of query and key heads (Qwen3), rotary embedding and KV write, in one launch between the QKV projection and
// attention. Rotary embedding: Su et al., "RoFormer", 2021, section 3.4.2; element i is paired with i + rotary_dim / 2.
//
// Ownership: `lanes` adjacent threads own a head of a token. `lanes` is a power of two, so they share a warp. Each thread owns
// one item: a pack of 16 bytes in the first half of the rotated elements and its partners in the second half, or two packs
// without rotation. In the `single` kernels an item is two numbers and a thread has up to 8 items, for heads that packs do not
// divide evenly.
// Bytes: each number is read once and written once, 4 bytes in 16-bit formats, for some 6 FLOPs. Limiter: memory bandwidth in
// prefill, latency in decode. The cache position of each token is precomputed in the step's tables (`kv_rows`).
//
// Reduction order of the norm: a thread adds its items ascending, then a butterfly over the head's lanes. It depends on the
// head's width only, not on the batch size. Results are rounded to the model's format where the reference rounds
// (executor/backends/cpu/ops/rms_norm.py, rope_kv_write.py): the normed number, its product with the weight, the product with
// the sine, the rotated number. The product with the cosine and the addition of the sine's product are one fused operation.
#include "device.cuh"
#include "pointwise.cuh"

namespace quintet {
namespace {

template <class K, int V>
__device__ __forceinline__ void store_cached(K* address, const float (&x)[V]) {
  Numbers<K, V> numbers;
  numbers.round(x);
  numbers.store(address);
}
// fp8 destination: half or a quarter of the bytes of the source.
template <>
__device__ __forceinline__ void store_cached<fp8, 8>(fp8* address, const float (&x)[8]) {
  const uint64_t low = fp8_bits_pair(x[0], x[1]) | (uint32_t(fp8_bits_pair(x[2], x[3])) << 16);
  const uint64_t high = fp8_bits_pair(x[4], x[5]) | (uint32_t(fp8_bits_pair(x[6], x[7])) << 16);
  *reinterpret_cast<uint64_t*>(address) = low | (high << 32);
}
template <>
__device__ __forceinline__ void store_cached<fp8, 4>(fp8* address, const float (&x)[4]) {
  *reinterpret_cast<uint32_t*>(address) = fp8_bits_pair(x[0], x[1]) | (uint32_t(fp8_bits_pair(x[2], x[3])) << 16);
}

// Stores numbers in the cache's format; fp8 numbers are first divided by the layer's scale.
template <class K, int V>
__device__ __forceinline__ void store_scaled(K* address, float (&x)[V], float scale) {
  if constexpr (sizeof(K) == 1) {
#pragma unroll
    for (int i = 0; i < V; i++) x[i] = __fdiv_rn(x[i], scale);
  }
  store_cached(address, x);
}

// The heads of all tokens: contiguous within a token, `stride` numbers from one token to the next.
template <class T>
struct Heads {
  const T* first;
  long long stride;
};

// Elements of an item in its head.
struct Item {
  int first, second;  // V numbers each
  bool rotates, has_second;

  __device__ __forceinline__ Item(int index, int V, int head_dim, int rotary_dim) {
    const int half = rotary_dim / 2;
    rotates = index * V < half;
    first = rotates ? index * V : rotary_dim + 2 * (index * V - half);
    second = rotates ? first + half : first + V;
    has_second = second < head_dim;
  }
};

template <class T, int V>
__device__ __forceinline__ void load_floats(const T* address, float (&x)[V]) {
  Numbers<T, V> numbers;
  numbers.load(address);
#pragma unroll
  for (int i = 0; i < V; i++) x[i] = numbers.get(i);
}

template <class T, int V>
__device__ __forceinline__ void scale_floats(float (&x)[V], const T* weight, float scale) {
  float w[V];
  load_floats(weight, w);
#pragma unroll
  for (int i = 0; i < V; i++) x[i] = rounded<T>(rounded<T>(x[i] * scale) * w[i]);
}

template <class T, int V>
__device__ __forceinline__ void rotate(float (&x)[V], float (&y)[V], const T* cos, const T* sin) {
  float c[V], s[V];
  load_floats(cos, c);
  load_floats(sin, s);
#pragma unroll
  for (int i = 0; i < V; i++) {
    const float rotated = fmaf(x[i], c[i], rounded<T>(-y[i] * s[i]));
    y[i] = rounded<T>(fmaf(y[i], c[i], rounded<T>(x[i] * s[i])));
    x[i] = rounded<T>(rotated);
  }
}

template <class T, class K, int V, int ITEMS>
__device__ __forceinline__ void rope_kv(Heads<T> q, Heads<T> k, Heads<T> v, T* out, long long out_stride, const T* cos,
                                        const T* sin, const T* q_norm, const T* k_norm, float eps, K* kv,
                                        const int* kv_rows, int num_tokens, int num_heads, int num_kv_heads,
                                        int head_dim, int rotary_dim, long long plane, long long block_stride,
                                        int block_size, int lanes, float key_scale, float value_scale) {
  const int num_all = num_heads + 2 * num_kv_heads;
  const int owned = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;  // index of (token, head)
  const int lane = threadIdx.x % lanes;
  const int token = owned / num_all, head = owned - token * num_all;
  const int kv_row = token < num_tokens ? kv_rows[token] : -1;
  const bool is_query = head < num_heads, is_value = head >= num_heads + num_kv_heads;
  const int kv_head = head - num_heads - (is_value ? num_kv_heads : 0);
  const Heads<T>& heads = is_query ? q : is_value ? v : k;
  const T* from = heads.first + token * heads.stride + (is_query ? head : kv_head) * head_dim;
  const int num_items = (rotary_dim / 2 + (head_dim - rotary_dim + 1) / 2 + V - 1) / V;

  // A thread without a head of a real token computes on zeros: it must take part in the warp's shuffles.
  float x[ITEMS][V], y[ITEMS][V];
  float squares = 0.0f;
#pragma unroll
  for (int k = 0; k < ITEMS; k++) {
    const int index = lane + k * lanes;
    const Item item(index, V, head_dim, rotary_dim);
#pragma unroll
    for (int i = 0; i < V; i++) x[k][i] = y[k][i] = 0.0f;
    if (kv_row >= 0 && index < num_items) {
      load_floats(from + item.first, x[k]);
      if (item.has_second) load_floats(from + item.second, y[k]);
    }
#pragma unroll
    for (int i = 0; i < V; i++) squares = fmaf(x[k][i], x[k][i], squares);
#pragma unroll
    for (int i = 0; i < V; i++) squares = fmaf(y[k][i], y[k][i], squares);
  }
  float scale = 1.0f;
  const bool normed = q_norm != nullptr;
  if (normed) {
    for (int step = lanes / 2; step > 0; step /= 2) squares += __shfl_xor_sync(FULL_WARP, squares, step);
    scale = rsqrtf(squares / float(head_dim) + eps);
  }
  if (token >= num_tokens || (kv_row < 0 && !is_query)) return;

  const T* weight = is_query ? q_norm : k_norm;
  K* cached = nullptr;
  if (!is_query) {
    const int block = kv_row / block_size, place = kv_row - block * block_size;
    cached = kv + block * block_stride + (is_value ? plane : 0) + (long long)(kv_head * block_size + place) * head_dim;
  }
  T* queries = out + token * out_stride + head * head_dim;
#pragma unroll
  for (int k = 0; k < ITEMS; k++) {
    const int index = lane + k * lanes;
    if (index >= num_items) continue;
    const Item item(index, V, head_dim, rotary_dim);
    if (kv_row >= 0 && !is_value) {
      if (normed) {
        scale_floats(x[k], weight + item.first, scale);
        if (item.has_second) scale_floats(y[k], weight + item.second, scale);
      }
      if (item.rotates) {
        const long long row = static_cast<long long>(token) * rotary_dim;
        rotate(x[k], y[k], cos + row + item.first, sin + row + item.first);
      }
    }
    if (is_query) {
      store_cached(queries + item.first, x[k]);
      if (item.has_second) store_cached(queries + item.second, y[k]);
    } else {
      store_scaled(cached + item.first, x[k], is_value ? value_scale : key_scale);
      if (item.has_second) store_scaled(cached + item.second, y[k], is_value ? value_scale : key_scale);
    }
  }
}

}  // namespace
}  // namespace quintet

using namespace quintet;

// q: [tokens, heads, head_dim]; k, v: [tokens, KV heads, head_dim]. q_stride, k_stride, v_stride, out_stride: numbers from one
// token to the next. out: the queries; may be q.
// cos, sin: [tokens, rotary_dim], the second half repeats the first. q_norm, k_norm: [head_dim], or both null.
// kv: keys [KV blocks, KV heads, block_size, head_dim], KV blocks block_stride numbers apart; values `plane` numbers after
// their keys.
// kv_rows: [tokens], KV block * block_size + position in it; -1 for padding, which writes no KV and gets zero queries.
// key_scale, value_scale: divisors of an fp8 cache; unused for other formats.
#define QT_ROPE_KV(name, T, K, V, ITEMS)                                                                          \
  QT_KERNEL_OCCUPANCY(128, 4, name,                                                                               \
            (const T* q, long long q_stride, const T* k, long long k_stride, const T* v, long long v_stride,      \
             T* out, long long out_stride, const T* cos, const T* sin, const T* q_norm, const T* k_norm,          \
             float eps, K* kv, const int* kv_rows, int num_tokens, int num_heads, int num_kv_heads,               \
             int head_dim, int rotary_dim, long long plane, long long block_stride, int block_size, int lanes,    \
             float key_scale, float value_scale)) {                                                               \
    rope_kv<T, K, V, ITEMS>({q, q_stride}, {k, k_stride}, {v, v_stride}, out, out_stride, cos, sin, q_norm,       \
                            k_norm, eps, kv, kv_rows, num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim,  \
                            plane, block_stride, block_size, lanes, key_scale, value_scale);                      \
  }

#define QT_ROPE_KVS(format, T)                                               \
  QT_ROPE_KV(rope_kv_##format, T, T, Pack<T>::SIZE, 1)                       \
  QT_ROPE_KV(rope_kv_##format##_fp8kv, T, fp8, Pack<T>::SIZE, 1)             \
  QT_ROPE_KV(rope_kv_single_##format, T, T, 1, 8)                            \
  QT_ROPE_KV(rope_kv_single_##format##_fp8kv, T, fp8, 1, 8)

QT_ROPE_KVS(bf16, bf16)
QT_ROPE_KVS(fp16, fp16)
QT_ROPE_KVS(fp32, float)
