// Products of attention for many rows: a chunk of the cache is widened to fp32 once, in loop order, for all groups of a piece.
//
//   keys    [keys of the chunk / kPanel][key_dim][kPanel]
//   values  [value_dim / kPanel][keys of the chunk][kPanel]
//
// A register block owns up to kWideRows rows by kWideVectors vectors of a panel. A step reads these vectors and one factor of
// each row. With AVX-512 this is 10 loads and 24 multiplications, two of each a cycle. Limiter: multiplications. Reduction order:
// dimensions or keys ascending, with the roundings of attention_tiles.hpp.
#pragma once

#include "attention_tiles.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(__AVX512F__)
inline constexpr int kPanel = 64, kWideVectors = 4;
#else
inline constexpr int kPanel = 16, kWideVectors = 2;
#endif
inline constexpr int kWideRows = 6;  // 24 accumulators of 32 registers, or 12 of 16
inline constexpr int kPanelVectors = kPanel / kLanes;
static_assert(kPanelVectors % kWideVectors == 0 && kPanel % kTileKeys == 0);
static_assert(kChunkKeys % kPanel == 0 && kMaxValueDim % kPanel == 0);

// Minimum rows for which one widening of a chunk costs less than a widening in each register block.
inline constexpr index_t kWidenFrom = kFewRows + 1;

// Copies a plane [rows / numbers][columns][numbers] of a tile to panels, `panel_floats` apart. adjust(vector, row, column)
// returns the vector to store.
template <class Form, class Adjust>
QT_INLINE void widen(const char* from, index_t rows, index_t columns, index_t panel_floats, float* to, Adjust adjust) {
  for (index_t i = 0; i < rows / Form::kNumbers; ++i)
    for (index_t c = 0; c < columns; c += kLanes) {
      const typename Form::Loaded loaded = Form::load(from + (i * columns + c) * Form::kElementBytes);
      float* place = to + c / kPanel * panel_floats + i * Form::kParts * kPanel + c % kPanel;
#pragma GCC unroll 2
      for (int part = 0; part < Form::kParts; ++part)
        store(place + part * kPanel, adjust(Form::part(loaded, part), i * Form::kNumbers + part, c));
    }
}

template <class Form>
void widen_chunk(const Chunk& chunk, index_t key_dim, index_t value_dim, float* keys, float* values) {
  for (index_t i = 0; i < chunk.count; ++i) {
    const index_t key = i * kTileKeys;
    float *key_panel = keys + key / kPanel * key_dim * kPanel + key % kPanel, *value_panel = values + key * kPanel;
    const auto both = [&](auto of_keys, auto of_values) __attribute__((always_inline)) {
      widen<Form>(chunk.keys[i], key_dim, kTileKeys, 0, key_panel, of_keys);
      widen<Form>(chunk.values[i], kTileKeys, value_dim, kChunkKeys * kPanel, value_panel, of_values);
    };
    if constexpr (Form::kGroup == 0)
      both([](f32v vector, index_t, index_t) { return vector; }, [](f32v vector, index_t, index_t) { return vector; });
    else
      both([&](i32v codes, index_t d, index_t at) { return scaled_keys(codes, chunk.key_factors[i], d, at); },
           [&](i32v codes, index_t at, index_t d) { return scaled_value(codes, chunk.value_factors[i], at, d); });
  }
}

// sums[r][v] += over i ascending: factors[r * row_stride + i] * the v-th vector of panel[i * kPanel ...].
template <int R, int V>
QT_INLINE void accumulate_panel(f32v (&sums)[R][V], const float* factors, index_t row_stride, const float* panel,
                                index_t steps) {
  const float* row[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) row[r] = factors + r * row_stride;
  for (index_t i = 0; i < steps; ++i) {
    f32v vectors[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) vectors[v] = load(panel + i * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const f32v factor = all(row[r][i]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(factor, vectors[v], sums[r][v]);
    }
  }
}

template <int R, int V>
QT_INLINE void score_panel(const float* queries, index_t key_dim, const float* panel, float* scores) {
  f32v sums[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = all(0.0f);
  accumulate_panel<R, V>(sums, queries, key_dim, panel, key_dim);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(scores + r * kChunkKeys + v * kLanes, sums[r][v]);
}

template <int R, int V>
QT_INLINE void weigh_panel(const float* weights, const float* shrink, const float* panel, index_t keys, index_t value_dim,
                           float* sums) {
  f32v acc[R][V];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) acc[r][v] = load(sums + r * value_dim + v * kLanes) * all(shrink[r]);
  accumulate_panel<R, V>(acc, weights, kChunkKeys, panel, keys);
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(sums + r * value_dim + v * kLanes, acc[r][v]);
}

template <int Number>
struct Constant {
  static constexpr int value = Number;
};

// Splits `count` vectors into calls of with(constant number of vectors, first vector): kWideVectors at a time, then fewer.
template <class With>
QT_INLINE void in_vectors(index_t count, With with) {
  index_t v = 0;
  for (; v + kWideVectors <= count; v += kWideVectors) with(Constant<kWideVectors>(), v);
  if constexpr (kWideVectors > 2)
    for (; v + 2 <= count; v += 2) with(Constant<2>(), v);
  for (; v < count; ++v) with(Constant<1>(), v);
}

// Scores of R rows and `count` keys.
template <int R>
void score_rows_wide(const float* queries, index_t key_dim, const float* keys, index_t count, float* scores) {
  in_vectors(count / kLanes, [=](auto vectors, index_t v) __attribute__((always_inline)) {
    const float* panel = keys + v / kPanelVectors * key_dim * kPanel + v % kPanelVectors * kLanes;
    score_panel<R, decltype(vectors)::value>(queries, key_dim, panel, scores + v * kLanes);
  });
}

template <int R>
void weigh_rows_wide(const float* weights, const float* shrink, const float* values, index_t count, index_t value_dim,
                     float* sums) {
  in_vectors(value_dim / kLanes, [=](auto vectors, index_t v) __attribute__((always_inline)) {
    const float* panel = values + v / kPanelVectors * kChunkKeys * kPanel + v % kPanelVectors * kLanes;
    weigh_panel<R, decltype(vectors)::value>(weights, shrink, panel, count, value_dim, sums + v * kLanes);
  });
}

// Indexed by rows - 1.
constexpr void (*kScoreRowsWide[])(const float*, index_t, const float*, index_t, float*) = {
    score_rows_wide<1>, score_rows_wide<2>, score_rows_wide<3>, score_rows_wide<4>, score_rows_wide<5>, score_rows_wide<6>,
};
constexpr void (*kWeighRowsWide[])(const float*, const float*, const float*, index_t, index_t, float*) = {
    weigh_rows_wide<1>, weigh_rows_wide<2>, weigh_rows_wide<3>, weigh_rows_wide<4>, weigh_rows_wide<5>, weigh_rows_wide<6>,
};
static_assert(sizeof kScoreRowsWide / sizeof kScoreRowsWide[0] == kWideRows);

// queries: [rows][key_dim]. keys: panels, `count` keys. scores: [rows][kChunkKeys], from the first of these keys on. Each
// register block prefetches `lines` cache lines.
QT_INLINE void score_wide(const float* queries, index_t rows, index_t key_dim, const float* keys, index_t count,
                          Prefetch& prefetch, index_t lines, float* scores) {
  for (index_t row = 0; row < rows;) {
    const index_t block = block_rows(rows - row, kWideRows);
    kScoreRowsWide[block - 1](queries + row * key_dim, key_dim, keys, count, scores + row * kChunkKeys);
    prefetch.take(lines);
    row += block;
  }
}

// sums = shrink * sums + weights times the values of the first `count` keys. weights: [rows][kChunkKeys], from the first of these
// keys on. values: panels. sums: [rows][value_dim].
QT_INLINE void weigh_wide(const float* weights, const float* shrink, index_t rows, const float* values, index_t count,
                          index_t value_dim, Prefetch& prefetch, index_t lines, float* sums) {
  for (index_t row = 0; row < rows;) {
    const index_t block = block_rows(rows - row, kWideRows);
    kWeighRowsWide[block - 1](weights + row * kChunkKeys, shrink + row, values, count, value_dim, sums + row * value_dim);
    prefetch.take(lines);
    row += block;
  }
}

}  // namespace
}  // namespace qt::QT_ISA
