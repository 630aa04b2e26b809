// Causal attention over the paged KV cache, for decode and prefill chunks alike.
//
// A thread owns a piece: consecutive tokens of one row, one KV head and its query heads. These are up to 16 groups of up to 64
// (token, head) rows that share every load of the cache. The thread walks the keys in chunks of 128. For each chunk and group it
// computes scores, softmax weights and the weighted sum of the values. The softmax is online (Milakov and Gimelshein, "Online
// normalizer calculation for softmax", 2018).
//
// - Few rows: multiplied with the cache as stored (attention_tiles.hpp).
// - Many rows: multiplied with a chunk that is widened to fp32 once for all groups (attention_wide.hpp).
// - AMX: one path for any number of rows (attention_matrix.hpp).
// - Few rows that would leave threads idle: scores and values run as two kernels (attention_apart.hpp).
//
//   positions  0        128       256       384       512                      1024
//   chunks     |---------|---------|---------|---------|---------| ...           |
//   partitions |                                       |                         |
//
// Reduction order: chunks and partitions begin at fixed positions. Each partition is reduced separately. The results of the
// partitions that a token sees are merged in ascending order. Several pieces can compute the partitions of one token; then the
// thread that finishes last merges them. Keys after a row's position or outside its window have weight 0 and add nothing. A
// (token, head) result is therefore one fixed sequence of roundings. It does not depend on batch size, prefill chunking or the
// number of threads. Every sum is followed by + 0: otherwise the sign of a zero would show whether an unseen key was added.
//
// Precision: weights are 2^((score - largest) * log2 e). Scores, weights and sums are fp32 for every cache dtype. Two paths round
// weights to bf16 before the multiplication with the values: dot products of bf16 pairs (attend_in_pairs) and AMX. The normalizer
// sums the rounded weights, so the result is a true average of the values. Exception: AMX with an int8 cache, which rounds the
// product of weight and value scale. An int4 number is code * scale + minimum, rounded once before the multiplication; AMX rounds
// it to bf16 once more. The two scales of a layer with an fp8 cache multiply its scores and its results.
//
// Latent attention (values_in_keys): the values of a chunk are transposed from its keys, once for all groups of a piece.
//
// Heads are padded with zeros in the cache to key_dim and value_dim. The zeros add nothing to scores. Padded dimensions of the
// result are not stored.
//
// Bytes and FLOPs per key and KV head in bf16: 2 * (key_dim + value_dim) bytes, and for each row as many FLOPs and one
// exponential. Limiter: memory bandwidth in decode, multiplications in prefill. With AMX, softmax limits prefill as much as the
// multiplications.
#include "attention_apart.hpp"

namespace qt::QT_ISA {
namespace {

// Prefetches a group's queries or output rows into the L2 cache: `numbers` elements of each token.
template <bool kWritten, class Element, class Word>
void fetch_rows(const Element* memory, index_t stride, index_t numbers, const Group<Word>& group) {
  for (index_t token = 0; token < group.tokens; ++token) {
    const Element* row = memory + (group.token + token) * stride;
    for (index_t i = 0; i < numbers; i += 64 / index_t(sizeof(Element))) __builtin_prefetch(row + i, kWritten, 2);
  }
}

// Position of a piece on its walk over the tiles of a KV head: the current chunk [tile, next) and the next one [next, after).
struct Walk {
  index_t kv_head, first_head;
  index_t tile, next, after, end;
  int turn;  // index of the current chunk in `keys` and `values`
  const char *keys[2][kChunkTiles], *values[2][kChunkTiles];
};

// Tiles of a chunk, of keys and of values each, that are prefetched during the softmax.
constexpr index_t kSoftmaxTiles = 2;

// The current chunk for the few-row path, with the addresses to prefetch during its multiplications.
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

// Number of the chunk's tiles that a group sees; 0 or negative: none.
template <class Word>
index_t tiles_seen(const Walk& walk, const Group<Word>& group) {
  const index_t end = (group.position + group.tokens - 1) / kTileKeys + 1;
  return (end < walk.next ? end : walk.next) - walk.tile;
}

// Computes one chunk for all groups of a piece. before(g) is called before group g is computed.
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
  // Prefetch: the queries of group g + 1 while group g is computed; the output rows of a group during its last chunk.
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
  if (partials && !join(piece, partials, piece.pending + unit, value_dim, groups, num_groups)) return;
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

// Target rows of a group. Lower bound: the load of a key must be cheap relative to its multiplications. Upper bounds: scores must
// stay in the L1 cache, and decode must not compute rows it does not need.
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

#if defined(QT_AMX)  // 16-bit floats and fp32 use the parent instruction set's kernels
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
    // Pairs are not widened, so groups have nothing to share
    .attend_in_pairs = kernel<Format<bf16, Pairs, false>, bf16>(kGroupRows, 1),
#else
    .attend_in_pairs = {},
#endif
};
#endif

}  // namespace qt::QT_ISA
