// Softmax arithmetic of attention, for one query of one head at a time. It holds all roundings that the decode, chunk
// and merge kernels must share. Products followed by a sum are explicit fmaf, so contraction by the compiler cannot make two
// kernels round differently. Independent of the memory layout.
#pragma once
#include "device.cuh"

namespace quintet {

constexpr float LOG2_E = 1.4426950408889634f;

// A masked score, and the largest score of a query without visible positions. Finite, so that no difference is NaN.
constexpr float UNSEEN = -3.0e38f;
__device__ __forceinline__ bool has_seen(float most) { return most > -1.0e38f; }

// Visible positions of a query: its window or its chunk (0: none), up to its own position. The first visible position never
// decreases from one position to the next.
struct AttentionWindow {
  int window, chunk;
  __device__ __forceinline__ int first(int position) const {
    const int first = chunk > 0 ? position - position % chunk : window > 0 ? position - window + 1 : 0;
    return first > 0 ? first : 0;
  }
};

// Logits from scores: s * scale, or cap * tanh(s * scale / cap) + slope * distance. In the plain case, scores are not scaled;
// the scale is part of the exponent: weights are 2^((score - largest) * unit).
struct Scores {
  float scale, soft_cap;
  bool plain;
  __device__ __forceinline__ float unit() const { return plain ? scale * LOG2_E : LOG2_E; }
  // The logit if scores are not plain. tanh is 1 - 2 / (1 + e^2x): absolute error 1e-7, relative to the cap.
  __device__ __forceinline__ float logit(float score, float slope, int distance) const {
    float logit = score * scale;
    if (soft_cap > 0.0f) {
      const float power = exp2_fast(score * (2.0f * LOG2_E * scale / soft_cap));
      logit = fmaf(-2.0f * soft_cap, 1.0f / (1.0f + power), soft_cap);
    }
    return fmaf(slope, float(distance), logit);
  }
};

// Online softmax update of a query by one tile: the largest score may increase, previous sums are then scaled down; and the
// weight of each score. A tile without visible positions keeps `most`, scales by exactly 1 and has weights of exactly 0.
struct Rise {
  float most, shrink, base;
  __device__ __forceinline__ Rise(float before, float of_tile, float unit) {
    most = fmaxf(before, of_tile);
    shrink = before == most ? 1.0f : exp2_fast((before - most) * unit);
    base = has_seen(most) ? most * unit : 0.0f;
  }
  __device__ __forceinline__ float weight(float score, float unit) const {
    return exp2_fast(fmaf(score, unit, -base));
  }
};

// Addition of a split's sums to those of the previous splits, both scaled to the larger of the largest scores.
struct SoftmaxMerge {
  float kept, added, most;
  __device__ __forceinline__ SoftmaxMerge(float total_most, float part_most, float unit) {
    most = fmaxf(total_most, part_most);
    kept = total_most == most ? 1.0f : exp2_fast((total_most - most) * unit);
    added = part_most == most ? 1.0f : exp2_fast((part_most - most) * unit);
  }
  __device__ __forceinline__ float operator()(float total, float part) const { return fmaf(part, added, total * kept); }
};

// Final factor of a query's sums: the inverse of its normalizer. The normalizer includes the head's sink, a logit without a
// value (null: none). A query without visible positions (only in padding) gives zeros.
__device__ __forceinline__ float share_of(float normalizer, float most, float unit, const float* sink) {
  if (sink != nullptr) normalizer += exp2_fast(fmaf(-most, unit, *sink * LOG2_E));
  return normalizer > 0.0f ? 1.0f / normalizer : 0.0f;
}

// Folds the part of row `half` of a matrix accumulator (numbers 2 half and 2 half + 1 of each column tile) into its total, and
// clears the part. `total(i)` is the thread's i-th total: COLUMNS pairs of sums, the normalizer, the largest score.
template <int COLUMNS, class Total>
__device__ __forceinline__ void fold_query(
    float (&sums)[COLUMNS][4], float (&normalizer)[4], float& most, int half, float unit, Total total) {
  if (has_seen(most)) {
    const float before = total(2 * COLUMNS + 1);
    const bool is_first = !has_seen(before);
    const SoftmaxMerge merge(before, most, unit);
#pragma unroll
    for (int i = 0; i < 2 * COLUMNS; ++i) {
      const float part = sums[i / 2][2 * half + i % 2];
      total(i) = is_first ? part : merge(total(i), part);
    }
    const float part = normalizer[2 * half];
    total(2 * COLUMNS) = is_first ? part : merge(total(2 * COLUMNS), part);
    total(2 * COLUMNS + 1) = merge.most;
  }
#pragma unroll
  for (int i = 0; i < 2 * COLUMNS; ++i) sums[i / 2][2 * half + i % 2] = 0.0f;
  normalizer[2 * half] = normalizer[2 * half + 1] = 0.0f;
  most = UNSEEN;
}

// Copies the total of all splits, the last one included, back to the accumulator, so that the store is the same with and
// without folds.
template <int COLUMNS, class Total>
__device__ __forceinline__ void unfold_query(
    float (&sums)[COLUMNS][4], float (&normalizer)[4], float& most, int half, Total total) {
#pragma unroll
  for (int i = 0; i < 2 * COLUMNS; ++i) sums[i / 2][2 * half + i % 2] = total(i);
  normalizer[2 * half] = total(2 * COLUMNS);
  most = total(2 * COLUMNS + 1);
}

// Maximum over the four threads that share a row of an accumulator; all of them get it.
__device__ __forceinline__ float largest_of_quad(float value) {
  value = fmaxf(value, __shfl_xor_sync(FULL_WARP, value, 1));
  return fmaxf(value, __shfl_xor_sync(FULL_WARP, value, 2));
}

}  // namespace quintet
