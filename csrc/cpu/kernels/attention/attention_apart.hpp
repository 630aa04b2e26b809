// Attention of few rows as two kernels. A model has few units, and a unit is one thread's work, so one kernel would leave threads
// idle. The first kernel computes scores by ranges of keys. The second computes softmax and weighted values by ranges of value
// dimensions, after all scores are complete.
//
//              keys ->                             value dimensions ->
//   scores     | piece | piece | piece | ...       all keys of a partition:  | piece | piece | ...
//
// A thread owns a unit and either a range of keys or a range of value dimensions.
//
// Reduction order: the same bits as attention.cpp. A score is a sum over the dimensions of one key. A result dimension is a sum
// of that dimension over all values. Both add in the same order, and chunks and partitions merge in the same order. The softmax
// of a row needs all of its earlier scores. Every piece of values repeats the softmax, which costs less than a wait for another
// thread.
//
// Bytes: keys and values are read once. A piece of values reads at least one cache line of each stored row of values.
#pragma once

#include "attention_partitions.hpp"
#include "attention_rows.hpp"

namespace qt::QT_ISA {
namespace {

// A unit's scores of a chunk, [rows][kChunkKeys].
QT_INLINE float* scores_at(const AttentionPiece& piece, index_t unit, index_t tile) {
  const index_t chunk = tile / kChunkTiles - piece.all_first * (kPartitionKeys / kChunkKeys);
  return piece.scores + unit * piece.unit_scores + chunk * piece.chunk_scores;
}

// The tiles [tile, end) of a chunk, without prefetch of other tiles.
QT_INLINE Chunk chunk_of_tiles(const AttentionCall& call, const AttentionPiece& piece, index_t kv_head, index_t tile, index_t end) {
  Chunk chunk;
  chunk.begin = tile % kChunkTiles * kTileKeys;
  chunk.count = end - tile;
  locate(call.kv, piece.blocks, kv_head, tile, end, chunk.keys, chunk.values);
  for (index_t i = 0; i < chunk.count; ++i) chunk.beside_keys[i] = chunk.keys[i], chunk.beside_values[i] = chunk.values[i];
  return chunk;
}

// Calls with(tile, next) for the tiles [begin, end), one chunk at a time.
template <class With>
QT_INLINE void by_chunks(index_t begin, index_t end, With with) {
  for (index_t tile = begin, next; tile < end; tile = next) {
    next = (tile / kChunkTiles + 1) * kChunkTiles;
    if (next > end) next = end;
    with(tile, next);
  }
}

template <class Format, class Element>
void score_unit(const AttentionCall& call, const ScorePiece& at, index_t unit) {
  using Word = typename Format::Word;
  const AttentionPiece& piece = call.pieces[at.piece];
  const Heads heads = heads_of(call, unit);
  const index_t key_dim = call.kv.key_dim;
  Room<Word>& room = *(Room<Word>*)call.scratch(sizeof(Room<Word>));
  Group<Word>& group = room.groups[0];
  typename Format::Unit matrix;
  begin_group(call, piece, heads, 0, 0, room);
  take_queries_of<Format, Element>(call, heads.first, false, group);
  by_chunks(at.tile, at.end, [&](index_t tile, index_t next) {
    Chunk chunk = chunk_of_tiles(call, piece, heads.kv_head, tile, next);
    Prefetch prefetch;
    for (index_t i = 0; i < chunk.count; ++i) prefetch.add(chunk.keys[i], call.kv.key_bytes);
    prefetch.take(chunk.count * call.kv.key_bytes / 64);
    if constexpr (Format::kInFours)
      for (index_t i = 0; i < chunk.count; ++i)
        chunk.key_factors[i] = take_factors(chunk.keys[i], key_dim, room.scratch.key_factors[i]);
    float* scores = scores_at(piece, unit, tile);
    if constexpr (Format::kOfMatrix) {
      score_chunk_of_matrix<typename Format::Stored>(group, key_dim, chunk, matrix, room.scratch, scores);
    } else {
      score_chunk<typename Format::Direct>(group.queries, group.rows, key_dim, chunk, scores);
    }
  });
}

// Prefetches a range of value dimensions of a chunk into the L2 cache.
template <class Stored>
void fetch_numbers(const Chunk& chunk, Numbers numbers) {
  constexpr bool in_pairs = std::is_same_v<Stored, bf16> || std::is_same_v<Stored, Fours>;
  constexpr index_t bytes = std::is_same_v<Stored, bf16> ? 4 : sizeof(Stored), rows = in_pairs ? kTileKeys / 2 : kTileKeys;
  for (index_t i = 0; i < chunk.count; ++i)
    for (index_t row = 0; row < rows; ++row)
      for (index_t at = 0; at < numbers.count * bytes; at += 64)
        __builtin_prefetch(chunk.values[i] + (row * numbers.all + numbers.first) * bytes + at, 0, 2);
}

// sums = shrink * sums + weights * values, for a range of value dimensions of a chunk.
template <class Format>
void weigh_numbers(const Chunk& chunk, Numbers numbers, typename Format::Unit& matrix, Room<typename Format::Word>& room) {
  auto& group = room.groups[0];
  if constexpr (Format::kOfMatrix)
    weigh_chunk_of_matrix<typename Format::Stored>(group, chunk, numbers, matrix, room.scratch);
  else
    weigh_chunk<typename Format::Direct>(room.scratch.weights(), group.shrink, group.rows, chunk, numbers, group.sums);
}

// part: index of the range of value dimensions.
template <class Format, class Element>
void weigh_unit(const AttentionCall& call, const AttentionPiece& piece, index_t unit, index_t part) {
  using Word = typename Format::Word;
  using Stored = typename Format::Stored;
  const Heads heads = heads_of(call, unit);
  const index_t value_dim = call.kv.value_dim, first = part * call.part_dim;
  const Numbers numbers{value_dim, first, value_dim - first < call.part_dim ? value_dim - first : call.part_dim};
  Room<Word>& room = *(Room<Word>*)call.scratch(sizeof(Room<Word>));
  Scratch<Word>& scratch = room.scratch;
  Group<Word>& group = room.groups[0];
  typename Format::Unit matrix;
  begin_group(call, piece, heads, 0, numbers.count, room);
  const index_t parts = (value_dim + call.part_dim - 1) / call.part_dim, place = unit * parts + part;
  float* partials = piece.partials;  // of this unit and part
  if (partials) partials += place * (piece.all_last - piece.all_first) * piece.partial_floats;
  const index_t seen = seen_from(call.layer.window, call.layer.chunk, piece.position) / kTileKeys;
  const index_t seen_end = (piece.position + piece.count - 1) / kTileKeys + 1;
  const index_t from = piece.first * kPartitionTiles, to = piece.last * kPartitionTiles;
  const index_t end = seen_end < to ? seen_end : to;
  by_chunks(seen > from ? seen : from, end, [&](index_t tile, index_t next) {
    Chunk chunk = chunk_of_tiles(call, piece, heads.kv_head, tile, next);
    fetch_numbers<Stored>(chunk, numbers);
    const Keys keys{tile / kChunkTiles * kChunkKeys, chunk.begin, chunk.begin + chunk.count * kTileKeys};
    const float* scores = scores_at(piece, unit, tile);
    for (index_t r = 0; r < group.rows; ++r)
      std::memcpy(scratch.scores + r * kChunkKeys + keys.begin, scores + r * kChunkKeys + keys.begin, (keys.end - keys.begin) * 4);
    if constexpr (Format::kInFours)
      for (index_t i = 0; i < chunk.count; ++i)
        chunk.value_factors[i] = take_factors(chunk.values[i], value_dim, scratch.value_factors[i]);
    if constexpr (Format::kScaled) take_scales(call, chunk, scratch);
    if constexpr (Format::kOfMatrix && Format::kScaled) clear_scales_beside(chunk, scratch);
    soften<Format::kScaled>(call, heads.first, keys, group, scratch.scores, scratch.weights(), scratch, [](Pass) {});
    weigh_numbers<Format>(chunk, numbers, matrix, room);
    if (next == end || next % kPartitionTiles == 0)
      end_partition(piece, tile / kPartitionTiles, partials, numbers.count, group);
  });
  if (partials && !join(piece, partials, piece.pending + place, numbers.count, &group, 1)) return;
  finish<Element>(call, group, heads.first, first, numbers.count);
}

template <class Format, class Element>
void attend_scores(const void* description, index_t begin, index_t end) {
  const AttentionCall& call = *(const AttentionCall*)description;
  const index_t units = call.kv.kv_heads * call.kv_head_units;
  for (index_t i = begin; i < end; ++i) score_unit<Format, Element>(call, call.score_pieces[i / units], i % units);
}

template <class Format, class Element>
void attend_values(const void* description, index_t begin, index_t end) {
  const AttentionCall& call = *(const AttentionCall*)description;
  const index_t units = call.kv.kv_heads * call.kv_head_units, parts = (call.kv.value_dim + call.part_dim - 1) / call.part_dim;
  for (index_t i = begin; i < end; ++i)
    weigh_unit<Format, Element>(call, call.pieces[i / (units * parts)], i / parts % units, i % parts);
}

}  // namespace
}  // namespace qt::QT_ISA
