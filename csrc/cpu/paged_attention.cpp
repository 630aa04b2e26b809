// Causal attention of a few new tokens over the paged cache in bf16, block by block where they lie: nothing is gathered.
//
// A thread owns one new token and one KV head with its group of query heads. It walks the keys that the token sees in
// chunks of 128, position by position from the first: scores of a head (VDPBF16PS, 16 keys at a time, whose registers
// are then summed by a tree of shuffles), then the online softmax of Milakov and Gimelshein ("Online normalizer
// calculation for softmax", 2018), then the weighted sum of the values in fp32. A chunk's keys and values are read from
// memory once and from cache by the other heads of its group. While a chunk is computed, the keys and values of the chunk
// after it, be it the next item's, are prefetched a few lines at a time: pages are too short for the processor to foresee.
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
  index_t count, heads, kv_heads, width, block_size;
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

// Where the keys of a chunk begin, in keys and values alike.
struct Chunk {
  index_t count;       // keys
  index_t at[kChunk];  // up to the next multiple of 16 the last key's again
};

// Brings a chunk's keys and values closer, some lines of the cache at each step of the work on the chunk before.
class Prefetch {
 public:
  Prefetch(const Problem& problem, const Chunk* ahead, index_t steps)
      : problem_(problem), ahead_(ahead), count_(ahead ? ahead->count : 0) {
    const index_t lines = (problem.width + kPairLanes - 1) / kPairLanes;
    lines_a_step_ = (count_ * lines + steps - 1) / steps;
  }

  void step() {
    for (index_t line = 0; line < lines_a_step_ && key_ < count_; ++line) {
      const index_t at = ahead_->at[key_] + dimension_;
      __builtin_prefetch(problem_.keys + at);
      __builtin_prefetch(problem_.values + at);
      dimension_ += kPairLanes;
      if (dimension_ >= problem_.width) dimension_ = 0, ++key_;
    }
  }

 private:
  const Problem& problem_;
  const Chunk* ahead_;
  index_t count_, lines_a_step_, key_ = 0, dimension_ = 0;
};

// scores[i] = scale * query · key i, and -inf from the chunk's count to the next multiple of 16; returns the largest.
QT_KERNEL float score(const Problem& problem, const bf16* query, const Chunk& chunk, Prefetch& ahead, float* scores) {
  const index_t count = chunk.count, width = problem.width;
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (index_t begin = 0; begin < count; begin += kLanes) {
    ahead.step();
    __m512 dots[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) dots[i] = _mm512_setzero_ps();
    for (index_t d = 0; d < width; d += kPairLanes) {
      const __mmask32 dims = width - d >= kPairLanes ? 0xFFFFFFFFu : 0xFFFFu;
      const __m512bh q = (__m512bh)_mm512_maskz_loadu_epi16(dims, query + d);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        const __m512bh k = (__m512bh)_mm512_maskz_loadu_epi16(dims, problem.keys + chunk.at[begin + i] + d);
        dots[i] = _mm512_dpbf16_ps(dots[i], q, k);
      }
    }
    const __m512 scaled = _mm512_mul_ps(sums_of(dots), _mm512_set1_ps(problem.scale));
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

// out[0, 16 R) = shrink * out + sum over i of weights[i] * value i; even and odd keys apart, two chains of additions.
template <int R>
QT_KERNEL void weigh(const float* weights, const bf16* values, const Chunk& chunk, float shrink, Prefetch& ahead,
                     float* out) {
  __m512 even[R], odd[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    even[r] = _mm512_mul_ps(_mm512_loadu_ps(out + r * kLanes), _mm512_set1_ps(shrink));
    odd[r] = _mm512_setzero_ps();
  }
  for (index_t begin = 0; begin < chunk.count; begin += kLanes) {
    ahead.step();
    const index_t end = chunk.count - begin < kLanes ? chunk.count : begin + kLanes;
    for (index_t i = begin; i < end; i += 2) {  // one past an odd count: weight 0, the last key again
      const __m512 first = _mm512_set1_ps(weights[i]), second = _mm512_set1_ps(weights[i + 1]);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        even[r] = _mm512_fmadd_ps(first, load(values + chunk.at[i] + r * kLanes), even[r]);
        odd[r] = _mm512_fmadd_ps(second, load(values + chunk.at[i + 1] + r * kLanes), odd[r]);
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) _mm512_storeu_ps(out + r * kLanes, _mm512_add_ps(even[r], odd[r]));
}

using Weigh = void (*)(const float*, const bf16*, const Chunk&, float, Prefetch&, float*);
constexpr Weigh kWeigh[kSlice] = {weigh<1>, weigh<2>, weigh<3>, weigh<4>};

QT_KERNEL void finish(const float* sums, float normalizer, index_t width, bf16* out) {
  const __m512 share = _mm512_set1_ps(1.0f / normalizer);
  for (index_t d = 0; d < width; d += kLanes) store(out + d, _mm512_mul_ps(_mm512_loadu_ps(sums + d), share), 0xFFFF);
}

// A token with one KV head, and the positions it sees.
struct Item {
  index_t row, kv_head;
  index_t begin, end;
};

Item item_of(const Problem& problem, index_t number) {
  const index_t row = number / problem.kv_heads, end = problem.positions[row] + 1;
  const index_t begin = problem.window && end > problem.window ? end - problem.window : 0;
  return {row, number % problem.kv_heads, begin, end};
}

void locate(const Problem& problem, const Item& item, index_t position, Chunk& chunk) {
  const std::int32_t* blocks = problem.block_table + problem.slots[item.row] * problem.table_stride;
  index_t column = position / problem.block_size, inside = position % problem.block_size, done = 0;
  chunk.count = item.end - position < kChunk ? item.end - position : kChunk;
  while (done < chunk.count) {
    index_t at = ((blocks[column++] * problem.kv_heads + item.kv_head) * problem.block_size + inside) * problem.width;
    for (; inside < problem.block_size && done < chunk.count; ++inside, at += problem.width) chunk.at[done++] = at;
    inside = 0;
  }
  for (; done % kLanes; ++done) chunk.at[done] = chunk.at[chunk.count - 1];
}

void attend(const Problem& problem, index_t number) {
  const Item item = item_of(problem, number);
  const index_t group = problem.heads / problem.kv_heads, width = problem.width;
  const index_t token = problem.tokens ? problem.tokens[item.row] : item.row;
  const index_t first_head = (token * problem.heads + item.kv_head * group) * width;
  alignas(64) float sums[kMaxGroup * kMaxWidth], scores[kChunk];
  float most[kMaxGroup], normalizer[kMaxGroup];
  for (index_t head = 0; head < group; ++head) {
    most[head] = -INFINITY;
    normalizer[head] = 0;
    for (index_t d = 0; d < width; ++d) sums[head * kMaxWidth + d] = 0;
  }
  Chunk chunks[2];
  int current = 0;
  locate(problem, item, item.begin, chunks[current]);
  for (index_t position = item.begin; position < item.end; position += kChunk, current = 1 - current) {
    const Chunk& chunk = chunks[current];
    Chunk* ahead = &chunks[1 - current];
    if (position + kChunk < item.end) {
      locate(problem, item, position + kChunk, *ahead);
    } else if (number + 1 < problem.count * problem.kv_heads) {
      const Item next = item_of(problem, number + 1);
      locate(problem, next, next.begin, *ahead);
    } else {
      ahead = nullptr;
    }
    const index_t slices = (width + kSlice * kLanes - 1) / (kSlice * kLanes);
    Prefetch prefetch(problem, ahead, group * (1 + slices) * ((chunk.count + kLanes - 1) / kLanes));
    for (index_t head = 0; head < group; ++head) {
      const bf16* query = problem.queries + first_head + head * width;
      const float top = score(problem, query, chunk, prefetch, scores);
      const float now = top > most[head] ? top : most[head];
      const float shrink = std::exp(most[head] - now);  // 0 in the first chunk
      normalizer[head] = normalizer[head] * shrink + exponentiate(scores, chunk.count, now);
      most[head] = now;
      for (index_t d = 0; d < width; d += kSlice * kLanes) {
        const index_t left = (width - d) / kLanes;
        kWeigh[(left < kSlice ? left : kSlice) - 1](scores, problem.values + d, chunk, shrink, prefetch,
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
  const Problem problem{
      .queries = queries,
      .keys = keys,
      .values = values,
      .block_table = block_table,
      .table_stride = table_stride,
      .slots = slots,
      .positions = positions,
      .tokens = tokens,
      .count = count,
      .heads = heads,
      .kv_heads = kv_heads,
      .width = width,
      .block_size = block_size,
      .window = window,
      .scale = scale,
      .out = out,
  };
  divide(count * kv_heads, 2, threads, [&](index_t item) { attend(problem, item); });
}

#endif
