// The softmax of attention: what the rows of a piece are while keys are walked, and scores to weights, chunk by chunk.
#pragma once

#include "attention_tiles.hpp"

namespace qt::QT_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -__builtin_inff();

// 2^x for x <= 1 within 2 units in the last place, exactly 1 for 0, 0 for -inf: x = n + r with r in [0, 1], 2^r by the
// polynomial of degree 5 that has the least relative error (9e-8) among those that are 1 at 0.
QT_INLINE f32v power_of_two(f32v x) {
#if defined(__AVX512F__)
  const f32v r = _mm512_reduce_ps(x, 0x09);  // x - floor(x); 0 for -inf
#else
  x = max(all(-126.5f), x);  // 2^-127 is 0 below
  const f32v n = round(x - all(0.5f));
  const f32v r = x - n;
#endif
  f32v p = all(0.00186713028f);
  p = fma(p, r, all(0.00901702978f));
  p = fma(p, r, all(0.0557999127f));
  p = fma(p, r, all(0.240164444f));
  p = fma(p, r, all(0.693151295f));
  p = fma(p, r, all(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
#else
  return p * as_float((to_int(n) + 127) << 23);
#endif
}

QT_INLINE float largest_of(f32v value) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps(value);
#else
  return max_of(value);
#endif
}

// The rows of a piece while a partition is walked. Word: what the row's factors are, see attention_tiles.hpp.
template <class Word>
struct Rows {
  index_t count;                             // rows: tokens times heads, heads inner
  index_t heads;
  alignas(64) float most[kMaxRows];          // largest score so far, times log2 e
  alignas(64) float shrink[kMaxRows];        // what the sums are multiplied with before a chunk is added
  alignas(64) float less[kMaxRows];          // `most`, or 0 while nothing was seen
  alignas(64) float normalizer[kMaxRows * kLanes];
  alignas(64) float sums[kMaxRows * kMaxHeadDim];
  alignas(64) float scores[kMaxRows * kChunkKeys];
  alignas(64) Word weights[kMaxRows * kChunkKeys];
  alignas(64) Word queries[kMaxRows * kMaxHeadDim];
  alignas(64) float key_scales[kChunkKeys];    // int8 cache
  alignas(64) float value_scales[kChunkKeys];
};

QT_INLINE f32v counting() {
  f32v numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = float(i);
  return numbers;
}

// cap * tanh(score / cap), with tanh(y) = 1 - 2 / (e^2y + 1).
QT_INLINE f32v capped(f32v score, float cap) {
  const f32v power = exponential(score * all(2.0f / cap));
  return all(cap) - all(2.0f * cap) / (power + all(1.0f));
}

// What becomes of raw scores besides the softmax.
struct Adjustment {
  bool scaled;  // int8 cache: the keys' scales
  bool biased;  // soft-capped, ALiBi: the result is scaled
  bool masked;  // some rows do not see some of the keys
};

// scores[begin, end) of a row whose token is at `position`; the chunk's first key is at `first`.
QT_INLINE f32v adjusted(const AttentionCall& call, Adjustment adjustment, f32v score, float slope, index_t position,
                        index_t key) {
  if (adjustment.biased) {
    score = score * all(call.scale);
    if (call.softcap > 0) score = capped(score, call.softcap);
    const f32v distance = counting() + all(float(key - position));
    score = fma(distance, all(slope), score) * all(kLog2E);
  }
  if (adjustment.masked) {
    // Counted from the vector's first key; exact, as both are small wherever they matter.
    const index_t after = position + 1 - key, before = call.window ? after - call.window : 0;
    const f32v number = counting();
    score = number < all(float(after)) ? score : all(kNothing);
    score = number >= all(float(before)) ? score : all(kNothing);
  }
  return score;
}

// Scores of a chunk to weights, and the rows' new state. first: the position of the chunk's first key.
template <class Word>
void soften(const AttentionCall& call, const AttentionPiece& piece, index_t first_head, const Chunk& chunk, index_t first,
            Adjustment adjustment, Prefetch& prefetch, Rows<Word>& rows) {
  const index_t begin = chunk.begin, end = chunk.begin + chunk.count * kTileKeys;
  const float factor = adjustment.biased ? 1.0f : call.scale * kLog2E;
  index_t position = piece.position, head = 0;
  for (index_t r = 0; r < rows.count; ++r, ++head) {
    if (head == rows.heads) head = 0, ++position;
    float* scores = rows.scores + r * kChunkKeys;
    const float slope = call.alibi_slopes ? call.alibi_slopes[first_head + head] : 0.0f;
    f32v most = all(kNothing);
    for (index_t k = begin; k < end; k += kLanes) {
      f32v score = load(scores + k);
      if (adjustment.scaled) {
        score = score * load(rows.key_scales + k);
        store(scores + k, score);
      }
      if (adjustment.biased || adjustment.masked) {
        score = adjusted(call, adjustment, score, slope, position, first + k);
        store(scores + k, score);
      }
      most = max(most, score);
      prefetch.step();
    }
    rows.shrink[r] = largest_of(most);
  }
  for (index_t r = 0; r < rows.count; r += kLanes) {
    const f32v before = load(rows.most + r), now = max(before, load(rows.shrink + r) * all(factor));
    const f32v less = now > all(kNothing) ? now : all(0.0f);
    store(rows.most + r, now);
    store(rows.less + r, less);
    store(rows.shrink + r, power_of_two(before - less));
  }
  for (index_t r = 0; r < rows.count; ++r) {
    const float* scores = rows.scores + r * kChunkKeys;
    f32v normalizer = load(rows.normalizer + r * kLanes) * all(rows.shrink[r]);
    const f32v less = all(rows.less[r]);
    if constexpr (std::is_same_v<Word, Pairs::Word>) {
      bf16* weights = (bf16*)(rows.weights + r * words<Pairs>(kChunkKeys));
      const index_t from = begin / (2 * kLanes) * (2 * kLanes), to = (end + 2 * kLanes - 1) / (2 * kLanes) * (2 * kLanes);
      if (from < begin) store(weights + from, all(0.0f));
      if (to > end) store(weights + end, all(0.0f));
      for (index_t k = begin; k < end; k += kLanes) {
        f32v weight = power_of_two(fma(load(scores + k), all(factor), -less));
        if (adjustment.scaled) {
          normalizer = normalizer + weight;
          weight = weight * load(rows.value_scales + k);
        }
        store(weights + k, weight);
        prefetch.step();
      }
      const i32v ones = all(std::int32_t(0x3F803F80));
      if (!adjustment.scaled)
        for (index_t k = from; k < to; k += 2 * kLanes) normalizer = dot_pairs(normalizer, load_bits(weights + k), ones);
    } else {
      float* weights = rows.weights + r * kChunkKeys;
      for (index_t k = begin; k < end; k += kLanes) {
        f32v weight = power_of_two(fma(load(scores + k), all(factor), -less));
        normalizer = normalizer + weight;
        if (adjustment.scaled) weight = weight * load(rows.value_scales + k);
        store(weights + k, weight);
        prefetch.step();
      }
    }
    store(rows.normalizer + r * kLanes, normalizer);
  }
}

}  // namespace
}  // namespace qt::QT_ISA
