// The multiplications of attention on the matrix unit (amx.hpp): up to 32 (token, head) rows times tiles of keys, or their
// weights times values. Queries are bf16; the cache's numbers are bf16 or bytes, which bf16 holds exactly.
//
//              rows [up to 16][32 numbers]       columns [16 pairs][16][2], a kilobyte each
//   scores     queries, dimensions 32 i ...      keys of tile t, dimensions 32 i ...
//   values     weights of tiles 2 i, 2 i + 1     values of these tiles: a pair is key j of the one and key j of the other
//
// Keys lie in a bf16 cache as the unit reads them; they are copied only where their dimensions do not fill the last step
// (head_dim 16, 48, 80 ...: zeros follow) and where they are bytes. Values are copied always, once for all groups of a
// piece: a tile has only 16 keys, half of what the unit multiplies in the same time. The copy is 4 * head_dim lines of a
// chunk, beside 8 * head_dim cycles of multiplications for each 16 rows.
//
// Order of summing, of every row alike: a score adds 32 dimensions a step, ascending, even ones apart from odd ones within
// the step. A chunk's values are added from zero, two tiles a step, ascending, each tile's keys ascending and apart from the
// other's; then this is added to the row's sum, which has been shrunk, in one rounding. What a tile holds that a row does not
// see is multiplied by zero; where the piece does not walk it, zeros are.
//
// Limiter: a multiplication takes a cycle for each of its rows, and two by two registers read 4 kilobytes in 64 cycles. In
// between the softmax needs some 6 cycles for 16 scores: 96 beside head_dim cycles of multiplications for 16 rows and a tile.
// So with heads of 64 numbers it is softmax that limits, with 128 the two are about even.
#pragma once

#include "amx.hpp"
#include "attention_tiles.hpp"

#if defined(QT_AMX)

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kBlock = kAmxRows;                     // rows of a register
inline constexpr index_t kOperandBytes = kAmxRows * kAmxRowBytes;  // of columns
inline constexpr index_t kOperandWords = kOperandBytes / 4;
inline constexpr index_t kStepWords = kAmxPairs / 2;            // of a row, that one step multiplies
static_assert(kAmxColumns == kTileKeys && kAmxPairs == 2 * kTileKeys && kLanes == kAmxColumns);

QT_INLINE void store(MatrixWord* to, i32v words) { std::memcpy(to, &words, sizeof words); }

// Words of a row of queries: whole steps.
QT_INLINE index_t query_words(index_t head_dim) { return (head_dim + kAmxPairs - 1) / kAmxPairs * kStepWords; }

// The unit with registers for up to two blocks of rows: sums 0 and 1 of the first block, 2 and 3 of the second (or of the
// first as well), rows in 4 and 5, columns in 6 and 7.
class MatrixUnit {
 public:
  // Shapes for `rows` rows, at most two blocks.
  void fit(index_t rows) {
    const index_t first = rows < kBlock ? rows : kBlock, second = rows > kBlock ? rows - kBlock : first;
    if (first == first_ && second == second_) return;
    first_ = first, second_ = second;
    AmxShapes shapes;
    for (int number : {0, 1, 4}) shapes.set(number, first, kAmxRowBytes);
    for (int number : {2, 3, 5}) shapes.set(number, second, kAmxRowBytes);
    for (int number : {6, 7}) shapes.set(number, kAmxRows, kAmxRowBytes);
    amx_.configure(shapes);
  }

  // to [blocks of rows][V columns of 16] = sum over i ascending: rows, 32 numbers from word i * kStepWords on, times
  // columns[v] + i * column_step. One block of rows, or two. Lines of the cache are brought closer meanwhile.
  template <int Blocks, int V>
  __attribute__((noinline)) void multiply(const MatrixWord* rows, index_t row_words, const char* const* columns,
                                          index_t column_step, index_t steps, Prefetch& prefetch, index_t lines, float* to,
                                          index_t to_stride) {
    static_assert(Blocks * V <= 4);
    each<Blocks, V>([&]<int C>(Number<C>) __attribute__((always_inline)) { amx_.zero<C>(); });
    for (index_t i = 0; i < steps; ++i) {
      const MatrixWord* from = rows + i * kStepWords;
      amx_.load<4>(from, row_words * 4);
      if constexpr (Blocks > 1) amx_.load<5>(from + kBlock * row_words, row_words * 4);
      step<Blocks, V, 0>(columns, i * column_step);
      bring_closer(prefetch, lines);
    }
    each<Blocks, V>([&]<int C>(Number<C>) __attribute__((always_inline)) {
      constexpr int block = Blocks > 1 ? C / 2 : 0, v = C - 2 * block;
      amx_.store<C>(to + block * kBlock * to_stride + v * kAmxColumns, to_stride * 4);
    });
  }

 private:
  template <int>
  struct Number {};

  // Apart from the loops above, which need the registers.
  __attribute__((noinline)) static void bring_closer(Prefetch& prefetch, index_t lines) { prefetch.take(lines); }

  // with(the number of each register of sums).
  template <int Blocks, int V, class With>
  __attribute__((always_inline)) void each(With with) {
    with(Number<0>());
    if constexpr (V > 1) with(Number<1>());
    if constexpr (V > 2 || Blocks > 1) with(Number<2>());
    if constexpr (V > 3 || (Blocks > 1 && V > 1)) with(Number<3>());
  }

  template <int Blocks, int V, int v>
  __attribute__((always_inline)) void step(const char* const* columns, index_t offset) {
    constexpr int column = 6 + v % 2;
    amx_.load<column>(columns[v] + offset, kAmxRowBytes);
    amx_.multiply_bf16<v, 4, column>();
    if constexpr (Blocks > 1) amx_.multiply_bf16<2 + v, 5, column>();
    if constexpr (v + 1 < V) step<Blocks, V, v + 1>(columns, offset);
  }

  Amx amx_;
  index_t first_ = 0, second_ = 0;
};

// Of a plane [number][columns]: words of the numbers 2 p and 2 p + 1 of kLanes columns from c on, as bf16.
template <class Stored>
QT_INLINE i32v pairs_of(const char* plane, index_t columns, index_t p, index_t c) {
  if constexpr (std::is_same_v<Stored, bf16>) {
    return load_bits(plane + (p * columns + c) * 4);
  } else {
    const Stored* from = (const Stored*)plane + 2 * p * columns + c;
    return (i32v)((u32v)as_bits(load(from)) >> 16) | as_bits(load(from + columns));
  }
}

inline constexpr index_t kKeyWords = kChunkKeys * kMaxHeadDim / 2;

// The keys of a chunk's tiles as columns: where each tile's are. copies: [kKeyWords].
template <class Stored>
QT_INLINE void arrange_keys(const Chunk& chunk, index_t head_dim, MatrixWord* copies, const char** columns) {
  const index_t pairs = head_dim / 2, words_of_tile = query_words(head_dim) * kTileKeys;
  for (index_t t = 0; t < chunk.count; ++t) {
    if (std::is_same_v<Stored, bf16> && head_dim % kAmxPairs == 0) {
      columns[t] = chunk.keys[t];
      continue;
    }
    MatrixWord* to = copies + t * words_of_tile;
    columns[t] = (const char*)to;
    for (index_t p = 0; p < pairs; ++p, to += kTileKeys) store(to, pairs_of<Stored>(chunk.keys[t], kTileKeys, p, 0));
    std::memset(to, 0, (const char*)(copies + (t + 1) * words_of_tile) - (const char*)to);
  }
}

alignas(64) constexpr char kNoValues[kTileKeys * kMaxHeadDim * 2] = {};

// The values of two tiles as columns, [head_dim / 16][16 keys][16 dimensions][tile].
template <class Stored>
QT_INLINE void arrange_two(const char* first, const char* second, index_t head_dim, MatrixWord* to) {
  const i32v high = all(std::int32_t(0xFFFF0000));
  for (index_t p = 0; p < kTileKeys / 2; ++p)
    for (index_t d = 0; d < head_dim; d += kLanes) {
      const i32v a = pairs_of<Stored>(first, head_dim, p, d), b = pairs_of<Stored>(second, head_dim, p, d);
      MatrixWord* place = to + d / kLanes * kOperandWords + 2 * p * kLanes;
      store(place, (a & ~high) | b << 16);
      store(place + kLanes, (i32v)((u32v)a >> 16) | (b & high));
    }
}

// Those of a chunk's tiles, its whole pairs of tiles from the first that somebody sees on. Tiles that nobody walks are zero.
template <class Stored>
QT_INLINE void arrange_values(const Chunk& chunk, index_t head_dim, MatrixWord* to) {
  const index_t begin = chunk.begin / kTileKeys, end = begin + chunk.count;
  for (index_t t = begin / 2 * 2; t < end; t += 2)
    arrange_two<Stored>(t < begin ? kNoValues : chunk.values[t - begin],
                        t + 1 < end ? chunk.values[t + 1 - begin] : kNoValues, head_dim,
                        to + t / 2 * (head_dim / kLanes) * kOperandWords);
}

// Lines to bring closer with each step of `multiply`, so that all come in one chunk's time.
QT_INLINE index_t lines_per_step(index_t lines, index_t rows, index_t tiles, index_t head_dim) {
  const index_t columns = rows > kBlock ? 2 : 4, turns = (rows + 2 * kBlock - 1) / (2 * kBlock);
  const index_t scores = (tiles + columns - 1) / columns * (head_dim / kAmxPairs);
  const index_t values = (head_dim / kAmxColumns + columns - 1) / columns * (tiles / 2);
  return lines / (turns * (scores + values) + 1) + 1;
}

// Up to two blocks of rows times all columns [0, count), whose addresses at(c) tells: as MatrixUnit::multiply.
template <class At>
QT_INLINE void multiply_rows(MatrixUnit& unit, index_t rows, const MatrixWord* from, index_t row_words, index_t count, At at,
                             index_t column_step, index_t steps, Prefetch& prefetch, index_t lines, float* to,
                             index_t to_stride) {
  unit.fit(rows);
  index_t c = 0;
  const auto multiply = [&]<int Blocks, int V>() __attribute__((always_inline)) {
    for (; c + V <= count; c += V) {
      const char* columns[V];
      for (int v = 0; v < V; ++v) columns[v] = at(c + v);
      unit.multiply<Blocks, V>(from, row_words, columns, column_step, steps, prefetch, lines, to + c * kAmxColumns,
                               to_stride);
    }
  };
  if (rows > kBlock) {
    multiply.template operator()<2, 2>();
    multiply.template operator()<2, 1>();
  } else {
    multiply.template operator()<1, 4>();
    multiply.template operator()<1, 2>();
    multiply.template operator()<1, 1>();
  }
}

// scores [rows][kChunkKeys] of `count` tiles. queries: [rows][query_words].
QT_INLINE void score_matrix(MatrixUnit& unit, const MatrixWord* queries, index_t rows, index_t head_dim,
                            const char* const* keys, index_t count, Prefetch& prefetch, index_t lines, float* scores) {
  const index_t row_words = query_words(head_dim), steps = row_words / kStepWords;
  for (index_t row = 0; row < rows; row += 2 * kBlock)
    multiply_rows(
        unit, rows - row < 2 * kBlock ? rows - row : 2 * kBlock, queries + row * row_words, row_words, count,
        [&](index_t c) { return keys[c]; }, kOperandBytes, steps, prefetch, lines, scores + row * kChunkKeys, kChunkKeys);
}

// sums = shrink * sums + weights times values, of the pairs of tiles that [begin, end) touch, keys counted from the chunk's
// first. weights: [rows][kChunkKeys / 2]; sums: [rows][head_dim]; added: of two blocks of rows.
QT_INLINE void weigh_matrix(MatrixUnit& unit, const MatrixWord* weights, const float* shrink, index_t rows,
                            const MatrixWord* values, index_t begin, index_t end, index_t head_dim, Prefetch& prefetch,
                            index_t lines, float* added, float* sums) {
  const index_t first = begin / kAmxPairs, steps = (end - 1) / kAmxPairs + 1 - first;
  weights += first * kStepWords;
  values += first * (head_dim / kAmxColumns) * kOperandWords;
  const index_t columns = head_dim / kAmxColumns;
  for (index_t row = 0; row < rows; row += 2 * kBlock) {
    const index_t count = rows - row < 2 * kBlock ? rows - row : 2 * kBlock;
    multiply_rows(
        unit, count, weights + row * kChunkKeys / 2, kChunkKeys / 2, columns,
        [&](index_t c) { return (const char*)(values + c * kOperandWords); }, columns * kOperandBytes, steps, prefetch, lines,
        added, head_dim);
    for (index_t r = 0; r < count; ++r) {
      const f32v shrunk = all(shrink[row + r]);
      float* sum = sums + (row + r) * head_dim;
      const float* more = added + r * head_dim;
      for (index_t d = 0; d < head_dim; d += kLanes) store(sum + d, fma(load(sum + d), shrunk, load(more + d)));
    }
  }
}

}  // namespace
}  // namespace qt::QT_ISA
#endif
