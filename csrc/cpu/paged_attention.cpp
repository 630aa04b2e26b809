// Causal attention of a few new tokens over the paged cache in bf16, block by block where they lie: nothing is gathered.
//
// A thread owns one new token and one KV head with its group of query heads. It walks the keys that the token sees in
// chunks of 128, position by position from the first: scores of a head (VDPBF16PS, 16 keys at a time, whose registers
// are then summed by a tree of shuffles), then the online softmax of Milakov and Gimelshein ("Online normalizer
// calculation for softmax", 2018), then the weighted sum of the values in fp32. A chunk's keys and values are read from
// memory by the first head and from cache by the others of its group.
//
// Per key and KV head: 4 * head_dim bytes, 4 * head_dim FLOPs a query head. Limiter: memory bandwidth for long contexts,
// for short ones the shuffles and exponentials.
//
// Reduction order: chunks begin at the first key the token sees, and within one everything is by position, so a token's
// result has the same bits in every batch. (It may differ in a sliding window's rounding from the same keys seen from
// another first key.)
#include "host.hpp"

#if defined(__x86_64__)

#include <cmath>

namespace {

constexpr index_t kChunk = 128;    // keys
constexpr index_t kMaxWidth = 256; // dimensions of a head
constexpr index_t kMaxGroup = 32;  // query heads of a KV head
constexpr index_t kPairLanes = 32; // bf16 in a register
constexpr index_t kSlice = 4;      // registers of output summed at once
static_assert(kChunk % kLanes == 0);
static_assert(kMaxWidth % kPairLanes == 0);

struct Problem {
  const bf16* queries;  // [tokens][heads][width]
  const bf16* keys;     // [blocks][kv_heads][block_size][width]
  const bf16* values;   // likewise
  const std::int32_t* block_table;
  index_t table_stride;
  const std::int64_t* slots;      // [count]: the row of the block table
  const std::int64_t* positions;  // [count]
  const std::int64_t* tokens;     // [count]: which of queries and out; null: all, in order
  index_t heads, kv_heads, width, block_size;
  index_t window;  // 0: unlimited
  float scale;
  bf16* out;  // like queries
};

// Sums of each of 16 registers, key 4 * i + j from register 4 * i + j.
QT_INLINE __m512 sums_of(const __m512 (&v)[kLanes]) {
  __m512 columns[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 a = v[j], b = v[4 + j], c = v[8 + j], d = v[12 + j];
    const __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    const __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    columns[j] = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
  }
  const __m512 ef = _mm512_add_ps(_mm512_unpacklo_ps(columns[0], columns[1]), _mm512_unpackhi_ps(columns[0], columns[1]));
  const __m512 gh = _mm512_add_ps(_mm512_unpacklo_ps(columns[2], columns[3]), _mm512_unpackhi_ps(columns[2], columns[3]));
  const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ef), _mm512_castps_pd(gh));
  const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ef), _mm512_castps_pd(gh));
  return _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
}

// scores[i] = scale * query · key i, and -inf from `count` to the next multiple of 16; returns the largest.
QT_KERNEL float score(const bf16* query, const bf16* keys, const index_t* at, index_t count, index_t width, float scale,
                      float* scores) {
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (index_t begin = 0; begin < count; begin += kLanes) {
    __m512 dots[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) dots[i] = _mm512_setzero_ps();
    for (index_t d = 0; d < width; d += kPairLanes) {
      const __mmask32 dims = width - d >= kPairLanes ? 0xFFFFFFFFu : 0xFFFFu;
      const __m512bh q = (__m512bh)_mm512_maskz_loadu_epi16(dims, query + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = (__m512bh)_mm512_maskz_loadu_epi16(dims, keys + at[begin + i] + d);
        dots[i] = _mm512_dpbf16_ps(dots[i], q, k);
      }
    }
    const __m512 scaled = _mm512_mul_ps(sums_of(dots), _mm512_set1_ps(scale));
    const __m512 seen = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes_left(begin, count), scaled);
    _mm512_storeu_ps(scores + begin, seen);
    most = _mm512_max_ps(most, seen);
  }
  return _mm512_reduce_max_ps(most);
}

// scores[i] = e^(scores[i] - most), 0 from `count` on; returns their sum.
QT_KERNEL float exponentiate(float* scores, index_t count, float most) {
  __m512 sum = _mm512_setzero_ps();
  for (index_t i = 0; i < count; i += kLanes) {
    const __m512 value = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + i), _mm512_set1_ps(most)));
    const __m512 weight = _mm512_maskz_mov_ps(lanes_left(i, count), value);
    _mm512_storeu_ps(scores + i, weight);
    sum = _mm512_add_ps(sum, weight);
  }
  return _mm512_reduce_add_ps(sum);
}

// out[0, 16 R) = shrink * out + sum over i of weights[i] * values[at[i]]; even and odd keys apart, two chains of additions.
template <int R>
QT_KERNEL void weigh(const float* weights, const bf16* values, const index_t* at, index_t count, float shrink, float* out) {
  __m512 even[R], odd[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    even[r] = _mm512_mul_ps(_mm512_loadu_ps(out + r * kLanes), _mm512_set1_ps(shrink));
    odd[r] = _mm512_setzero_ps();
  }
  for (index_t i = 0; i < count; i += 2) {  // one past an odd count: weight 0, the last key again
    const __m512 first = _mm512_set1_ps(weights[i]), second = _mm512_set1_ps(weights[i + 1]);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      even[r] = _mm512_fmadd_ps(first, load(values + at[i] + r * kLanes), even[r]);
      odd[r] = _mm512_fmadd_ps(second, load(values + at[i + 1] + r * kLanes), odd[r]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * kLanes, _mm512_add_ps(even[r], odd[r]));
}

using Weigh = void (*)(const float*, const bf16*, const index_t*, index_t, float, float*);
constexpr Weigh kWeigh[kSlice] = {weigh<1>, weigh<2>, weigh<3>, weigh<4>};

QT_KERNEL void finish(const float* sums, float normalizer, index_t width, bf16* out) {
  const __m512 share = _mm512_set1_ps(1.0f / normalizer);
  for (index_t d = 0; d < width; d += kLanes) store(out + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), share), 0xFFFF);
}

void attend(const Problem& problem, index_t item) {
  const index_t row = item / problem.kv_heads, kv_head = item % problem.kv_heads, width = problem.width;
  const index_t group = problem.heads / problem.kv_heads;
  const index_t token = problem.tokens ? problem.tokens[row] : row, end = problem.positions[row] + 1;
  const index_t begin = problem.window && end > problem.window ? end - problem.window : 0;
  const std::int32_t* blocks = problem.block_table + problem.slots[row] * problem.table_stride;
  const index_t first_head = (token * problem.heads + kv_head * group) * width;
  alignas(64) float sums[kMaxGroup * kMaxWidth], scores[kChunk];
  float most[kMaxGroup], normalizer[kMaxGroup];
  index_t at[kChunk];  // where each key of the chunk begins, in keys and values alike
  for (index_t head = 0; head < group; ++head) {
    most[head] = -INFINITY;
    normalizer[head] = 0;
    for (index_t d = 0; d < width; ++d) sums[head * kMaxWidth + d] = 0;
  }
  index_t column = begin / problem.block_size, inside = begin % problem.block_size;
  for (index_t chunk = begin; chunk < end; chunk += kChunk) {
    const index_t count = end - chunk < kChunk ? end - chunk : kChunk;
    for (index_t i = 0; i < count; ++i) {
      at[i] = ((blocks[column] * problem.kv_heads + kv_head) * problem.block_size + inside) * width;
      if (++inside == problem.block_size) inside = 0, ++column;
    }
    for (index_t i = count; i % kLanes; ++i) at[i] = at[count - 1];
    for (index_t head = 0; head < group; ++head) {
      const bf16* query = problem.queries + first_head + head * width;
      const float top = score(query, problem.keys, at, count, width, problem.scale, scores);
      const float now = top > most[head] ? top : most[head];
      const float shrink = std::exp(most[head] - now);  // 0 in the first chunk
      normalizer[head] = normalizer[head] * shrink + exponentiate(scores, count, now);
      most[head] = now;
      for (index_t d = 0; d < width; d += kSlice * kLanes) {
        const index_t left = (width - d) / kLanes;
        kWeigh[(left < kSlice ? left : kSlice) - 1](scores, problem.values + d, at, count, shrink,
                                                    sums + head * kMaxWidth + d);
      }
    }
  }
  for (index_t head = 0; head < group; ++head)
    finish(sums + head * kMaxWidth, normalizer[head], width, problem.out + first_head + head * width);
}

}  // namespace

// Whether the kernel takes heads of this shape.
QT_EXPORT int qt_paged_attention_takes(index_t heads, index_t kv_heads, index_t width) {
  return heads % kv_heads == 0 && heads / kv_heads <= kMaxGroup && width % kLanes == 0 && width <= kMaxWidth;
}

QT_EXPORT void qt_paged_attention(const bf16* queries, const bf16* keys, const bf16* values,
                                  const std::int32_t* block_table, index_t table_stride, const std::int64_t* slots,
                                  const std::int64_t* positions, const std::int64_t* tokens, index_t count, index_t heads,
                                  index_t kv_heads, index_t width, index_t block_size, index_t window, float scale,
                                  bf16* out, int threads) {
  const Problem problem{queries,   keys,     values,  block_table, table_stride, slots,  positions, tokens,
                        heads,     kv_heads, width,   block_size,  window,       scale,  out};
  divide(count * kv_heads, 2, threads, [&](index_t item) { attend(problem, item); });
}

#endif
