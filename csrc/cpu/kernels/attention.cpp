// Causal attention over the paged cache, for single new tokens and for chunks of a prompt alike.
//
// A piece of work is some consecutive tokens of one row with a KV head and its query heads: up to 16 groups of up to 64
// (token, head) rows that share every load of the cache. It walks the keys in chunks of 128: scores, the online softmax
// (Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018), weighted sum of the values, for one group
// after another. Few rows are multiplied with the cache as it lies (attention_tiles.hpp), many with a chunk that was
// widened to fp32 for all of them (attention_wide.hpp). A matrix unit multiplies few and many alike (attention_matrix.hpp).
//
//   positions  0        128       256       384       512                      1024
//   chunks     |---------|---------|---------|---------|---------| ...           |
//   partitions |                                       |                         |
//
// Chunks and partitions begin at fixed positions, whoever asks. A partition is reduced by itself, and the results of the
// partitions a token sees are merged in ascending order, whether they were computed in one piece of work or in several
// (then by whoever finishes last). Keys that a row does not see, because they come after it or have left its window, have
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
// Heads of any width lie in the cache with zeros behind their numbers, which add zeros to scores; what their values add up to
// is not stored.
//
// Per key and KV head in bf16: 2 * (key_dim + value_dim) bytes, as many FLOPs and an exponential for each row. Limiter: memory
// bandwidth for single tokens, the multiplications for prompts; with a matrix unit softmax as much as they.
#include "attention_latent.hpp"
#include "attention_matrix.hpp"

namespace qt::QT_ISA {
namespace {

// What partitions are merged into: sums [rows][value_dim], largest scores and normalizers of the rows.
struct Partial {
  float *sums, *most, *normalizer;
};

QT_INLINE Partial partial_at(float* memory, index_t rows, index_t value_dim) {
  return {memory, memory + rows * value_dim, memory + rows * (value_dim + 1)};
}

// A cache's format: how it is multiplied where it lies, and whether many rows have it widened to fp32 first.
template <class StoredNumber, class DirectForm, bool kWidenable, bool kWithScales = false>
struct Format {
  using Stored = StoredNumber;
  using Direct = DirectForm;
  using Word = typename Direct::Word;
  struct Unit {};
  static constexpr bool kWidens = kWidenable, kScaled = kWithScales, kInFours = std::is_same_v<Direct, Fours>, kOfMatrix = false;
};

#if defined(QT_AMX)
// bf16, bytes or four bits on the matrix unit.
template <class StoredNumber>
struct OfMatrix {
  using Stored = StoredNumber;
  using Word = MatrixWord;
  using Unit = MatrixUnit;
  static constexpr bool kWidens = false, kScaled = std::is_same_v<Stored, std::int8_t>, kInFours = std::is_same_v<Stored, Fours>,
                        kOfMatrix = true;
};
#endif

// Queries in register blocks of rows, one after another, each [words][rows].
template <class Form, class Element>
void take_queries(const Element* q, index_t q_stride, index_t key_dim, Group<typename Form::Word>& group) {
  const index_t num_words = words<Form>(key_dim);
  for (index_t row = 0; row < group.rows;) {
    const index_t block = block_rows(group.rows - row, kBlockRows);
    typename Form::Word* to = group.queries + row * num_words;
    for (index_t r = 0; r < block; ++r) {
      const Element* from = q + (row + r) / group.heads * q_stride + (row + r) % group.heads * key_dim;
      if constexpr (std::is_same_v<Form, Pairs>) {
        for (index_t i = 0; i < num_words; ++i) std::memcpy(to + i * block + r, from + 2 * i, 4);
      } else {
        float wide[kMaxKeyDim];
        for (index_t d = 0; d < key_dim; d += kLanes) store(wide + d, load(from + d));
        for (index_t i = 0; i < num_words; ++i) to[i * block + r] = wide[i];
      }
    }
    row += block;
  }
}

// Queries as [rows][key_dim].
template <class Element>
void take_queries_wide(const Element* q, index_t q_stride, index_t key_dim, Group<float>& group) {
  float* to = group.queries;
  for (index_t token = 0; token < group.tokens; ++token)
    for (index_t i = 0; i < group.heads * key_dim; i += kLanes, to += kLanes) store(to, load(q + token * q_stride + i));
}

// Brings a group's queries, or the place of its results, into the second-level cache: `numbers` of each of its tokens.
template <bool kWritten, class Element, class Word>
void fetch_rows(const Element* memory, index_t stride, index_t numbers, const Group<Word>& group) {
  for (index_t token = 0; token < group.tokens; ++token) {
    const Element* row = memory + (group.token + token) * stride;
    for (index_t i = 0; i < numbers; i += 64 / index_t(sizeof(Element))) __builtin_prefetch(row + i, kWritten, 2);
  }
}

// Where the tiles [begin, end) of a KV head lie.
void locate(const PagedKv& kv, const std::int32_t* blocks, index_t kv_head, index_t begin, index_t end,
            const char** keys, const char** values) {
  index_t column = begin / kv.block_tiles, inside = begin % kv.block_tiles;
  for (index_t tile = begin; tile < end; ++tile) {
    const char* at = kv.memory + blocks[column] * kv.block_bytes + kv_head * kv.head_bytes + inside * kv.tile_bytes;
    keys[tile - begin] = at;
    values[tile - begin] = at + kv.key_bytes;
    if (++inside == kv.block_tiles) inside = 0, ++column;
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

// A group begins another partition.
template <class Word>
void clear(Group<Word>& group, index_t value_dim) {
  for (index_t r = 0; r < kMaxRows; ++r) group.most[r] = kNothing;
  for (index_t r = 0; r < group.rows || r % kLanes; ++r) store(group.normalizer + r * kLanes, all(0.0f));
  for (index_t i = 0; i < group.rows * value_dim; i += kLanes) store(group.sums + i, all(0.0f));
}

// Of a chunk's tiles, those that a group sees; not more than 0: none.
template <class Word>
index_t tiles_seen(const Walk& walk, const Group<Word>& group) {
  const index_t end = (group.position + group.tokens - 1) / kTileKeys + 1;
  return (end < walk.next ? end : walk.next) - walk.tile;
}

// The factors of a tile's int4 keys, or values, widened.
const float* take_factors(const char* plane, index_t dim, float* to) {
  const fp16* from = (const fp16*)(plane + kTileKeys / 2 * dim);
  const index_t count = (dim + kFourGroup - 1) / kFourGroup * kFactorsOfGroup;
  for (index_t i = 0; i < count; i += kLanes) store(to + i, load(from + i));
  return to;
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
  if constexpr (Format::kScaled)
    for (index_t i = 0; i < chunk.count; ++i) {
      const char *scales = chunk.keys[i] + call.kv.key_bytes + call.kv.value_bytes;
      std::memcpy(scratch.key_scales + chunk.begin + i * kTileKeys, scales, 64);
      std::memcpy(scratch.value_scales + chunk.begin + i * kTileKeys, scales + (call.layer.values_in_keys ? 0 : 64), 64);
    }
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
      weigh_chunk<Direct>(scratch.weights(), group.shrink, group.rows, seen, value_dim, group.sums);
    }
  }
}

// The state at the end of a partition, with the lanes of the normalizers summed to `normalizer` [kMaxRows].
template <class Word>
Partial partial_of(Group<Word>& group, float* normalizer) {
  for (index_t r = 0; r < group.rows; r += kLanes) {
    f32v lanes[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) lanes[i] = load(group.normalizer + (r + i) * kLanes);
    store(normalizer + r, fold_each(lanes, [](f32v a, f32v b) { return a + b; }));
  }
  return {group.sums, group.most, normalizer};
}

void copy(index_t rows, index_t value_dim, Partial from, Partial to) {
  for (index_t r = 0; r < rows; ++r) to.most[r] = from.most[r], to.normalizer[r] = from.normalizer[r];
  for (index_t i = 0; i < rows * value_dim; i += kLanes) store(to.sums + i, load(from.sums + i));
}

// total = total and then `part`, the partition after it. Where a row saw nothing of one, the other's bits stay.
void merge(index_t rows, index_t value_dim, Partial part, Partial total) {
  for (index_t r = 0; r < rows; r += kLanes) {
    const index_t count = rows - r < kLanes ? rows - r : kLanes;
    const f32v mine = load(total.most + r, count), theirs = load(part.most + r, count);
    const f32v most = max(mine, theirs), less = most > all(kNothing) ? most : all(0.0f);
    const f32v keep_mine = power_of_two(mine - less), keep_theirs = power_of_two(theirs - less);
    store(total.most + r, most, count);
    const f32v normalizer = fma(load(part.normalizer + r, count), keep_theirs, load(total.normalizer + r, count) * keep_mine);
    store(total.normalizer + r, normalizer, count);
    float factors[2][kLanes];
    store(factors[0], keep_mine);
    store(factors[1], keep_theirs);
    for (index_t i = 0; i < count; ++i) {
      const f32v first = all(factors[0][i]), second = all(factors[1][i]);
      float* sums = total.sums + (r + i) * value_dim;
      const float* more = part.sums + (r + i) * value_dim;
      for (index_t d = 0; d < value_dim; d += kLanes) store(sums + d, fma(load(more + d), second, load(sums + d) * first));
    }
  }
}

// What the rows' sums are multiplied with, [kMaxRows]: the layer's scale of values over their normalizers, which their heads' sinks have joined
// (a score without a value: Xiao et al., "Efficient streaming language models with attention sinks", 2024, section 3.2).
template <class Word>
void shares_of(const AttentionCall& call, const Group<Word>& group, index_t first_head, Partial total, float* shares) {
  index_t head = 0;
  for (index_t r = 0; r < group.rows; r += kLanes) {
    const index_t count = group.rows - r < kLanes ? group.rows - r : kLanes;
    const f32v normalizer = load(total.normalizer + r, count);
    if (!call.layer.sinks) {
      store(shares + r, all(call.layer.value_scale) / normalizer);
      continue;
    }
    float sinks[kLanes] = {};
    for (index_t i = 0; i < count; ++i, head = head + 1 < group.heads ? head + 1 : 0)
      sinks[i] = call.layer.sinks[first_head + head] * kLog2E;
    const f32v most = load(total.most + r, count), sink = load(sinks), larger = max(most, sink);
    const f32v kept = power_of_two(most - larger);
    store(shares + r, kept * all(call.layer.value_scale) / fma(normalizer, kept, power_of_two(sink - larger)));
  }
}

template <class Element, class Word>
void finish(const AttentionCall& call, const Group<Word>& group, index_t first_head, Partial total) {
  const index_t width = call.layer.value_width, whole = width / kLanes * kLanes;
  alignas(64) float shares[kMaxRows];
  shares_of(call, group, first_head, total, shares);
  const float *sums = total.sums, *row_share = shares;
  for (index_t token = 0; token < group.tokens; ++token) {
    Element* out = (Element*)call.out + (group.token + token) * call.out_stride + first_head * width;
    for (index_t head = 0; head < group.heads; ++head) {
      const f32v share = all(*row_share++);
      for (index_t d = 0; d < whole; d += kLanes) store(out + d, fma(load(sums + d), share, all(0.0f)));
      if (whole < width) store(out + whole, fma(load(sums + whole), share, all(0.0f)), width - whole);
      sums += call.kv.value_dim;
      out += width;
    }
  }
}

template <class Format, class Element>
void attend_unit(const AttentionCall& call, const AttentionPiece& piece, index_t unit) {
  using Word = typename Format::Word;
  const index_t key_dim = call.kv.key_dim, value_dim = call.kv.value_dim, skipped = unit % call.kv_head_units * call.unit_heads;
  const index_t left = call.group - skipped;
  Walk walk;
  walk.kv_head = unit / call.kv_head_units;
  walk.first_head = walk.kv_head * call.group + skipped;

  // About a megabyte: too much for a thread's stack.
  struct Room {
    Group<Word> groups[kMaxGroups];
    Scratch<Word> scratch;
  };
  Room& room = *(Room*)call.scratch(sizeof(Room));
  Group<Word>(&groups)[kMaxGroups] = room.groups;
  Scratch<Word>& scratch = room.scratch;
  typename Format::Unit matrix;
  const index_t num_groups = (piece.count + call.group_tokens - 1) / call.group_tokens;
  const index_t heads = left < call.unit_heads ? left : call.unit_heads;
  const bool wide = Format::kWidens && piece.count * heads >= kWidenFrom;
  for (index_t g = 0; g < num_groups; ++g) {
    Group<Word>& group = groups[g];
    const index_t skip = g * call.group_tokens;
    group.sums = scratch.sums + skip * heads * value_dim;
    group.queries = scratch.queries + skip * heads * key_dim;
    group.total = scratch.totals + skip * heads * value_dim + 2 * g * kMaxRows;
    group.token = piece.token + skip;
    group.position = piece.position + skip;
    group.tokens = piece.count - skip < call.group_tokens ? piece.count - skip : call.group_tokens;
    group.heads = heads;
    group.rows = group.tokens * heads;
    for (index_t r = 0; r < kMaxRows; ++r) group.shrink[r] = 0;
    clear(group, value_dim);
  }
  const index_t first_number = walk.first_head * key_dim, row_numbers = heads * key_dim;
  const auto take = [&](Group<Word>& group) {
    const Element* q = (const Element*)call.q + group.token * call.q_stride + first_number;
    if constexpr (Format::kWidens)
      if (wide) take_queries_wide(q, call.q_stride, key_dim, group);
    if constexpr (Format::kOfMatrix)
      take_queries_of_matrix(q, call.q_stride, key_dim, group);
    else if (!wide)
      take_queries<typename Format::Direct>(q, call.q_stride, key_dim, group);
  };

  float normalizer[kMaxRows];
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
      take(groups[g]);
      if (g + 1 < num_groups)
        fetch_rows<false>((const Element*)call.q + first_number, call.q_stride, row_numbers, groups[g + 1]);
    }
    if ((wide || Format::kOfMatrix) && walk.next == walk.end)
      fetch_rows<true>((const Element*)call.out + walk.first_head * call.layer.value_width, call.out_stride,
                       heads * call.layer.value_width, groups[g]);
  };
  while (walk.tile < walk.end) {
    walk.after = walk.next + kChunkTiles < walk.end ? walk.next + kChunkTiles : walk.end;
    locate(call.kv, piece.blocks, walk.kv_head, walk.next, walk.after, walk.keys[1 - walk.turn], walk.values[1 - walk.turn]);
    walk_chunk<Format>(call, walk, groups, num_groups, wide, matrix, scratch, before);
    const index_t partition = walk.tile / kPartitionTiles;
    walk.tile = walk.next;
    walk.next = walk.after;
    walk.turn = 1 - walk.turn;
    if (walk.tile < walk.end && walk.tile % kPartitionTiles != 0) continue;
    for (index_t g = 0; g < num_groups; ++g) {
      Group<Word>& group = groups[g];
      const Partial part = partial_of(group, normalizer), total = partial_at(group.total, group.rows, value_dim);
      if (partials)
        copy(group.rows, value_dim, part,
             partial_at(partials + (partition - piece.all_first) * piece.partial_floats, group.rows, value_dim));
      else if (partition == piece.first)
        copy(group.rows, value_dim, part, total);
      else
        merge(group.rows, value_dim, part, total);
      clear(group, value_dim);
    }
  }
  if (partials) {  // one group
    if (__atomic_sub_fetch(piece.pending + unit, 1, __ATOMIC_ACQ_REL) != 0) return;
    const Partial total = partial_at(groups[0].total, groups[0].rows, value_dim);
    for (index_t i = 0; i < piece.all_last - piece.all_first; ++i) {
      const Partial part = partial_at(partials + i * piece.partial_floats, groups[0].rows, value_dim);
      if (i == 0)
        copy(groups[0].rows, value_dim, part, total);
      else
        merge(groups[0].rows, value_dim, part, total);
    }
  }
  for (index_t g = 0; g < num_groups; ++g)
    finish<Element>(call, groups[g], walk.first_head, partial_at(groups[g].total, groups[g].rows, value_dim));
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
using Bytes = Format<std::int8_t, Singles<std::int8_t>, true, true>;
using InFours = Format<Fours, Fours, true>;
using InEighths = Format<Eighth, Singles<Eighth>, true>;

template <class Format, class Element>
constexpr AttentionKernel kSharing = {attend<Format, Element>, kGroupRows, kMaxGroups};
#if defined(QT_AMX)
template <class Stored>
constexpr AttentionKernel kOfBf16 = {attend<OfMatrix<Stored>, bf16>, 2 * kBlock, kMaxGroups};
#endif

}  // namespace

const AttentionKernels attention = {
#if defined(QT_AMX)
    .attend = {kOfBf16<bf16>, kSharing<Format<fp16, Singles<fp16>, true>, fp16>, kSharing<Format<float, Singles<float>, true>, float>},
    .attend_bytes = {kOfBf16<std::int8_t>, kSharing<Bytes, fp16>, kSharing<Bytes, float>},
    .attend_fours = {kOfBf16<Fours>, kSharing<InFours, fp16>, kSharing<InFours, float>},
    .attend_eighths = {kOfBf16<Eighth>, kSharing<InEighths, fp16>, kSharing<InEighths, float>},
#else
    .attend = {kSharing<Format<bf16, Halves, true>, bf16>, kSharing<Format<fp16, Singles<fp16>, true>, fp16>,
               kSharing<Format<float, Singles<float>, true>, float>},
    .attend_bytes = {kSharing<Bytes, bf16>, kSharing<Bytes, fp16>, kSharing<Bytes, float>},
    .attend_fours = {kSharing<InFours, bf16>, kSharing<InFours, fp16>, kSharing<InFours, float>},
    .attend_eighths = {kSharing<InEighths, bf16>, kSharing<InEighths, fp16>, kSharing<InEighths, float>},
#endif
#if defined(__AVX512BF16__) && !defined(QT_AMX)
    .attend_in_pairs = {attend<Format<bf16, Pairs, false>, bf16>, kGroupRows, 1},  // pairs are not widened: nothing to share
#else
    .attend_in_pairs = {},
#endif
};

}  // namespace qt::QT_ISA
