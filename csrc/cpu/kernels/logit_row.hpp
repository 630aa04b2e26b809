// Passes over one row of logits and selection without sorting, for sampling and log-probabilities.
//
// A row is divided into blocks of kBlock logits. One pass computes the maximum of every block. The n blocks with the largest
// maxima hold at least n logits that are not below the n-th of these maxima. A search for the n largest logits therefore reads
// only those blocks. Reduction order within a block: fp32 vectors, element i in lane i mod lanes, ascending, then lanes by
// halves. Across blocks: fp64, ascending.
#pragma once

#include "sampling.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kCounts = 2 * 65536;

// Buffers for one row, in the calling thread's scratch.
struct Scratch {
  float* maxima;          // [blocks]
  float* sums;            // [blocks]
  float* values;          // [vocab]: remaining candidate logits, in vocabulary order
  float* weights;         // [vocab]: weights of the candidates
  std::int32_t* ids;      // [vocab]: token ids of the candidates
  float* narrowed;        // [2 * vocab]: buffer of `largest_reaching`
  std::uint32_t* counts;  // [2 * 65536]: see counts.hpp
  float* masked;          // [vocab]: the row after its mask
};

QT_INLINE Scratch scratch_for(const LogitRows& rows) {
  const index_t blocks = (blocks_of(rows.vocab_size) + 15) / 16 * 16;
  const index_t width = (rows.vocab_size + kBlock) / 16 * 16 + 16;  // compress stores write a whole vector past the end
  float* memory = static_cast<float*>(rows.scratch((2 * blocks + 6 * width + kCounts) * index_t(sizeof(float))));
  Scratch s;
  s.maxima = memory;
  s.sums = s.maxima + blocks;
  s.values = s.sums + blocks;
  s.weights = s.values + width;
  s.ids = reinterpret_cast<std::int32_t*>(s.weights + width);
  s.narrowed = s.weights + 2 * width;
  s.counts = reinterpret_cast<std::uint32_t*>(s.narrowed + 2 * width);
  s.masked = s.narrowed + 2 * width + kCounts;
  return s;
}

// The first `count` lanes of value; -inf in the others.
QT_INLINE f32v or_lowest(f32v value, index_t count) {
  if (count >= kLanes) return value;
  for (int i = int(count); i < kLanes; ++i) value[i] = -__builtin_inff();
  return value;
}

// Copies a row. NaN and masked logits become -inf. If all allowed logits are -inf, the first allowed token becomes the only
// candidate (logit bias and mask may conflict). vocab_size: at most the number of mask bits.
template <class Element>
QT_INLINE void copy_masked(const Element* x, index_t vocab_size, const std::uint32_t* mask, float* to) {
  constexpr float kMost = 1e30f;  // small enough that division by a temperature stays finite
  i32v lane_bits;
  for (int lane = 0; lane < kLanes; ++lane) lane_bits[lane] = 1 << lane;
  const f32v lowest = all(-__builtin_inff());
  f32v most = lowest;
  for (index_t i = 0; i < vocab_size; i += kLanes) {
    const std::uint32_t bits = mask[i / 32] >> (i % 32);
    const index_t count = vocab_size - i < kLanes ? vocab_size - i : kLanes;
    f32v kept = lowest;
    if (bits) {
      const f32v value = load(x + i, count);
      const i32v chosen = ((all(std::int32_t(bits)) & lane_bits) != 0) & (value >= all(-kMost));
      kept = or_lowest(chosen ? min(value, all(kMost)) : lowest, count);
    }
    most = max(kept, most);
    store(to + i, kept, count);
  }
  if (max_of(most) > lowest[0]) return;
  for (index_t i = 0; i < vocab_size; ++i)
    if (mask[i / 32] >> (i % 32) & 1) {
      to[i] = 0;
      return;
    }
}

struct Largest {
  float value;
  bool any_nan;  // maxima ignore NaN
};

template <class Element>
QT_INLINE Largest find_maxima(const Element* x, index_t vocab_size, float* maxima) {
  float top = -__builtin_inff();
  i32v magnitude = {};
  for (index_t b = 0, i = 0; i < vocab_size; ++b, i += kBlock) {
    const index_t end = i + kBlock < vocab_size ? i + kBlock : vocab_size;
    f32v most = all(-__builtin_inff());
    for (index_t j = i; j < end; j += kLanes) {
      const f32v value = end - j >= kLanes ? load(x + j) : or_lowest(load(x + j, end - j), end - j);
      const i32v bits = as_bits(value) & 0x7FFFFFFF;
      magnitude = bits > magnitude ? bits : magnitude;
      most = max(value, most);
    }
    maxima[b] = max_of(most);
    top = maxima[b] > top ? maxima[b] : top;
  }
  bool any_nan = false;
  for (int i = 0; i < kLanes; ++i) any_nan |= magnitude[i] > 0x7F800000;
  return {top, any_nan};
}

// The result of find_maxima, from block maxima that were computed in parts.
QT_INLINE Largest largest_of(const float* maxima, index_t blocks) {
  Largest top = {-__builtin_inff(), false};
  for (index_t b = 0; b < blocks; ++b) {
    top.value = maxima[b] > top.value ? maxima[b] : top.value;
    top.any_nan |= maxima[b] != maxima[b];
  }
  return top;
}

// The first index with x == value, which must be in the row; if value is NaN, the first NaN.
template <class Element>
index_t index_of(const Element* x, index_t vocab_size, const float* maxima, float value) {
  const bool nan = value != value;
  for (index_t b = 0, i = 0; i < vocab_size; ++b, i += kBlock) {
    if (!nan && maxima[b] != value) continue;
    const index_t end = i + kBlock < vocab_size ? i + kBlock : vocab_size;
    for (index_t j = i; j < end; ++j) {
      const float here = load(x + j, 1)[0];
      if (nan ? here != here : here == value) return j;
    }
  }
  return 0;
}

// e^((x - top) / temperature) where x >= floor, else 0. floor keeps the exponent above -88: see `exponential`.
struct Weigh {
  f32v top, inverse, floor;
  __attribute__((always_inline)) f32v operator()(f32v x) const {
    const f32v weight = exponential((x - top) * inverse);
    return x >= floor ? weight : all(0.0f);
  }
};

// Returns the sum of the weights of n numbers. Writes block sums to `sums` and single weights to `weights`, unless null. If
// maxima is not null, blocks below the floor are skipped.
template <class Element>
QT_INLINE double weigh(const Element* x, index_t n, const Weigh& weight_of, const float* maxima, float* sums,
                       float* weights) {
  double total = 0;
  for (index_t b = 0, i = 0; i < n; ++b, i += kBlock) {
    if (maxima && maxima[b] < weight_of.floor[0]) {
      if (sums) sums[b] = 0;
      continue;
    }
    const index_t end = i + kBlock < n ? i + kBlock : n;
    f32v sum = {};
    for (index_t j = i; j < end; j += kLanes) {
      f32v weight;
      if (end - j >= kLanes)
        weight = weight_of(load(x + j));
      else
        weight = weight_of(or_lowest(load(x + j, end - j), end - j));
      if (weights) store(weights + j, weight, end - j);
      sum += weight;
    }
    const float of_block = sum_of(sum);
    if (sums) sums[b] = of_block;
    total += double(of_block);
  }
  return total;
}

// Lists the logits >= `least` in vocabulary order. Returns their number.
template <class Element>
index_t gather(const Element* x, index_t vocab_size, const float* maxima, float least, float* values,
               std::int32_t* ids) {
  index_t n = 0;
  for (index_t b = 0, i = 0; i < vocab_size; ++b, i += kBlock) {
    if (maxima[b] < least) continue;
    const index_t end = i + kBlock < vocab_size ? i + kBlock : vocab_size;
    for (index_t j = i; j < end; j += kLanes) {
      const index_t count = end - j < kLanes ? end - j : kLanes;
      const f32v value = load(x + j, count);
#if defined(__AVX512F__)
      const __mmask16 chosen = first(count) & _mm512_cmp_ps_mask(value, all(least), _CMP_GE_OQ);
      const __m512i id = _mm512_add_epi32(_mm512_set1_epi32(int(j)),
                                          _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0));
      _mm512_storeu_ps(values + n, _mm512_maskz_compress_ps(chosen, value));
      _mm512_storeu_si512(ids + n, _mm512_maskz_compress_epi32(chosen, id));
      n += __builtin_popcount(chosen);
#else
      for (index_t lane = 0; lane < count; ++lane) {
        values[n] = value[lane];
        ids[n] = std::int32_t(j + lane);
        n += value[lane] >= least;
      }
#endif
    }
  }
  return n;
}

// Removes listed numbers below `least`; weights may be null. Returns the remaining number.
QT_INLINE index_t keep_at_least(float least, float* values, float* weights, std::int32_t* ids, index_t n) {
  index_t kept = 0, i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= n; i += kLanes) {
    const f32v value = load(values + i);
    const __mmask16 lanes = _mm512_cmp_ps_mask(value, all(least), _CMP_GE_OQ);
    _mm512_mask_compressstoreu_epi32(ids + kept, lanes, _mm512_loadu_si512(ids + i));
    if (weights) _mm512_mask_compressstoreu_ps(weights + kept, lanes, load(weights + i));
    _mm512_mask_compressstoreu_ps(values + kept, lanes, value);
    kept += __builtin_popcount(lanes);
  }
#endif
  for (; i < n; ++i) {
    const float value = values[i];
    values[kept] = value;
    ids[kept] = ids[i];
    if (weights) weights[kept] = weights[i];
    kept += value >= least;
  }
  return kept;
}

// Unsigned keys in the order of their floats.
QT_INLINE std::uint32_t key_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits ^ (bits >> 31 ? 0xFFFFFFFFu : 0x80000000u);
}

QT_INLINE float of_key(std::uint32_t key) {
  const std::uint32_t bits = key ^ (key >> 31 ? 0x80000000u : 0xFFFFFFFFu);
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// Copies the numbers for which chosen(value) holds, and their weights unless null, in order; may be in place. Returns their
// number.
template <class Chosen>
QT_INLINE index_t narrow_down(const float* values, const float* weights, index_t n, Chosen chosen, float* to_values,
                              float* to_weights) {
  index_t kept = 0, i = 0;
#if defined(__AVX512F__)
  for (; i + kLanes <= n; i += kLanes) {
    const f32v value = load(values + i);
    const __mmask16 lanes = _mm512_movepi32_mask((__m512i)chosen(value));
    if (weights) _mm512_mask_compressstoreu_ps(to_weights + kept, lanes, load(weights + i));
    _mm512_mask_compressstoreu_ps(to_values + kept, lanes, value);
    kept += __builtin_popcount(lanes);
  }
#endif
  for (; i < n; ++i) {
    const float value = values[i];
    if (weights) to_weights[kept] = weights[i];
    to_values[kept] = value;
    kept += chosen(all(value))[0] != 0;
  }
  return kept;
}

// Candidates of a selection, and the total weight above them.
template <class Sum>
struct Open {
  const float* values;
  const float* weights;  // null: each weighs 1
  index_t n;
  Sum above;
};

// Walks bins from the last down to the one that reaches `target`. Returns it and adds the bins above it to `above`. If no bin
// reaches it, returns the lowest non-empty bin.
template <class Sum>
QT_INLINE int walk_down(const Sum* bins, int count, Sum target, Sum& above) {
  int chosen = -1;
  Sum before = above;
  for (int bin = count - 1; bin >= 0; --bin) {
    if (!(bins[bin] > 0)) continue;
    chosen = bin;
    before = above;
    above += bins[bin];
    if (above >= target) break;
  }
  above = before;
  return chosen;
}

// Reduces many candidates to those of one of kBins equal parts of their range.
template <class Sum>
void narrow_by_range(Open<Sum>& open, Sum target, float* room_values, float* room_weights) {
  constexpr int kBins = 1024;
  f32v least = all(3e38f), most = all(-3e38f);
  for (index_t i = 0; i + kLanes <= open.n; i += kLanes) {
    const f32v value = load(open.values + i);
    least = min(value, least);
    most = max(value, most);
  }
  const f32v low = all(max_of(-least) < 1e30f ? -max_of(-least) : -1e30f),
             scale = all(float(kBins) / (max_of(most) - low[0]));
  if (!(scale[0] < 1e30f)) return;  // all equal
  const auto bin_of = [=](f32v value) {
    return to_int(min(max((value - low) * scale, all(0.0f)), all(float(kBins - 1))));
  };
  Sum bins[2][kBins] = {};  // even and odd places, so that an addition does not wait for the previous one
  for (index_t i = 0; i < open.n; i += kLanes) {
    const index_t count = open.n - i < kLanes ? open.n - i : kLanes;
    const i32v bin = bin_of(load(open.values + i, count));
    for (index_t lane = 0; lane < count; ++lane)
      bins[lane & 1][bin[lane]] += open.weights ? Sum(open.weights[i + lane]) : Sum(1);
  }
  for (int bin = 0; bin < kBins; ++bin) bins[0][bin] += bins[1][bin];
  const int chosen = walk_down(bins[0], kBins, target, open.above);
  open.n = narrow_down(
      open.values, open.weights, open.n, [=](f32v value) { return bin_of(value) == all(chosen); }, room_values,
      room_weights);
  open.values = room_values;
  if (open.weights) open.weights = room_weights;
}

// The largest of n numbers such that the numbers not below it weigh at least `target`; the minimum if all of them weigh less.
// weights: all positive, or null (each weighs 1). Radix selection, 8 key bits at a time, most significant first; weights are
// summed in list order. room: 2 n elements. n >= 1.
template <class Sum>
float largest_reaching(const float* values, const float* weights, index_t n, Sum target, float* room) {
  constexpr index_t kMany = 4096;
  Open<Sum> open = {values, weights, n, 0};
  if (n > kMany) narrow_by_range(open, target, room, room + n);
  std::uint32_t key = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    if (open.n == 1) return open.values[0];
    Sum bins[256] = {};
    for (index_t i = 0; i < open.n; ++i)
      bins[key_of(open.values[i]) >> shift & 255] += weights ? Sum(open.weights[i]) : Sum(1);
    const int chosen = walk_down(bins, 256, target, open.above);
    key |= std::uint32_t(chosen) << shift;
    index_t kept = 0;
    for (index_t i = 0; i < open.n; ++i) {
      const float value = open.values[i];
      if (weights) room[n + kept] = open.weights[i];
      room[kept] = value;
      kept += int(key_of(value) >> shift & 255) == chosen;
    }
    open = {room, weights ? room + n : nullptr, kept, open.above};
  }
  return of_key(key);
}

// A lower bound of the n-th largest logit, from block maxima; -inf if n exceeds the number of blocks.
QT_INLINE float reached_by(index_t n, const float* maxima, index_t blocks, float* room) {
  if (n > blocks) return -__builtin_inff();
  return largest_reaching<index_t>(maxima, nullptr, blocks, n, room);
}

}  // namespace
}  // namespace qt::QT_ISA
