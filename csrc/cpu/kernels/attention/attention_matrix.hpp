// Attention products on AMX (amx.hpp): up to 32 (token, head) rows times tiles of keys, or their weights times values. Queries
// are bf16. The cache is bf16, int8 (exact in bf16) or int4, which is scaled and rounded to bf16.
//
//              rows [up to 16][32 numbers]       columns [16 pairs][16][2], a kilobyte each
//   scores     queries, dimensions 32 i ...      keys of tile t, dimensions 32 i ...
//   values     weights of tiles 2 i, 2 i + 1     values of these tiles: a pair is key j of each of the two tiles
//
// AMX loads bf16 keys directly from the cache. Keys are copied if they are int8 or int4, or if their dimensions do not fill the
// last step (key_dim 16, 48, 80 ...; zero-padded). Values are always copied, once for all groups of a piece: a tile has 16 keys,
// half of what AMX multiplies in the same time. Cost of the copy: 4 * value_dim cache lines per chunk, and 8 * value_dim cycles
// of multiplications for each 16 rows.
//
// Reduction order, the same for every row: a score adds 32 dimensions a step, ascending. Within a step, even and odd dimensions
// are separate sums. The values of a chunk are added from zero, two tiles a step, ascending. Within a step, each of the two tiles
// has its own sum, keys ascending. One fused rounding then adds the result to the row's rescaled sum. Unseen keys of a tile have
// weight zero. Tiles outside the piece are zeros.
//
// Limiter: a multiplication takes one cycle for each of its rows. Two by two registers read 4 kilobytes in 64 cycles. Softmax
// takes about 6 cycles for 16 scores: 96 cycles for 16 rows and a tile, compared with head_dim cycles of multiplications. Softmax
// limits heads of 64 dimensions; with 128 dimensions both cost about the same.
#pragma once

#include "amx.hpp"
#include "attention_softmax.hpp"

#if defined(QT_AMX)

#define QT_MEMBER __attribute__((always_inline))

namespace qt::QT_ISA {
namespace {

inline constexpr index_t kBlock = kAmxRows;                        // rows of a register
inline constexpr index_t kOperandBytes = kAmxRows * kAmxRowBytes;  // of a register of columns
inline constexpr index_t kOperandWords = kOperandBytes / 4;
inline constexpr index_t kStepWords = kAmxPairs / 2;               // words of a row that one step multiplies
static_assert(kAmxColumns == kTileKeys && kAmxPairs == 2 * kTileKeys && kLanes == kAmxColumns);

QT_INLINE void store(MatrixWord* to, i32v words) { std::memcpy(to, &words, sizeof words); }

// Words of a row of queries, rounded up to whole steps.
QT_INLINE index_t query_words(index_t key_dim) { return (key_dim + kAmxPairs - 1) / kAmxPairs * kStepWords; }

// AMX registers for up to two blocks of rows: sums in 0 to 3, rows in 4 and 5, columns in 6 and 7. Sums 0 and 1 belong to the
// first block, 2 and 3 to the second (or to the first too).
class MatrixUnit {
 public:
  // Sets the register shapes for `rows` rows, at most two blocks. No accumulation may be in progress.
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

  // Template parameters below: one block of rows by V * 16 columns, or two blocks of rows.
  template <int Blocks, int V>
  QT_MEMBER void zero() {
    each<Blocks, V>([&]<int C>(Number<C>) __attribute__((always_inline)) { amx_.zero<C>(); });
  }

  // Adds 32 numbers of each row times columns[v] + offset.
  template <int Blocks, int V>
  QT_MEMBER void multiply(const MatrixWord* rows, index_t row_words, const char* const* columns, index_t offset) {
    amx_.load<4>(rows, row_words * 4);
    if constexpr (Blocks > 1) amx_.load<5>(rows + kBlock * row_words, row_words * 4);
    multiply_column<Blocks, V, 0>(columns, offset);
  }

  template <int Blocks, int V>
  QT_MEMBER void store(float* to, index_t stride) {
    each<Blocks, V>([&]<int C>(Number<C>) __attribute__((always_inline)) {
      constexpr int block = Blocks > 1 ? C / 2 : 0, v = C - 2 * block;
      amx_.store<C>(to + block * kBlock * stride + v * kAmxColumns, stride * 4);
    });
  }

 private:
  template <int>
  struct Number {};

  // Calls with(register number) for each accumulator.
  template <int Blocks, int V, class With>
  QT_MEMBER void each(With with) {
    static_assert(Blocks * V <= 4);
    with(Number<0>());
    if constexpr (V > 1) with(Number<1>());
    if constexpr (V > 2 || Blocks > 1) with(Number<2>());
    if constexpr (V > 3 || (Blocks > 1 && V > 1)) with(Number<3>());
  }

  template <int Blocks, int V, int v>
  QT_MEMBER void multiply_column(const char* const* columns, index_t offset) {
    constexpr int column = 6 + v % 2;
    amx_.load<column>(columns[v] + offset, kAmxRowBytes);
    amx_.multiply_bf16<v, 4, column>();
    if constexpr (Blocks > 1) amx_.multiply_bf16<2 + v, 5, column>();
    if constexpr (v + 1 < V) multiply_column<Blocks, V, v + 1>(columns, offset);
  }

  Amx amx_;
  index_t first_ = 0, second_ = 0;
};

// to [rows][16 * count] = rows * columns, computed in steps that interleave with vector instructions. At most one product of an
// AMX unit may be in progress.
class Product {
 public:
  // Row r is the words from + r * row_words ...; column block c of 16 is columns[c] + i * column_step for each step i.
  struct Operands {
    const MatrixWord* from;
    index_t rows, row_words;
    const char* const* columns;
    index_t count, column_step, steps;
  };

  Product() = default;  // no work
  Product(const Operands& of, float* to, index_t to_stride) : of_(of), to_(to), to_stride_(to_stride) {}

  // Number of `advance` calls that compute a step, for the whole product.
  static index_t steps(const Operands& of) {
    const index_t last = of.rows % (2 * kBlock);
    return (of.rows / (2 * kBlock) + (last > kBlock)) * ((of.count + 1) / 2) * of.steps +
           (last > 0 && last <= kBlock ? of.count / 4 + (of.count % 4 + 1) / 2 : 0) * of.steps;
  }

  // Computes the next step: up to four multiplications. Returns false if the product is complete.
  __attribute__((noinline)) bool advance(MatrixUnit& unit) {
    const index_t rows = of_.rows - row_, left = of_.count - column_;
    if (rows <= 0) return false;
    if (rows > kBlock)
      left > 1 ? take<2, 2>(unit) : take<2, 1>(unit);
    else
      left > 3 ? take<1, 4>(unit) : left > 1 ? take<1, 2>(unit) : take<1, 1>(unit);
    return true;
  }

 private:
  template <int Blocks, int V>
  QT_MEMBER void take(MatrixUnit& unit) {
    if (step_ == 0) {
      const index_t rows = of_.rows - row_;
      unit.fit(rows < 2 * kBlock ? rows : 2 * kBlock);
      unit.zero<Blocks, V>();
    }
    unit.multiply<Blocks, V>(of_.from + row_ * of_.row_words + step_ * kStepWords, of_.row_words, of_.columns + column_,
                             step_ * of_.column_step);
    if (++step_ < of_.steps) return;
    unit.store<Blocks, V>(to_ + row_ * to_stride_ + column_ * kAmxColumns, to_stride_);
    step_ = 0;
    column_ += V;
    if (column_ == of_.count) column_ = 0, row_ += 2 * kBlock;
  }

  Operands of_ = {};
  float* to_ = nullptr;
  index_t to_stride_ = 0;
  index_t row_ = 0, column_ = 0, step_ = 0;
};

// Words of numbers 2 p and 2 p + 1 of kLanes columns from c on, as bf16, from a plane [number][columns]. adjust(4-bit codes,
// number, column) returns the scaled numbers, which are rounded to nearest, ties away from zero.
template <class Stored, class Adjust>
QT_INLINE i32v pairs_of(const char* plane, index_t columns, index_t p, index_t c, Adjust adjust) {
  if constexpr (std::is_same_v<Stored, bf16>) {
    return load_bits(plane + (p * columns + c) * 4);
  } else if constexpr (std::is_same_v<Stored, Fours>) {
    const i32v codes = load_fours(plane + p * columns + c);
    const i32v low = as_bits(adjust(Fours::part(codes, 0), 2 * p, c)) + all(0x8000);
    const i32v high = as_bits(adjust(Fours::part(codes, 1), 2 * p + 1, c)) + all(0x8000);
    return (i32v)((u32v)low >> 16) | (high & all(std::int32_t(0xFFFF0000)));
  } else {
    const Stored* from = (const Stored*)plane + 2 * p * columns + c;
    return (i32v)((u32v)as_bits(load(from)) >> 16) | as_bits(load(from + columns));
  }
}

// Sets `columns` to the keys of each tile in AMX layout, copied if needed. copies: [kChunkKeys * kMaxKeyDim / 2].
template <class Stored>
QT_INLINE void arrange_keys(const Chunk& chunk, index_t key_dim, MatrixWord* copies, const char** columns) {
  const index_t pairs = key_dim / 2, words_of_tile = query_words(key_dim) * kTileKeys;
  for (index_t t = 0; t < chunk.count; ++t) {
    if (std::is_same_v<Stored, bf16> && key_dim % kAmxPairs == 0) {
      columns[t] = chunk.keys[t];
      continue;
    }
    MatrixWord* to = copies + t * words_of_tile;
    columns[t] = (const char*)to;
    const auto scaled = [&](i32v codes, index_t d, index_t key) { return scaled_keys(codes, chunk.key_factors[t], d, key); };
    for (index_t p = 0; p < pairs; ++p, to += kTileKeys) store(to, pairs_of<Stored>(chunk.keys[t], kTileKeys, p, 0, scaled));
    std::memset(to, 0, (const char*)(copies + (t + 1) * words_of_tile) - (const char*)to);
  }
}

alignas(64) constexpr char kNoValues[kTileKeys * kMaxValueDim * 2] = {};
alignas(64) constexpr float kNoFactors[kMaxFourGroups * kFactorsOfGroup] = {};

// The values of two tiles as columns, [numbers.count / 16][16 keys][16 dimensions][tile].
template <class Stored>
QT_INLINE void arrange_two(const char* first, const float* first_factors, const char* second, const float* second_factors,
                           Numbers numbers, MatrixWord* to) {
  const i32v high = all(std::int32_t(0xFFFF0000));
  const auto scaled_by = [](const float* factors) {
    return [factors](i32v codes, index_t key, index_t d) { return scaled_value(codes, factors, key, d); };
  };
  for (index_t p = 0; p < kTileKeys / 2; ++p)
    for (index_t d = 0; d < numbers.count; d += kLanes) {
      const i32v a = pairs_of<Stored>(first, numbers.all, p, numbers.first + d, scaled_by(first_factors));
      const i32v b = pairs_of<Stored>(second, numbers.all, p, numbers.first + d, scaled_by(second_factors));
      MatrixWord* place = to + d / kLanes * kOperandWords + 2 * p * kLanes;
      store(place, (a & ~high) | b << 16);
      store(place + kLanes, (i32v)((u32v)a >> 16) | (b & high));
    }
}

// The values of a chunk as columns, in whole pairs of tiles from the first visible one. Tiles outside the piece are zero.
template <class Stored>
QT_INLINE void arrange_values(const Chunk& chunk, Numbers numbers, MatrixWord* to) {
  const index_t begin = chunk.begin / kTileKeys, end = begin + chunk.count;
  for (index_t t = begin / 2 * 2; t < end; t += 2)
    arrange_two<Stored>(t < begin ? kNoValues : chunk.values[t - begin], t < begin ? kNoFactors : chunk.value_factors[t - begin],
                        t + 1 < end ? chunk.values[t + 1 - begin] : kNoValues,
                        t + 1 < end ? chunk.value_factors[t + 1 - begin] : kNoFactors, numbers,
                        to + t / 2 * (numbers.count / kLanes) * kOperandWords);
}

// Sets `values` to the columns of the first pair of tiles, `count` dimensions of the arranged values.
QT_INLINE void point_to_values(const Chunk& chunk, index_t count, const MatrixWord* arranged, const char** values) {
  const index_t columns = count / kAmxColumns, first_pair = chunk.begin / kAmxPairs;
  for (index_t c = 0; c < columns; ++c) values[c] = (const char*)(arranged + (first_pair * columns + c) * kOperandWords);
}

// Operands of a group's queries times the keys of `tiles` tiles.
QT_INLINE Product::Operands queries_times_keys(const Group<MatrixWord>& group, const char* const* keys, index_t tiles,
                                               index_t key_dim) {
  const index_t row_words = query_words(key_dim);
  return {group.queries, group.rows, row_words, keys, tiles, kOperandBytes, row_words / kStepWords};
}

// Operands of a group's weights times `count` dimensions of the values of a chunk's first tiles.
QT_INLINE Product::Operands weights_times_values(const Group<MatrixWord>& group, const MatrixWord* weights,
                                                 const char* const* values, const Chunk& chunk, index_t tiles, index_t count) {
  const index_t first_pair = chunk.begin / kAmxPairs, columns = count / kAmxColumns;
  const index_t pairs = (chunk.begin + tiles * kTileKeys - 1) / kAmxPairs + 1 - first_pair;
  return {weights + first_pair * kStepWords, group.rows, kChunkKeys / 2, values, columns, columns * kOperandBytes, pairs};
}

// int8 cache: clears the scales of the tile outside the piece that shares a pair with a tile inside. Its weights are zero, but
// stale scratch of an earlier chunk may hold an infinity.
QT_INLINE void clear_scales_beside(const Chunk& chunk, Scratch<MatrixWord>& scratch) {
  float* scales = scratch.value_scales;
  const index_t end = chunk.begin + chunk.count * kTileKeys;
  if (chunk.begin % kAmxPairs != 0) store(scales + chunk.begin - kTileKeys, all(0.0f));
  if (end % kAmxPairs != 0) store(scales + end, all(0.0f));
}

// sums = shrink * sums + added [rows][value_dim].
QT_INLINE void add_chunk(const Group<MatrixWord>& group, const float* added, index_t value_dim) {
  for (index_t r = 0; r < group.rows; ++r) {
    const f32v shrink = all(group.shrink[r]);
    float* sums = group.sums + r * value_dim;
    const float* more = added + r * value_dim;
    for (index_t d = 0; d < value_dim; d += kLanes) store(sums + d, fma(load(sums + d), shrink, load(more + d)));
  }
}

// Copies queries [tokens][heads * key_dim], tokens q_stride apart, to [rows][query_words] with zero padding.
QT_INLINE void take_queries_of_matrix(const bf16* q, index_t q_stride, index_t key_dim, Group<MatrixWord>& group) {
  const index_t row_words = query_words(key_dim);
  for (index_t r = 0; r < group.rows; ++r) {
    MatrixWord* to = group.queries + r * row_words;
    std::memcpy(to, q + r / group.heads * q_stride + r % group.heads * key_dim, key_dim * 2);
    std::memset(to + key_dim / 2, 0, (row_words - key_dim / 2) * 4);
  }
}

// For attention_apart.hpp, one chunk of one group: its scores [rows][kChunkKeys]; and its weighted values, added to the group's
// sums.
template <class Stored>
void score_chunk_of_matrix(const Group<MatrixWord>& group, index_t key_dim, const Chunk& chunk, MatrixUnit& unit,
                           Scratch<MatrixWord>& scratch, float* scores) {
  const char* keys[kChunkTiles];
  arrange_keys<Stored>(chunk, key_dim, scratch.keys, keys);
  Product product(queries_times_keys(group, keys, chunk.count, key_dim), scores + chunk.begin, kChunkKeys);
  while (product.advance(unit)) {
  }
}

template <class Stored>
void weigh_chunk_of_matrix(const Group<MatrixWord>& group, const Chunk& chunk, Numbers numbers, MatrixUnit& unit,
                           Scratch<MatrixWord>& scratch) {
  const char* values[kMaxValueDim / kAmxColumns];
  arrange_values<Stored>(chunk, numbers, scratch.values);
  point_to_values(chunk, numbers.count, scratch.values, values);
  Product product(weights_times_values(group, scratch.weights(), values, chunk, chunk.count, numbers.count), scratch.added,
                  numbers.count);
  while (product.advance(unit)) {
  }
  add_chunk(group, scratch.added, numbers.count);
}

// Computes one chunk for all groups of a piece. first: position of the chunk's first key. tiles_of(group): number of the chunk's
// tiles that the group sees, ascending over groups. before(g) is called before group g. While vector instructions compute the
// weights of a group, AMX multiplies the weights of the previous group, then the queries of the next:
//
//   AMX        scores 0 |          scores 1 | values 0, scores 2 | values 1 ...
//   vectors             | weights 0         | weights 1          | weights 2 ...
//
// `lines` cache lines are prefetched, with the AMX steps and, if there is only one group, with its rows.
template <class Stored, class TilesOf, class Before>
void walk_chunk_of_matrix(const AttentionCall& call, index_t first_head, index_t first, const Chunk& chunk,
                          Group<MatrixWord>* groups, index_t num_groups, TilesOf tiles_of, Before before, MatrixUnit& unit,
                          Scratch<MatrixWord>& scratch, Prefetch& prefetch, index_t lines) {
  const index_t key_dim = call.kv.key_dim, value_dim = call.kv.value_dim;
  const char *keys[kChunkTiles], *values[kMaxValueDim / kAmxColumns];
  arrange_keys<Stored>(chunk, key_dim, scratch.keys, keys);
  arrange_values<Stored>(chunk, {value_dim, 0, value_dim}, scratch.values);
  if constexpr (std::is_same_v<Stored, std::int8_t>) clear_scales_beside(chunk, scratch);
  point_to_values(chunk, value_dim, scratch.values, values);

  const auto scoring_of = [&](index_t g) {
    return queries_times_keys(groups[g], keys, tiles_of(groups[g]), key_dim);
  };
  const auto weighing_of = [&](index_t g) {
    return weights_times_values(groups[g], scratch.weights(g % 2), values, chunk, tiles_of(groups[g]), value_dim);
  };

  index_t g = 0;
  for (; g < num_groups && tiles_of(groups[g]) <= 0; ++g) before(g);
  if (g == num_groups) return;
  constexpr index_t kLinesOfRow = kChunkKeys / kLanes;
  const index_t with_rows = num_groups == 1 ? 2 * groups[g].rows * kLinesOfRow : 0;
  const index_t rest = lines > with_rows ? lines - with_rows : 0;
  const index_t lines_of_step = rest / (Product::steps(scoring_of(g)) + Product::steps(weighing_of(g))) + 1;
  Product scoring, weighing;
  const Group<MatrixWord>* weighed = nullptr;  // group of the product `weighing`
  const auto bring_closer = [&](index_t some) __attribute__((noinline)) { prefetch.take(some); };
  const auto advance = [&]() __attribute__((noinline)) {
    bring_closer(lines_of_step);
    if (weighed) {
      if (weighing.advance(unit)) return true;
      add_chunk(*weighed, scratch.added, value_dim);
      weighed = nullptr;
    }
    return scoring.advance(unit);
  };
  const auto score = [&](index_t of) {
    before(of);
    const Product::Operands operands = scoring_of(of);
    scoring = Product(operands, scratch.scores_of(of % 2) + chunk.begin, kChunkKeys);
    return Product::steps(operands);
  };

  score(g);
  while (advance()) {
  }
  for (index_t steps = 0; g < num_groups; ++g) {
    Group<MatrixWord>& group = groups[g];
    if (g + 1 < num_groups) steps += score(g + 1);
    index_t due = 0;
    const auto beside = [&](Pass pass) __attribute__((always_inline)) {
      if (num_groups == 1) bring_closer(kLinesOfRow);
      if (pass == Pass::weights)
        for (due += steps; due >= group.rows; due -= group.rows) advance();
    };
    soften<std::is_same_v<Stored, std::int8_t>>(call, first_head,
                                                {first, chunk.begin, chunk.begin + tiles_of(group) * kTileKeys}, group,
                                                scratch.scores_of(g % 2), scratch.weights(g % 2), scratch, beside);
    while (advance()) {
    }
    const Product::Operands operands = weighing_of(g);
    weighing = Product(operands, scratch.added, value_dim);
    weighed = &group;
    steps = Product::steps(operands);
  }
  while (advance()) {
  }
}

}  // namespace
}  // namespace qt::QT_ISA
#endif
