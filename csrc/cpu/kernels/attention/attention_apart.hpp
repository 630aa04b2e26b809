// Attention of few rows in two works, for threads that would have nothing to do: a unit of it is one thread's work, and a model
// has few units. First scores, by ranges of keys; when all of them are known, softmax and values, by ranges of the values'
// numbers.
//
//              keys ->                             numbers of values ->
//   scores     | piece | piece | piece | ...       all keys of a partition:  | piece | piece | ...
//
// A score is a sum over its own key, and a number of a result one over that number of all values, so the bits are those of
// attention.cpp: each sum is added up in the same order, and chunks and partitions are merged as there. The softmax, which needs a
// row's scores of all keys before, is computed by every piece of values for itself: it is short beside waiting for another.
//
// Keys and values are read once. A piece of values reads a line or more of each of the cache's rows of them.
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

// The tiles [tile, end) of a chunk, with nothing to bring closer beside.
QT_INLINE Chunk chunk_of_tiles(const AttentionCall& call, const AttentionPiece& piece, index_t kv_head, index_t tile, index_t end) {
  Chunk chunk;
  chunk.begin = tile % kChunkTiles * kTileKeys;
  chunk.count = end - tile;
  locate(call.kv, piece.blocks, kv_head, tile, end, chunk.keys, chunk.values);
  for (index_t i = 0; i < chunk.count; ++i) chunk.beside_keys[i] = chunk.keys[i], chunk.beside_values[i] = chunk.values[i];
  return chunk;
}

// Calls with(tile, next) for the tiles [begin, end), a chunk at a time.
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

// Brings a chunk's numbers of values into the second-level cache.
template <class Stored>
void fetch_numbers(const Chunk& chunk, Numbers numbers) {
  constexpr bool in_pairs = std::is_same_v<Stored, bf16> || std::is_same_v<Stored, Fours>;
  constexpr index_t bytes = std::is_same_v<Stored, bf16> ? 4 : sizeof(Stored), rows = in_pairs ? kTileKeys / 2 : kTileKeys;
  for (index_t i = 0; i < chunk.count; ++i)
    for (index_t row = 0; row < rows; ++row)
      for (index_t at = 0; at < numbers.count * bytes; at += 64)
        __builtin_prefetch(chunk.values[i] + (row * numbers.all + numbers.first) * bytes + at, 0, 2);
}

// sums = shrink * sums + weights times a chunk's numbers of values.
template <class Format>
void weigh_numbers(const Chunk& chunk, Numbers numbers, typename Format::Unit& matrix, Room<typename Format::Word>& room) {
  auto& group = room.groups[0];
  if constexpr (Format::kOfMatrix)
    weigh_chunk_of_matrix<typename Format::Stored>(group, chunk, numbers, matrix, room.scratch);
  else
    weigh_chunk<typename Format::Direct>(room.scratch.weights(), group.shrink, group.rows, chunk, numbers, group.sums);
}

// part: which of the values' ranges of numbers.
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
  if (partials && !join(piece, partials, piece.pending + place, numbers.count, group)) return;
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
