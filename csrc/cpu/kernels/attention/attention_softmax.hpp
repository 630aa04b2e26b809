// Softmax of attention: the state of a piece's rows while keys are walked, and scores to weights, one chunk at a time.
//
// Cost per score: 8 operations on the multiply ports (one fused multiply-add, 7 for the exponential), a maximum before and a sum
// after. Weights in bf16 for AMX: 5 for the exponential and 4 to round, add and pair. The products take 2 * head_dim
// multiplications per score. Unseen keys are free, except in the vector of the row's last key, or with a window, chunked
// attention, a soft cap or ALiBi.
#pragma once

#include "attention_wide.hpp"

namespace qt::QT_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -__builtin_inff();

// 2^x for x <= 1 within 2 units in the last place; exactly 1 for 0, 0 for -inf. x = n + r with r in [0, 1]. 2^r is the polynomial
// of degree 5 with the least relative error (9e-8) among those that are 1 at 0. Degree 3 (9e-5) is for results that are rounded
// to bf16.
template <int kDegree = 5>
QT_INLINE f32v power_of_two(f32v x) {
  static_assert(kDegree == 3 || kDegree == 5);
#if defined(__AVX512F__)
  const f32v r = _mm512_reduce_ps(x, 0x09);  // x - floor(x); 0 for -inf
#else
  x = max(all(-126.5f), x);  // 2^-127 becomes 0 below
  const f32v n = round(x - all(0.5f));
  const f32v r = x - n;
#endif
  f32v p;
  if constexpr (kDegree == 5) {
    p = all(0.00186713028f);
    p = fma(p, r, all(0.00901702978f));
    p = fma(p, r, all(0.0557999127f));
    p = fma(p, r, all(0.240164444f));
    p = fma(p, r, all(0.693151295f));
  } else {
    p = all(0.0770670623f);
    p = fma(p, r, all(0.227644965f));
    p = fma(p, r, all(0.695116818f));
  }
  p = fma(p, r, all(1.0f));
#if defined(__AVX512F__)
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
#else
  return p * as_float((to_int(n) + 127) << 23);
#endif
}

// Lane i of the result is the fold of the lanes of vector i, by halves: lane j with j + kLanes / 2, then quarters.
template <int Apart = kLanes / 2, class Fold>
QT_INLINE f32v fold_each(f32v (&vectors)[kLanes], Fold fold) {
#pragma GCC unroll 8
  for (int i = 0; i < Apart; ++i) {
    i32v a = as_bits(vectors[i]), b = as_bits(vectors[i + Apart]);
    swap_halves<Apart>(a, b);
    vectors[i] = fold(as_float(a), as_float(b));
  }
  if constexpr (Apart > 1)
    return fold_each<Apart / 2>(vectors, fold);
  else
    return vectors[0];
}

// Some tokens of a piece with their heads: the rows that share a softmax pass, and their state within a partition. Word: type of
// the row factors, see attention_tiles.hpp.
template <class Word>
struct Group {
  index_t token, position;                   // the first token's index in the step, and its position
  index_t tokens, heads, rows;               // rows: tokens times heads, heads inner
  index_t first_row;                         // rows of the piece's earlier groups
  alignas(64) float most[kMaxRows];          // largest score so far, times log2 e
  alignas(64) float shrink[kMaxRows];        // factor of the sums before a chunk is added
  alignas(64) float less[kMaxRows];          // `most`, or 0 while no key was seen
  alignas(64) float normalizer[kMaxRows * kLanes];
  float* sums;                               // [rows][value_dim]
  Word* queries;                             // layout of attention_tiles.hpp, _wide.hpp or _matrix.hpp
  float* total;                              // of earlier partitions: [rows][value_dim + 2]
};

// Buffers of a piece, reused by one group after another.
template <class Word>
struct Scratch {
  static constexpr bool kInPlace = std::is_same_v<Word, float>;  // weights overwrite scores
  static constexpr bool kOfMatrix = std::is_same_v<Word, MatrixWord>;  // two groups are in progress at a time
  // Words of a chunk's keys and of its values: widened, or in AMX layout.
  static constexpr index_t kOfChunk = kInPlace ? kChunkKeys : kOfMatrix ? kChunkKeys / 2 : 0;
  alignas(64) float scores[(kOfMatrix ? 2 : 1) * kMaxRows * kChunkKeys];
  alignas(64) Word pairs[kInPlace ? 1 : (kOfMatrix ? 2 : 1) * kMaxRows * kChunkKeys / 2];
  alignas(64) float added[kOfMatrix ? kMaxRows * kMaxValueDim : 1];  // chunk's contribution to a group's sums
  alignas(64) float largest[kMaxRows * kLanes];  // score of a chunk, by lane
  alignas(64) float key_scales[kChunkKeys];      // int8 cache
  alignas(64) float value_scales[kChunkKeys];
  alignas(64) float key_factors[kChunkTiles][kMaxFourGroups * kFactorsOfGroup];  // int4 cache
  alignas(64) float value_factors[kChunkTiles][kMaxFourGroups * kFactorsOfGroup];
  alignas(64) char values_of_keys[kChunkKeys * kMaxValueDim * 4];  // latent attention: a chunk's tiles of values
  alignas(64) Word keys[kOfChunk * kMaxKeyDim + 1];
  alignas(64) Word values[kOfChunk * kMaxValueDim + 1];
  alignas(64) float sums[kMaxNumbers];         // of all groups, like the next two
  alignas(64) Word queries[kMaxNumbers];
  alignas(64) float totals[kMaxNumbers + 2 * kMaxGroups * kMaxRows];

  // Buffers of the group in progress, or of one of two.
  float* scores_of(index_t one = 0) { return scores + one * kMaxRows * kChunkKeys; }
  Word* weights(index_t one = 0) {
    if constexpr (kInPlace)
      return scores;
    else
      return pairs + one * kMaxRows * kChunkKeys / 2;
  }
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

// Scale of the scores of query heads from `first_head` on that share a KV head. Includes the key scale of an fp8 cache.
QT_INLINE float scale_of(const AttentionCall& call, index_t first_head) {
  const float* scales = call.layer.key_scales;
  return scales ? call.layer.scale * scales[first_head / call.group] : call.layer.scale;
}

// A vector of scores of the token at `position`, for keys from `key` on, adjusted. biased: scale, soft cap and ALiBi are applied
// here. Unseen keys get minus infinity.
QT_INLINE f32v adjusted(const AttentionCall& call, bool biased, f32v score, float scale, float slope, index_t position,
                        index_t key) {
  if (biased) {
    score = score * all(scale);
    if (call.layer.softcap > 0) score = capped(score, call.layer.softcap);
    const f32v distance = counting() + all(float(key - position));
    score = fma(distance, all(slope), score) * all(kLog2E);
  }
  // Relative to the vector's first key: exact, as both are small where they matter.
  const index_t after = position + 1 - key, before = seen_from(call.layer.window, call.layer.chunk, position) - key;
  const f32v number = counting();
  score = number < all(float(after)) ? score : all(kNothing);
  return number >= all(float(before)) ? score : all(kNothing);
}

// The keys of a chunk that a group multiplies: [begin, end), relative to the chunk's first key, which is at `first`.
struct Keys {
  index_t first, begin, end;
};

// Key ranges of a row, in whole vectors: [begin, whole) are seen without adjustment, [whole, last) are adjusted, the rest is not
// seen.
struct Seen {
  index_t whole, last;
};

QT_INLINE Seen seen_of(const AttentionCall& call, bool biased, Keys keys, index_t position) {
  const index_t after = position + 1 - keys.first;
  const index_t before = seen_from(call.layer.window, call.layer.chunk, position) - keys.first;
  if (after >= keys.end && !biased && before <= keys.begin) return {keys.end, keys.end};
  if (after <= keys.begin) return {keys.begin, keys.begin};
  const index_t end = after < keys.end ? after : keys.end;
  const bool adjust_all = biased || before > keys.begin;
  return {adjust_all ? keys.begin : end / kLanes * kLanes, (end + kLanes - 1) / kLanes * kLanes};
}

// A row's weights for AMX: [keys / 32][16] words. Keys [begin, last) are weighted from their scores; the rest of the whole tile
// pairs is 0. Rounded to bf16, ties away from zero. The normalizer adds the rounded weights, one tile pair after another.
// kScaled: weights are multiplied by int8 value scales before the rounding; the normalizer adds them unscaled and unrounded.
template <bool kScaled>
QT_INLINE f32v weigh_pairs_of_tiles(const float* scores, const float* scales, Keys keys, index_t last, float factor, f32v less,
                                    f32v normalizer, MatrixWord* weights) {
  const i32v high = all(std::int32_t(0xFFFF0000));
  const auto weight = [&](index_t k) __attribute__((always_inline)) {
    return power_of_two<3>(fma(load(scores + k), all(factor), -less));
  };
  const auto put = [&](index_t k, f32v first, f32v second) __attribute__((always_inline)) {
    if constexpr (kScaled) {
      normalizer = normalizer + (first + second);
      first = first * load(scales + k);
      second = second * load(scales + k + kTileKeys);
    }
    const i32v a = as_bits(first) + all(0x8000), b = as_bits(second) + all(0x8000);
    if constexpr (!kScaled) normalizer = normalizer + (as_float(a & high) + as_float(b & high));
    const i32v words = (i32v)((u32v)a >> 16) | (b & high);
    std::memcpy(weights + k / 2, &words, sizeof words);
  };
  const f32v none = all(0.0f);
  constexpr index_t step = 2 * kTileKeys;
  index_t k = keys.begin / step * step;
  if (k < keys.begin && keys.begin < last) put(k, none, weight(k + kTileKeys)), k += step;
  for (; k + step <= last; k += step) put(k, weight(k), weight(k + kTileKeys));
  if (k < last) put(k, weight(k), none), k += step;
  for (; k < keys.end; k += step) std::memset(weights + k / 2, 0, step * 2);
  return normalizer;
}

enum class Pass { scores, weights };

// Turns the scores [rows][kChunkKeys] of a chunk into weights and updates the state of the rows. kScaled: applies the int8 scales
// to scores and weights. beside(pass) is called for every row of both passes, to interleave other work.
template <bool kScaled, class Word, class Beside>
void soften(const AttentionCall& call, index_t first_head, Keys keys, Group<Word>& group, float* all_scores,
            Word* all_weights, Scratch<Word>& scratch, Beside beside) {
  const bool biased = call.layer.softcap > 0 || call.layer.alibi_slopes != nullptr;
  const float scale = scale_of(call, first_head), factor = biased ? 1.0f : scale * kLog2E;
  index_t position = group.position, head = 0;
  for (index_t r = 0; r < group.rows; ++r, ++head) {
    if (head == group.heads) head = 0, ++position;
    float* scores = all_scores + r * kChunkKeys;
    const Seen seen = seen_of(call, biased, keys, position);
    f32v most = all(kNothing);
    const auto take = [&](index_t k) __attribute__((always_inline)) {
      f32v score = load(scores + k);
      if constexpr (kScaled) {
        score = score * load(scratch.key_scales + k);
        store(scores + k, score);
      }
      most = max(most, score);
    };
    if (seen.whole - keys.begin == kChunkKeys) {
#pragma GCC unroll 8
      for (index_t k = 0; k < kChunkKeys; k += kLanes) take(k);
    } else {
      for (index_t k = keys.begin; k < seen.whole; k += kLanes) take(k);
    }
    beside(Pass::scores);
    const float slope = call.layer.alibi_slopes ? call.layer.alibi_slopes[first_head + head] : 0.0f;
    for (index_t k = seen.whole; k < seen.last; k += kLanes) {
      f32v score = load(scores + k);
      if constexpr (kScaled) score = score * load(scratch.key_scales + k);
      score = adjusted(call, biased, score, scale, slope, position, keys.first + k);
      store(scores + k, score);
      most = max(most, score);
    }
    store(scratch.largest + r * kLanes, most);
  }
  for (index_t r = group.rows; r % kLanes; ++r) store(scratch.largest + r * kLanes, all(kNothing));
  for (index_t r = 0; r < group.rows; r += kLanes) {
    f32v largest[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) largest[i] = load(scratch.largest + (r + i) * kLanes);
    const f32v most = fold_each(largest, [](f32v a, f32v b) { return max(a, b); });
    const f32v before = load(group.most + r), now = max(before, most * all(factor));
    const f32v less = now > all(kNothing) ? now : all(0.0f);
    store(group.most + r, now);
    store(group.less + r, less);
    store(group.shrink + r, power_of_two(before - less));
  }
  position = group.position, head = 0;
  for (index_t r = 0; r < group.rows; ++r, ++head) {
    if (head == group.heads) head = 0, ++position;
    const float* scores = all_scores + r * kChunkKeys;
    const index_t last = seen_of(call, biased, keys, position).last;
    beside(Pass::weights);
    f32v normalizer = load(group.normalizer + r * kLanes) * all(group.shrink[r]);
    const f32v less = all(group.less[r]);
    if constexpr (std::is_same_v<Word, Pairs::Word>) {
      static_assert(!kScaled);
      bf16* weights = (bf16*)(all_weights + r * words<Pairs>(kChunkKeys));
      const index_t step = 2 * kLanes, from = keys.begin / step * step, to = (keys.end + step - 1) / step * step;
      if (from < keys.begin) store(weights + from, all(0.0f));
      for (index_t k = keys.begin; k < last; k += kLanes) {
        store(weights + k, power_of_two(fma(load(scores + k), all(factor), -less)));
      }
      for (index_t k = last; k < to; k += kLanes) store(weights + k, all(0.0f));
      const i32v ones = all(std::int32_t(0x3F803F80));
      for (index_t k = from; k < to; k += step) normalizer = dot_pairs(normalizer, load_bits(weights + k), ones);
    } else if constexpr (std::is_same_v<Word, MatrixWord>) {
      normalizer = weigh_pairs_of_tiles<kScaled>(scores, scratch.value_scales, keys, last, factor,
                                                 less, normalizer, all_weights + r * kChunkKeys / 2);
    } else {
      float* weights = all_weights + r * kChunkKeys;
      for (index_t k = keys.begin; k < last; k += kLanes) {
        f32v weight = power_of_two(fma(load(scores + k), all(factor), -less));
        normalizer = normalizer + weight;
        if constexpr (kScaled) weight = weight * load(scratch.value_scales + k);
        store(weights + k, weight);
      }
      for (index_t k = last; k < keys.end; k += kLanes) store(weights + k, all(0.0f));
    }
    store(group.normalizer + r * kLanes, normalizer);
  }
}

}  // namespace
}  // namespace qt::QT_ISA
