// The softmax of attention: what the rows of a piece are while keys are walked, and scores to weights, chunk by chunk.
//
// Per score 8 operations on the ports that multiply: one fused multiply-add, 7 of them to raise 2 (5 where weights are bf16
// for the matrix unit, and 4 to round, add up and pair them); a maximum before and a sum after. Beside them 2 * head_dim
// multiplications. Keys that a row does not see cost nothing, except in the vector where the row's last key is, and where
// there is a window or a chunk, a soft cap or ALiBi.
#pragma once

#include "attention_wide.hpp"

namespace qt::QT_ISA {
namespace {

constexpr float kLog2E = 1.44269504f;
constexpr float kNothing = -__builtin_inff();

// 2^x for x <= 1 within 2 units in the last place, exactly 1 for 0, 0 for -inf: x = n + r with r in [0, 1], 2^r by the
// polynomial of degree 5 that has the least relative error (9e-8) among those that are 1 at 0. Of degree 3 (9e-5): for what is
// rounded to bf16 next.
template <int kDegree = 5>
QT_INLINE f32v power_of_two(f32v x) {
  static_assert(kDegree == 3 || kDegree == 5);
#if defined(__AVX512F__)
  const f32v r = _mm512_reduce_ps(x, 0x09);  // x - floor(x); 0 for -inf
#else
  x = max(all(-126.5f), x);  // 2^-127 is 0 below
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

// Lane i of the result is vector i's lanes folded to one, by halves: lane j with j + kLanes / 2, then quarters.
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

// Some tokens of a piece with their heads: the rows that go through the softmax together, and their state while a partition
// is walked. Word: what the rows' factors are, see attention_tiles.hpp.
template <class Word>
struct Group {
  index_t token, position;                   // the first token's index in the step, and its position
  index_t tokens, heads, rows;               // rows: tokens times heads, heads inner
  alignas(64) float most[kMaxRows];          // largest score so far, times log2 e
  alignas(64) float shrink[kMaxRows];        // what the sums are multiplied with before a chunk is added
  alignas(64) float less[kMaxRows];          // `most`, or 0 while nothing was seen
  alignas(64) float normalizer[kMaxRows * kLanes];
  float* sums;                               // [rows][value_dim]
  Word* queries;                             // in the order of attention_tiles.hpp, _wide.hpp or _matrix.hpp
  float* total;                              // of the partitions before: [rows][value_dim + 2]
};

// What a piece is computed with, one group after another.
template <class Word>
struct Scratch {
  static constexpr bool kInPlace = std::is_same_v<Word, float>;  // a weight takes its score's place
  static constexpr bool kOfMatrix = std::is_same_v<Word, MatrixWord>;  // two groups are under way, one after another
  // Words of a chunk's keys and of its values: widened, or as the matrix unit reads them.
  static constexpr index_t kOfChunk = kInPlace ? kChunkKeys : kOfMatrix ? kChunkKeys / 2 : 0;
  alignas(64) float scores[(kOfMatrix ? 2 : 1) * kMaxRows * kChunkKeys];
  alignas(64) Word pairs[kInPlace ? 1 : (kOfMatrix ? 2 : 1) * kMaxRows * kChunkKeys / 2];
  alignas(64) float added[kOfMatrix ? kMaxRows * kMaxValueDim : 1];  // of a chunk, to a group's sums
  alignas(64) float largest[kMaxRows * kLanes];  // score of a chunk, of the keys of a lane
  alignas(64) float key_scales[kChunkKeys];      // int8 cache
  alignas(64) float value_scales[kChunkKeys];
  alignas(64) float key_factors[kChunkTiles][kMaxFourGroups * kFactorsOfGroup];  // int4 cache
  alignas(64) float value_factors[kChunkTiles][kMaxFourGroups * kFactorsOfGroup];
  alignas(64) char values_of_keys[kChunkKeys * kMaxValueDim * 4];  // of a chunk, as tiles of values (attention_tiles.hpp)
  alignas(64) Word keys[kOfChunk * kMaxKeyDim + 1];
  alignas(64) Word values[kOfChunk * kMaxValueDim + 1];
  alignas(64) float sums[kMaxNumbers];         // of all groups, as the two that follow
  alignas(64) Word queries[kMaxNumbers];
  alignas(64) float totals[kMaxNumbers + 2 * kMaxGroups * kMaxRows];

  // Of the one group under way, or of one of the two.
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

// What scores of query heads are multiplied with that share a KV head, from `first_head` on: with the scale of an fp8 cache's keys.
QT_INLINE float scale_of(const AttentionCall& call, index_t first_head) {
  const float* scales = call.layer.key_scales;
  return scales ? call.layer.scale * scales[first_head / call.group] : call.layer.scale;
}

// A score of the token at `position`, for a vector of keys from `key` on, where a score is more than its product: biased
// (soft-capped, ALiBi; then also times `scale`), and minus infinity for keys that the token does not see.
QT_INLINE f32v adjusted(const AttentionCall& call, bool biased, f32v score, float scale, float slope, index_t position,
                        index_t key) {
  if (biased) {
    score = score * all(scale);
    if (call.layer.softcap > 0) score = capped(score, call.layer.softcap);
    const f32v distance = counting() + all(float(key - position));
    score = fma(distance, all(slope), score) * all(kLog2E);
  }
  // Counted from the vector's first key; exact, as both are small wherever they matter.
  const index_t after = position + 1 - key, before = seen_from(call.layer.window, call.layer.chunk, position) - key;
  const f32v number = counting();
  score = number < all(float(after)) ? score : all(kNothing);
  return number >= all(float(before)) ? score : all(kNothing);
}

// The keys of a chunk with which a group is multiplied: [begin, end), counted from the chunk's first, which is at `first`.
struct Keys {
  index_t first, begin, end;
};

// Of a row with its token at `position`: [begin, whole) are seen and need no adjustment, [whole, last) are adjusted, what
// comes then is not seen. Whole vectors.
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

// A row's weights for the matrix unit: [keys / 32][16] words. Those of keys [begin, last) come from their scores, the others of
// whole pairs of tiles are 0. Rounded to bf16, ties away from zero; what is rounded is added to the normalizer, a pair of
// tiles after the other. kScaled: rounded with an int8 cache's scales, and added without both.
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

// Scores [rows][kChunkKeys] of a chunk to weights, and the rows' new state. kScaled: an int8 cache's scales belong to the
// scores and the weights. beside(pass): called with every row of both passes, for what shall be done meanwhile.
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
