// Products of attention for few rows: rows times vectors of 16 keys (scores) or of value dimensions (weighted values).
//
// Both are one loop with an accumulator per row and vector. It adds a broadcast factor of the row times a vector of the cache.
// Reduction order: dimensions or keys ascending. The register blocking and the place of widening (in registers here, in memory in
// attention_wide.hpp) affect only speed.
#pragma once

#include "attention.hpp"
#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

// Register blocks: maximum rows, and the number of vectors for R rows.
#if defined(__AVX512F__)
inline constexpr int kBlockRows = 8;
template <int R>
inline constexpr int kBlockVectors = R <= 6 ? 4 : 2;  // at most 24 accumulators of 32 registers
#else
inline constexpr int kBlockRows = 6;
template <int R>
inline constexpr int kBlockVectors = 2;  // at most 12 of 16
#endif
inline constexpr int kTileVectors = int(kTileKeys) / kLanes;
inline constexpr int kChunkTiles = int(kChunkKeys / kTileKeys);

// Numbers of an int8 cache, without their scale.
QT_INLINE f32v load(const std::int8_t* from) {
#if defined(__AVX512F__)
  return to_float((i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from)));
#elif defined(__AVX2__)
  return to_float((i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from)));
#else
  i32v numbers;
  for (int i = 0; i < kLanes; ++i) numbers[i] = from[i];
  return to_float(numbers);
#endif
}

// Numbers of an fp8 cache, without the layer's scale: e4m3 without NaN. The multiplication changes the exponent bias and
// normalizes denormals.
struct Eighth { std::uint8_t bits; };

QT_INLINE f32v load(const Eighth* from) {
#if defined(__AVX512F__)
  const i32v bytes = (i32v)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  const i32v bytes = (i32v)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  i32v bytes;
  for (int i = 0; i < kLanes; ++i) bytes[i] = std::int8_t(from[i].bits);
#endif
  return as_float(bytes << 20 & all(std::int32_t(0x87F00000))) * all(1.329227995784916e36f);  // 2^120
}

// kLanes bytes of an int4 cache: one number in the low bits, another in the high bits.
QT_INLINE i32v load_fours(const char* from) {
#if defined(__AVX512F__)
  return (i32v)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (i32v)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  i32v bytes;
  for (int i = 0; i < kLanes; ++i) bytes[i] = (unsigned char)from[i];
  return bytes;
#endif
}

// Storage formats: a load returns kParts vectors, each with its own factor. kGroup numbers of a head share a scale and minimum,
// which are applied to the vectors first.

// Pairs of bf16 with VDPBF16PS; factors are pairs too.
struct Pairs {
  using Word = std::int32_t;
  using Loaded = i32v;
  static constexpr int kNumbers = 2, kParts = 1;  // numbers of a row per step, and its factors
  static constexpr index_t kGroup = 0;
  static constexpr index_t kElementBytes = 4;     // of one lane
  QT_INLINE Loaded load(const char* from) { return load_bits(from); }
  QT_INLINE i32v part(Loaded loaded, int) { return loaded; }
  QT_INLINE f32v multiply(f32v acc, Word factor, i32v vector) { return dot_pairs(acc, vector, all(factor)); }
};

// The same layout in fp32 with two fused multiply-adds, the lower index first.
struct Halves {
  using Word = float;
  using Loaded = i32v;
  static constexpr int kNumbers = 2, kParts = 2;
  static constexpr index_t kGroup = 0, kElementBytes = 4;
  QT_INLINE Loaded load(const char* from) { return load_bits(from); }
  QT_INLINE f32v part(Loaded loaded, int number) {
    return as_float(number ? loaded & all(std::int32_t(0xFFFF0000)) : loaded << 16);
  }
  QT_INLINE f32v multiply(f32v acc, Word factor, f32v vector) { return fma(all(factor), vector, acc); }
};

// One number at a time, in fp32.
template <class Element>
struct Singles {
  using Word = float;
  using Loaded = f32v;
  static constexpr int kNumbers = 1, kParts = 1;
  static constexpr index_t kGroup = 0, kElementBytes = sizeof(Element);
  QT_INLINE Loaded load(const char* from) { return QT_ISA::load((const Element*)from); }
  QT_INLINE f32v part(Loaded loaded, int) { return loaded; }
  QT_INLINE f32v multiply(f32v acc, Word factor, f32v vector) { return fma(all(factor), vector, acc); }
};

// Two 4-bit numbers: code * scale + minimum of the group, in one rounding.
struct Fours {
  using Word = float;
  using Loaded = i32v;
  static constexpr int kNumbers = 2, kParts = 2;
  static constexpr index_t kGroup = kFourGroup, kElementBytes = 1;
  QT_INLINE Loaded load(const char* from) { return load_fours(from); }
#if defined(__AVX512F__)
  QT_INLINE i32v part(Loaded loaded, int number) { return number ? loaded >> 4 : loaded; }  // in the low four bits of a lane
#else
  QT_INLINE i32v part(Loaded loaded, int number) { return number ? loaded >> 4 : loaded & all(std::int32_t(15)); }
#endif
  QT_INLINE f32v multiply(f32v acc, Word factor, f32v vector) { return fma(all(factor), vector, acc); }
};

// Factors of a tile's int4 keys or values, widened: [groups][2][kTileKeys], scales and minima.
inline constexpr index_t kFactorsOfGroup = 2 * kTileKeys;

// codes * scale + minimum, with scales per lane, or one scale for all lanes. In the second case a 16-entry table replaces the
// arithmetic.
QT_INLINE f32v scaled(i32v codes, f32v scales, f32v least) {
#if defined(__AVX512F__)
  return fma(_mm512_permutexvar_ps((__m512i)codes, f32v{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}), scales, least);
#else
  return fma(to_float(codes), scales, least);
#endif
}

QT_INLINE f32v scaled(i32v codes, float scale, float least) {
#if defined(__AVX512F__)
  const f32v counting = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return _mm512_permutexvar_ps((__m512i)codes, fma(counting, all(scale), all(least)));
#else
  return fma(to_float(codes), all(scale), all(least));
#endif
}

// Dimension d of the keys from `key` on.
QT_INLINE f32v scaled_keys(i32v codes, const float* factors, index_t d, index_t key) {
  const float* of_group = factors + d / kFourGroup * kFactorsOfGroup + key;
  return scaled(codes, load(of_group), load(of_group + kTileKeys));
}

// Dimensions of a value from d on.
QT_INLINE f32v scaled_value(i32v codes, const float* factors, index_t key, index_t d) {
  const float* of_group = factors + d / kFourGroup * kFactorsOfGroup + key;
  return scaled(codes, of_group[0], of_group[kTileKeys]);
}

// Two bf16 of a row in AMX layout (attention_matrix.hpp): queries of two adjacent dimensions, or the weights of keys j of two
// adjacent tiles.
struct MatrixWord {
  std::uint32_t bits;
};

// Factor words of `numbers` numbers of a row.
template <class Form>
QT_INLINE constexpr index_t words(index_t numbers) {
  return numbers / Form::kNumbers * Form::kParts;
}

constexpr auto kAsItIs = [](auto vector, index_t, int) __attribute__((always_inline)) { return vector; };

// sums[r][v] += over i ascending: factors[r * kRow + i * kStep] * the v-th vector at from + i * stride. Prefetches ahead + i *
// stride. adjust(vector, number, v) returns the vector to multiply.
template <class Form, int R, int V, index_t kRow, index_t kStep, class Adjust>
QT_INLINE void accumulate(f32v (&sums)[R][V], const typename Form::Word* factors, const char* const (&from)[V],
                          const char* const (&ahead)[V], index_t stride, index_t steps, Adjust adjust) {
  for (index_t i = 0; i < steps; ++i) {
    typename Form::Loaded loaded[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      loaded[v] = Form::load(from[v] + i * stride);
      __builtin_prefetch(ahead[v] + i * stride, 0, 2);  // L2: it sustains more outstanding requests than L1
    }
#pragma GCC unroll 2
    for (int part = 0; part < Form::kParts; ++part) {
      decltype(adjust(Form::part(loaded[0], 0), 0, 0)) vectors[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) vectors[v] = adjust(Form::part(loaded[v], part), i * Form::kNumbers + part, v);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const typename Form::Word factor = factors[r * kRow + (i * Form::kParts + part) * kStep];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) sums[r][v] = Form::multiply(sums[r][v], factor, vectors[v]);
      }
    }
  }
}

// The tiles of a chunk that a row sees, and the addresses to prefetch so that memory is always busy. Key products prefetch
// values. Value products prefetch keys of the next chunk. The softmax prefetches some of both.
struct Chunk {
  index_t begin;  // first key of the first tile, relative to the chunk
  index_t count;  // tiles
  const char* keys[kChunkTiles];
  const char* values[kChunkTiles];
  const char* beside_keys[kChunkTiles];
  const char* beside_values[kChunkTiles];
  const float* key_factors[kChunkTiles];  // int4 cache
  const float* value_factors[kChunkTiles];
};

// Cache lines to prefetch into the L2 cache, a few at a time.
class Prefetch {
 public:
  void add(const char* from, index_t bytes) { begin_[count_] = from, end_[count_++] = from + bytes; }
  void take(index_t lines) {
    while (lines > 0 && now_ != count_) {
      const char *at = begin_[now_], *const end = end_[now_];
      for (; at < end && lines > 0; at += 64, --lines) __builtin_prefetch(at, 0, 2);
      begin_[now_] = at;
      if (at >= end) ++now_;
    }
  }

 private:
  const char *begin_[kChunkTiles], *end_[kChunkTiles];
  int count_ = 0, now_ = 0;
};

// scores[r][v * kLanes ...] of R rows for V vectors of keys. The first vector is `inside` bytes into a row of its tile. queries:
// [words][R]. factors: of the tiles, if the format has groups.
template <class Form, int R, int V>
void score(const typename Form::Word* queries, const char* const* keys, const char* const* ahead, const float* const* factors,
           index_t inside, index_t key_dim, float* scores) {
  f32v sums[R][V];
  const char *from[V], *next[V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = all(0.0f);
#pragma GCC unroll 8
  for (int v = 0; v < V; ++v) {
    from[v] = keys[v / kTileVectors] + inside + v % kTileVectors * kLanes * Form::kElementBytes;
    next[v] = ahead[v / kTileVectors] + inside + v % kTileVectors * kLanes * Form::kElementBytes;
  }
  constexpr index_t kStride = kTileKeys * Form::kElementBytes;
  if constexpr (Form::kGroup == 0) {
    accumulate<Form, R, V, 1, R>(sums, queries, from, next, kStride, key_dim / Form::kNumbers, kAsItIs);
  } else {
    for (index_t d = 0; d < key_dim; d += Form::kGroup) {
      f32v scales[V], least[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) {
        const float* of_group = factors[v / kTileVectors] + d / Form::kGroup * kFactorsOfGroup + inside + v % kTileVectors * kLanes;
        scales[v] = load(of_group);
        least[v] = load(of_group + kTileKeys);
      }
      const index_t steps = (key_dim - d < Form::kGroup ? key_dim - d : Form::kGroup) / Form::kNumbers;
      accumulate<Form, R, V, 1, R>(sums, queries + d * R, from, next, kStride, steps,
                                   [&](i32v codes, index_t, int v)
                                       __attribute__((always_inline)) { return scaled(codes, scales[v], least[v]); });
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) from[v] += steps * kStride, next[v] += steps * kStride;
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * kChunkKeys + v * kLanes, sums[r][v]);
}

// Range of value dimensions to accumulate: `count` of `all`, from `first` on. `count` is also the row stride of the sums.
struct Numbers {
  index_t all, first, count;
};

// sums[r][V vectors] = shrink[r] * sums + weights times the chunk's values, V vectors of dimensions from d on.
template <class Form, int R, int V>
void weigh(const typename Form::Word* weights, const float* shrink, const Chunk& chunk, index_t d, Numbers numbers, float* sums) {
  f32v acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load(sums + r * numbers.count + v * kLanes) * all(shrink[r]);
  for (index_t tile = 0; tile < chunk.count; ++tile) {
    const char *from[V], *next[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) {
      from[v] = chunk.values[tile] + (d + v * kLanes) * Form::kElementBytes;
      next[v] = chunk.beside_values[tile] + (d + v * kLanes) * Form::kElementBytes;
    }
    const auto add = [&](auto adjust) __attribute__((always_inline)) {
      accumulate<Form, R, V, words<Form>(kChunkKeys), 1>(acc, weights + tile * words<Form>(kTileKeys), from, next,
                                                          numbers.all * Form::kElementBytes, kTileKeys / Form::kNumbers, adjust);
    };
    if constexpr (Form::kGroup == 0)
      add(kAsItIs);
    else
      add([&](i32v codes, index_t key, int v) __attribute__((always_inline)) {
        return scaled_value(codes, chunk.value_factors[tile], key, d + v * kLanes);
      });
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sums + r * numbers.count + v * kLanes, acc[r][v]);
}

// Scores of R rows for all tiles of a chunk.
template <class Form, int R>
void score_rows(const typename Form::Word* queries, index_t key_dim, const Chunk& chunk, float* scores) {
  constexpr int V = kBlockVectors<R>;
  index_t tile = 0;
  if constexpr (V > kTileVectors)
    for (; tile + V / kTileVectors <= chunk.count; tile += V / kTileVectors)
      score<Form, R, V>(queries, chunk.keys + tile, chunk.beside_keys + tile, chunk.key_factors + tile, 0, key_dim,
                        scores + tile * kTileKeys);
  constexpr int kRest = V < kTileVectors ? V : kTileVectors;
  for (; tile < chunk.count; ++tile)
    for (int v = 0; v < kTileVectors; v += kRest)
      score<Form, R, kRest>(queries, chunk.keys + tile, chunk.beside_keys + tile, chunk.key_factors + tile,
                            v * kLanes * Form::kElementBytes, key_dim, scores + tile * kTileKeys + v * kLanes);
}

template <class Form, int R>
void weigh_rows(const typename Form::Word* weights, const float* shrink, const Chunk& chunk, Numbers numbers,
                float* sums) {
  constexpr int V = kBlockVectors<R>;
  index_t d = 0;
  for (; d + V * kLanes <= numbers.count; d += V * kLanes)
    weigh<Form, R, V>(weights, shrink, chunk, numbers.first + d, numbers, sums + d);
  for (; d < numbers.count; d += kLanes) weigh<Form, R, 1>(weights, shrink, chunk, numbers.first + d, numbers, sums + d);
}

// Indexed by rows - 1.
template <class Form>
constexpr void (*kScoreRows[])(const typename Form::Word*, index_t, const Chunk&, float*) = {
    score_rows<Form, 1>, score_rows<Form, 2>, score_rows<Form, 3>, score_rows<Form, 4>,
    score_rows<Form, 5>, score_rows<Form, 6>,
#if defined(__AVX512F__)
    score_rows<Form, 7>, score_rows<Form, 8>,
#endif
};
template <class Form>
constexpr void (*kWeighRows[])(const typename Form::Word*, const float*, const Chunk&, Numbers, float*) = {
    weigh_rows<Form, 1>, weigh_rows<Form, 2>, weigh_rows<Form, 3>, weigh_rows<Form, 4>,
    weigh_rows<Form, 5>, weigh_rows<Form, 6>,
#if defined(__AVX512F__)
    weigh_rows<Form, 7>, weigh_rows<Form, 8>,
#endif
};

// Rows of the next register block, at most `most`, if `left` rows remain: blocks have nearly equal sizes.
QT_INLINE index_t block_rows(index_t left, index_t most) {
  const index_t blocks = (left + most - 1) / most;
  return (left + blocks - 1) / blocks;
}

// queries: register blocks of rows one after another, each [words][rows]. scores: [rows][kChunkKeys].
template <class Form>
void score_chunk(const typename Form::Word* queries, index_t rows, index_t key_dim, const Chunk& chunk, float* scores) {
  for (index_t row = 0; row < rows;) {
    const index_t block = block_rows(rows - row, kBlockRows);
    kScoreRows<Form>[block - 1](queries + row * words<Form>(key_dim), key_dim, chunk,
                                scores + row * kChunkKeys + chunk.begin);
    row += block;
  }
}

// weights: [rows][words of a chunk]; sums: [rows][numbers.count].
template <class Form>
void weigh_chunk(const typename Form::Word* weights, const float* shrink, index_t rows, const Chunk& chunk, Numbers numbers,
                 float* sums) {
  for (index_t row = 0; row < rows;) {
    const index_t block = block_rows(rows - row, kBlockRows);
    kWeighRows<Form>[block - 1](weights + words<Form>(row * kChunkKeys + chunk.begin), shrink + row, chunk, numbers,
                                sums + row * numbers.count);
    row += block;
  }
}

}  // namespace
}  // namespace qt::QT_ISA
