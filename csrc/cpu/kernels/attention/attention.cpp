// Causal attention over the paged cache, for single new tokens and for chunks of a prompt alike.
//
// A piece of work is some consecutive tokens of one row with a KV head and its query heads: up to 16 groups of up to 64
// (token, head) rows that share every load of the cache. It walks the keys in chunks of 128: scores, the online softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), weighted sum of the values, for one group
// after another. Few rows are multiplied with the cache as it lies (attention_tiles.hpp), many with a chunk that was
// widened to fp32 for all of them (attention_wide.hpp). A matrix unit multiplies few and many alike (attention_matrix.hpp).
// Where few rows leave threads idle, scores and values are two works (attention_apart.hpp).
//
//   positions  0        128       256       384       512                      1024
//   chunks     |---------|---------|---------|---------|---------| ...           |
//   partitions |                                       |                         |
//
// Chunks and partitions begin at fixed positions. A partition is reduced by itself, and the results of the
// partitions a token sees are merged in ascending order, whether they were computed in one piece of work or in several
// (then by the thread that finishes last). Keys that a row does not see, because they come after it or have left its window, have
// weight 0 and add nothing. So the result of a (token, head) is one fixed sequence of roundings, whatever else is in the
// batch, however the prompt was cut into chunks, however many threads there are. Sums are followed by + 0, since
// whether an unseen key was added to a zero shows in the zero's sign.
//
// Weights are powers of two of (score - largest) * log2 e. Scores, weights and sums are fp32, whatever the cache holds;
// where the processor's pairs of bf16 are faster than fp32 (attend_in_pairs), and on the matrix unit, weights are rounded to
// bf16 for the multiplication with the values, and it is the rounded ones that the normalizer sums: a true average of the
// values. (On the matrix unit but for an int8 cache, where weights are rounded with the values' scales.) An int4 cache's numbers are
// code * scale + least number, rounded once, before they are multiplied; to bf16 once more for the matrix unit. The two scales of a
// layer with an fp8 cache multiply its scores and its results.
//
// Where values are what keys begin with, a chunk's are laid out as values first: once for all groups of a piece.
//
// Heads of any width lie in the cache with zeros after their numbers, which add zeros to scores; what their values add up to
// is not stored.
//
// Per key and KV head in bf16: 2 * (key_dim + value_dim) bytes, as many FLOPs and an exponential for each row. Limiter: memory
// bandwidth for single tokens, the multiplications for prompts; with a matrix unit softmax as much as they.
#include "attention_apart.hpp"

namespace qt::QT_ISA {
namespace {

// Brings a group's queries, or the place of its results, into the second-level cache: `numbers` of each of its tokens.
template <bool kWritten, class Element, class Word>
void fetch_rows(const Element* memory, index_t stride, index_t numbers, const Group<Word>& group) {
  for (index_t token = 0; token < group.tokens; ++token) {
    const Element* row = memory + (group.token + token) * stride;
    for (index_t i = 0; i < numbers; i += 64 / index_t(sizeof(Element))) __builtin_prefetch(row + i, kWritten, 2);
  }
}

// Where a piece is on its walk over a KV head's tiles: the chunk [tile, next), and [next, after) after it.
struct Walk {
  index_t kv_head, first_head;
  index_t tile, next, after, end;
  int turn;  // which of the two is the chunk's
  const char *keys[2][kChunkTiles], *values[2][kChunkTiles];
};

// Of a chunk's tiles, how many of keys and of values are brought closer during the softmax.
constexpr index_t kSoftmaxTiles = 2;

// The chunk that a few rows are multiplied with, and what they bring closer meanwhile.
Chunk chunk_of(const AttentionCall& call, const Walk& walk, Prefetch& prefetch) {
  Chunk chunk;
  chunk.begin = walk.tile % kChunkTiles * kTileKeys;
  chunk.count = walk.next - walk.tile;
  const index_t following = walk.after - walk.next;
  for (index_t i = 0; i < chunk.count; ++i) {
    chunk.keys[i] = walk.keys[walk.turn][i];
    if (call.layer.values_in_keys) {  // see take_values_of_keys
      chunk.beside_keys[i] = i < following ? walk.keys[1 - walk.turn][i] : chunk.keys[i];
      continue;
    }
    chunk.values[i] = walk.values[walk.turn][i];
    const bool during_softmax = i >= chunk.count - kSoftmaxTiles;
    chunk.beside_keys[i] = during_softmax ? chunk.keys[i] : chunk.values[i];
    if (during_softmax) prefetch.add(chunk.values[i], call.kv.value_bytes);
    chunk.beside_values[i] = i < kSoftmaxTiles || i >= following ? chunk.values[i] : walk.keys[1 - walk.turn][i];
  }
  for (index_t i = 0; i < kSoftmaxTiles && i < following && !call.layer.values_in_keys; ++i)
    prefetch.add(walk.keys[1 - walk.turn][i], call.kv.key_bytes);
  return chunk;
}

// Of a chunk's tiles, those that a group sees; not more than 0: none.
template <class Word>
index_t tiles_seen(const Walk& walk, const Group<Word>& group) {
  const index_t end = (group.position + group.tokens - 1) / kTileKeys + 1;
  return (end < walk.next ? end : walk.next) - walk.tile;
}

// One chunk for all groups of a piece. before(g): called before group g's turn.
template <class Format, class Before>
void walk_chunk(const AttentionCall& call, const Walk& walk, Group<typename Format::Word>* groups, index_t num_groups,
                bool wide, typename Format::Unit& unit, Scratch<typename Format::Word>& scratch, Before before) {
  const index_t key_dim = call.kv.key_dim, value_dim = call.kv.value_dim, first = walk.tile / kChunkTiles * kChunkKeys;
  Prefetch prefetch;
  Chunk chunk = chunk_of(call, walk, prefetch);
  if constexpr (Format::kInFours) {
    for (index_t i = 0; i < chunk.count; ++i) {
      chunk.key_factors[i] = take_factors(chunk.keys[i], key_dim, scratch.key_factors[i]);
      chunk.value_factors[i] = take_factors(chunk.values[i], value_dim, scratch.value_factors[i]);
    }
  } else if (call.layer.values_in_keys) {
    take_values_of_keys<typename Format::Stored>(chunk, value_dim, scratch.values_of_keys);
  }
  if constexpr (Format::kScaled) take_scales(call, chunk, scratch);
  index_t lines = 0;
  if (Format::kOfMatrix || (Format::kWidens && wide)) {
    prefetch = Prefetch();
    for (index_t i = 0; i < walk.after - walk.next; ++i) prefetch.add(walk.keys[1 - walk.turn][i], call.kv.tile_bytes);
    lines = (walk.after - walk.next) * call.kv.tile_bytes / 64;
  }
  if constexpr (Format::kOfMatrix) {
    walk_chunk_of_matrix<typename Format::Stored>(
        call, walk.first_head, first, chunk, groups, num_groups, [&](const auto& group) { return tiles_seen(walk, group); },
        before, unit, scratch, prefetch, lines);
  } else {
    using Direct = typename Format::Direct;
    if constexpr (Format::kWidens)
      if (wide) {
        index_t rows = 0;
        for (index_t g = 0; g < num_groups; ++g) rows += groups[g].rows;
        lines = lines * kWideRows / (2 * rows) + 1;
        widen_chunk<Direct>(chunk, key_dim, value_dim, scratch.keys, scratch.values);
      }
    for (index_t g = 0; g < num_groups; ++g) {
      Group<typename Format::Word>& group = groups[g];
      before(g);
      Chunk seen = chunk;
      seen.count = tiles_seen(walk, group);
      if (seen.count <= 0) continue;
      const index_t count = seen.count * kTileKeys;
      const Keys keys{first, chunk.begin, chunk.begin + count};
      if constexpr (Format::kWidens)
        if (wide) {
          score_wide(group.queries, group.rows, key_dim, scratch.keys, count, prefetch, lines, scratch.scores + chunk.begin);
          soften<Format::kScaled>(call, walk.first_head, keys, group, scratch.scores, scratch.weights(), scratch, [](Pass) {});
          weigh_wide(scratch.weights() + chunk.begin, group.shrink, group.rows, scratch.values, count, value_dim, prefetch,
                     lines, group.sums);
          continue;
        }
      score_chunk<Direct>(group.queries, group.rows, key_dim, seen, scratch.scores);
      soften<Format::kScaled>(call, walk.first_head, keys, group, scratch.scores, scratch.weights(), scratch,
                              [&](Pass) __attribute__((always_inline)) { prefetch.take(kChunkKeys / kLanes); });
      weigh_chunk<Direct>(scratch.weights(), group.shrink, group.rows, seen, {value_dim, 0, value_dim}, group.sums);
    }
  }
}

template <class Format, class Element>
void attend_unit(const AttentionCall& call, const AttentionPiece& piece, index_t unit) {
  using Word = typename Format::Word;
  const index_t value_dim = call.kv.value_dim;
  const Heads heads = heads_of(call, unit);
  Walk walk;
  walk.kv_head = heads.kv_head;
  walk.first_head = heads.first;

  Room<Word>& room = *(Room<Word>*)call.scratch(sizeof(Room<Word>));
  Group<Word>(&groups)[kMaxGroups] = room.groups;
  typename Format::Unit matrix;
  const index_t num_groups = (piece.count + call.group_tokens - 1) / call.group_tokens;
  const bool wide = Format::kWidens && piece.count * heads.count >= kWidenFrom;
  for (index_t g = 0; g < num_groups; ++g) begin_group(call, piece, heads, g, value_dim, room);

  float* partials = piece.partials;  // of this unit
  if (partials) partials += unit * (piece.all_last - piece.all_first) * piece.partial_floats;
  const index_t seen = seen_from(call.layer.window, call.layer.chunk, piece.position);
  const index_t first_tile = piece.first * kPartitionTiles, last_tile = piece.last * kPartitionTiles;
  const index_t seen_end = (piece.position + piece.count - 1) / kTileKeys + 1;
  walk.tile = seen / kTileKeys > first_tile ? seen / kTileKeys : first_tile;
  walk.end = seen_end < last_tile ? seen_end : last_tile;
  walk.turn = 0;
  walk.next = (walk.tile / kChunkTiles + 1) * kChunkTiles;
  if (walk.next > walk.end) walk.next = walk.end;
  locate(call.kv, piece.blocks, walk.kv_head, walk.tile, walk.next, walk.keys[0], walk.values[0]);
  // A group's queries come closer while the group before it is computed, and the place of its results during its last chunk.
  const index_t begin = walk.tile;
  const auto before = [&](index_t g) {
    if (walk.tile == begin) {
      take_queries_of<Format, Element>(call, heads.first, wide, groups[g]);
      if (g + 1 < num_groups)
        fetch_rows<false>((const Element*)call.q + heads.first * call.kv.key_dim, call.q_stride,
                          heads.count * call.kv.key_dim, groups[g + 1]);
    }
    if ((wide || Format::kOfMatrix) && walk.next == walk.end)
      fetch_rows<true>((const Element*)call.out + heads.first * call.layer.value_width, call.out_stride,
                       heads.count * call.layer.value_width, groups[g]);
  };
  while (walk.tile < walk.end) {
    walk.after = walk.next + kChunkTiles < walk.end ? walk.next + kChunkTiles : walk.end;
    locate(call.kv, piece.blocks, walk.kv_head, walk.next, walk.after, walk.keys[1 - walk.turn], walk.values[1 - walk.turn]);
    walk_chunk<Format>(call, walk, groups, num_groups, wide, matrix, room.scratch, before);
    const index_t partition = walk.tile / kPartitionTiles;
    walk.tile = walk.next;
    walk.next = walk.after;
    walk.turn = 1 - walk.turn;
    if (walk.tile < walk.end && walk.tile % kPartitionTiles != 0) continue;
    for (index_t g = 0; g < num_groups; ++g) end_partition(piece, partition, partials, value_dim, groups[g]);
  }
  if (partials && !piece.pending) return;
  if (partials && !join(piece, partials, piece.pending + unit, value_dim, groups[0])) return;  // one group
  for (index_t g = 0; g < num_groups; ++g) finish<Element>(call, groups[g], heads.first, 0, value_dim);
}

template <class Format, class Element>
void attend(const void* description, index_t begin, index_t end) {
  const AttentionCall& call = *(const AttentionCall*)description;
  const index_t units = call.kv.kv_heads * call.kv_head_units;
  for (index_t i = begin; i < end; ++i) {
    if (call.unit_after_unit)
      attend_unit<Format, Element>(call, call.pieces[i % call.num_pieces], i / call.num_pieces);
    else
      attend_unit<Format, Element>(call, call.pieces[i / units], i % units);
  }
}

// Rows that a group should have: enough that loading a key costs little beside multiplying it, few enough that their scores
// stay in the first-level cache, and that what single tokens do not see is not computed for them.
constexpr index_t kGroupRows = 48;

template <class Format, class Element>
constexpr AttentionKernel kernel(index_t group_rows, index_t most_groups) {
  return {attend<Format, Element>, attend_scores<Format, Element>, attend_values<Format, Element>, group_rows, most_groups};
}

#if defined(QT_AMX)
template <class Stored>
constexpr AttentionKernel kOfBf16 = kernel<OfMatrix<Stored>, bf16>(2 * kBlock, kMaxGroups);
#else
template <class Format, class Element>
constexpr AttentionKernel kSharing = kernel<Format, Element>(kGroupRows, kMaxGroups);
#endif

}  // namespace

#if defined(QT_AMX)  // of 16-bit floats and singles the parent's serve
const AttentionKernels attention = {
    .attend = {kOfBf16<bf16>}, .attend_bytes = {kOfBf16<std::int8_t>}, .attend_fours = {kOfBf16<Fours>},
    .attend_eighths = {kOfBf16<Eighth>}, .attend_in_pairs = {},
};
#else
const AttentionKernels attention = {
    .attend = {kSharing<Format<bf16, Halves, true>, bf16>, kSharing<Format<fp16, Singles<fp16>, true>, fp16>,
               kSharing<Format<float, Singles<float>, true>, float>},
    .attend_bytes = {kSharing<Bytes, bf16>, kSharing<Bytes, fp16>, kSharing<Bytes, float>},
    .attend_fours = {kSharing<InFours, bf16>, kSharing<InFours, fp16>, kSharing<InFours, float>},
    .attend_eighths = {kSharing<InEighths, bf16>, kSharing<InEighths, fp16>, kSharing<InEighths, float>},
#if defined(__AVX512BF16__)
    .attend_in_pairs = kernel<Format<bf16, Pairs, false>, bf16>(kGroupRows, 1),  // pairs are not widened: nothing to share
#else
    .attend_in_pairs = {},
#endif
};
#endif

}  // namespace qt::QT_ISA
