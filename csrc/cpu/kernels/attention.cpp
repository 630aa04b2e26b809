// Causal attention over the paged cache, for single new tokens and for chunks of a prompt alike.
//
// A piece of work is some consecutive tokens of one row with a KV head and its group of query heads: up to 64 (token, head)
// rows that share every load of the cache. It walks the keys in chunks of 128: scores, the online softmax (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018), weighted sum of the values.
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
// where the processor's pairs of bf16 are faster than fp32 (attend_in_pairs), weights are rounded to bf16 for the
// multiplication with the values, and it is the rounded ones that the normalizer sums: a true average of the values.
//
// Per key and KV head in bf16: 4 * head_dim bytes, 4 * head_dim FLOPs and an exponential for each row. Limiter: memory
// bandwidth for single tokens, the multiplications for prompts.
#include "attention_softmax.hpp"

namespace qt::QT_ISA {
namespace {

// What partitions are merged into: sums [rows][head_dim], largest scores and normalizers of the rows.
struct Partial {
  float *sums, *most, *normalizer;
};

QT_INLINE Partial partial_at(float* memory, index_t head_dim) {
  return {memory, memory + kMaxRows * head_dim, memory + kMaxRows * (head_dim + 1)};
}

template <class Form, class Element>
void take_queries(const AttentionCall& call, const AttentionPiece& piece, index_t first_head,
                  Rows<typename Form::Word>& rows) {
  const index_t head_dim = call.kv.head_dim, num_words = words<Form>(head_dim);
  const Element* q = (const Element*)call.q + piece.token * call.q_stride + first_head * head_dim;
  for (index_t row = 0; row < rows.count;) {
    const index_t block = block_rows(rows.count - row);
    typename Form::Word* to = rows.queries + row * num_words;
    for (index_t r = 0; r < block; ++r) {
      const Element* from = q + (row + r) / rows.heads * call.q_stride + (row + r) % rows.heads * head_dim;
      if constexpr (std::is_same_v<Form, Pairs>) {
        for (index_t i = 0; i < num_words; ++i) std::memcpy(to + i * block + r, from + 2 * i, 4);
      } else {
        float wide[kMaxHeadDim];
        for (index_t d = 0; d < head_dim; d += kLanes) store(wide + d, load(from + d));
        for (index_t i = 0; i < num_words; ++i) to[i * block + r] = wide[i];
      }
    }
    row += block;
  }
}

// Where the tiles [begin, end) of a KV head lie.
void locate(const PagedKv& kv, const std::int32_t* blocks, index_t kv_head, index_t begin, index_t end,
            const char** keys, const char** values) {
  index_t column = begin / kv.block_tiles, inside = begin % kv.block_tiles;
  for (index_t tile = begin; tile < end; ++tile) {
    const char* at = kv.memory + blocks[column] * kv.block_bytes + kv_head * kv.head_bytes + inside * kv.tile_bytes;
    keys[tile - begin] = at;
    values[tile - begin] = at + kv.plane_bytes;
    if (++inside == kv.block_tiles) inside = 0, ++column;
  }
}

// The keys that some token of the piece sees: [begin, end).
QT_INLINE index_t seen_from(const AttentionCall& call, index_t position) {
  return call.window && position >= call.window ? position + 1 - call.window : 0;
}

// A cache's format: how it is multiplied where it lies (Direct) and how after it was widened (Wide).
template <class DirectForm, class WideForm>
struct Format {
  using Direct = DirectForm;
  using Wide = WideForm;
  using Word = typename Direct::Word;
};

// Of a chunk's tiles, how many of keys and of values are brought closer during the softmax.
constexpr index_t kSoftmaxTiles = 2;

// Rows from which on widening a chunk once costs less than widening it for each register block of rows.
constexpr index_t kWidenFrom = 2 * kBlockRows + 1;

// Widens the keys or the values of a chunk; returns where its tiles are then.
template <class Form>
void widen(const char* (&planes)[kChunkTiles], index_t count, index_t head_dim, index_t columns, float* memory) {
  for (index_t i = 0; i < count; ++i) {
    float* to = memory + i * kTileKeys * head_dim;
    if constexpr (!std::is_same_v<Form, Pairs>) widen_plane<Form>(planes[i], head_dim, columns, to);
    planes[i] = (const char*)to;
  }
}

template <class Format>
void walk_partition(const AttentionCall& call, const AttentionPiece& piece, index_t kv_head, index_t first_head,
                    index_t partition, Rows<typename Format::Word>& rows) {
  using Direct = typename Format::Direct;
  using Wide = typename Format::Wide;
  const index_t head_dim = call.kv.head_dim, last_position = piece.position + piece.count - 1;
  for (index_t r = 0; r < kMaxRows; ++r) rows.most[r] = kNothing;
  for (index_t r = 0; r < rows.count; ++r) store(rows.normalizer + r * kLanes, all(0.0f));
  for (index_t i = 0; i < rows.count * head_dim; i += kLanes) store(rows.sums + i, all(0.0f));

  const index_t begin_seen = seen_from(call, piece.position), end_seen = last_position + 1;
  const index_t from = partition * kPartitionKeys, to = from + kPartitionKeys;
  const index_t begin = (begin_seen > from ? begin_seen : from) / kTileKeys, end_key = end_seen < to ? end_seen : to;
  const index_t end = (end_key + kTileKeys - 1) / kTileKeys;  // tiles [begin, end)
  const bool bytes = call.kv.dtype == Dtype::int8;

  const char *keys[2][kChunkTiles], *values[2][kChunkTiles];
  int turn = 0;
  index_t tile = begin, next = (begin / kChunkTiles + 1) * kChunkTiles;
  if (next > end) next = end;
  locate(call.kv, piece.blocks, kv_head, tile, next, keys[turn], values[turn]);
  while (tile < end) {
    Chunk chunk;
    chunk.begin = tile % kChunkTiles * kTileKeys;
    chunk.count = next - tile;
    const index_t after = next + kChunkTiles < end ? next + kChunkTiles : end;
    locate(call.kv, piece.blocks, kv_head, next, after, keys[1 - turn], values[1 - turn]);
    Prefetch prefetch;
    for (index_t i = 0; i < chunk.count; ++i) {
      chunk.keys[i] = keys[turn][i];
      chunk.values[i] = values[turn][i];
      const bool during_softmax = i >= chunk.count - kSoftmaxTiles;
      chunk.beside_keys[i] = during_softmax ? chunk.keys[i] : chunk.values[i];
      if (during_softmax) prefetch.add(chunk.values[i], call.kv.plane_bytes);
      chunk.beside_values[i] = i < kSoftmaxTiles || i >= after - next ? chunk.values[i] : keys[1 - turn][i];
      if (bytes) {
        std::memcpy(rows.key_scales + chunk.begin + i * kTileKeys, chunk.values[i] + call.kv.plane_bytes, 64);
        std::memcpy(rows.value_scales + chunk.begin + i * kTileKeys, chunk.values[i] + call.kv.plane_bytes + 64, 64);
      }
    }
    for (index_t i = 0; i < kSoftmaxTiles && i < after - next; ++i) prefetch.add(keys[1 - turn][i], call.kv.plane_bytes);
    const Adjustment adjustment{
        .scaled = bytes,
        .biased = call.softcap > 0 || call.alibi_slopes != nullptr,
        .masked = next * kTileKeys > piece.position + 1 || tile * kTileKeys < seen_from(call, last_position),
    };
    const index_t first = tile / kChunkTiles * kChunkKeys;
    const bool widens = !std::is_same_v<Direct, Wide> && rows.count >= kWidenFrom;
    alignas(64) float memory[kChunkKeys * kMaxHeadDim];
    Chunk widened = chunk;
    if (widens) {
      widen<Direct>(widened.keys, chunk.count, head_dim, kTileKeys, memory);
      score_chunk<Wide>(rows.queries, rows.count, head_dim, widened, rows.scores);
    } else {
      score_chunk<Direct>(rows.queries, rows.count, head_dim, chunk, rows.scores);
    }
    soften(call, piece, first_head, chunk, first, adjustment, prefetch, rows);
    if (widens) {
      widen<Direct>(widened.values, chunk.count, head_dim, head_dim, memory);
      for (index_t i = 0; i < chunk.count; ++i) widened.beside_values[i] = widened.values[i];
      weigh_chunk<Wide>(rows.weights, rows.shrink, rows.count, widened, head_dim, rows.sums);
    } else {
      weigh_chunk<Direct>(rows.weights, rows.shrink, rows.count, chunk, head_dim, rows.sums);
    }
    tile = next;
    next = after;
    turn = 1 - turn;
  }
}

// The state at the end of a partition, lanes of the normalizers summed.
template <class Word>
void keep(const Rows<Word>& rows, index_t head_dim, Partial to) {
  for (index_t r = 0; r < rows.count; ++r) {
    to.most[r] = rows.most[r];
    to.normalizer[r] = sum_of(load(rows.normalizer + r * kLanes));
  }
  for (index_t i = 0; i < rows.count * head_dim; i += kLanes) store(to.sums + i, load(rows.sums + i));
}

// total = total and then `part`, the partition after it. Where a row saw nothing of one, the other's bits stay.
void merge(index_t rows, index_t head_dim, Partial part, Partial total) {
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
      float* sums = total.sums + (r + i) * head_dim;
      const float* more = part.sums + (r + i) * head_dim;
      for (index_t d = 0; d < head_dim; d += kLanes) store(sums + d, fma(load(more + d), second, load(sums + d) * first));
    }
  }
}

template <class Element>
void finish(const AttentionCall& call, const AttentionPiece& piece, index_t first_head, index_t heads, index_t rows,
            Partial total) {
  const index_t head_dim = call.kv.head_dim;
  for (index_t r = 0; r < rows; ++r) {
    const f32v share = all(1.0f / total.normalizer[r]);
    Element* out = (Element*)call.out + (piece.token + r / heads) * call.out_stride + (first_head + r % heads) * head_dim;
    const float* sums = total.sums + r * head_dim;
    for (index_t d = 0; d < head_dim; d += kLanes) store(out + d, fma(load(sums + d), share, all(0.0f)));
  }
}

template <class Format, class Element>
void attend_unit(const AttentionCall& call, const AttentionPiece& piece, index_t unit) {
  const index_t head_dim = call.kv.head_dim, kv_head = unit / call.kv_head_units;
  const index_t skipped = unit % call.kv_head_units * call.unit_heads, left = call.group - skipped;
  const index_t first_head = kv_head * call.group + skipped;
  Rows<typename Format::Word> rows;
  rows.heads = left < call.unit_heads ? left : call.unit_heads;
  rows.count = piece.count * rows.heads;
  for (index_t r = 0; r < kMaxRows; ++r) rows.shrink[r] = 0;
  take_queries<typename Format::Direct, Element>(call, piece, first_head, rows);

  alignas(64) float memory[kMaxRows * (kMaxHeadDim + 2)];
  const Partial total = partial_at(memory, head_dim);
  if (!piece.partials) {
    for (index_t partition = piece.first; partition < piece.last; ++partition) {
      walk_partition<Format>(call, piece, kv_head, first_head, partition, rows);
      if (partition == piece.first) {
        keep(rows, head_dim, total);
      } else {
        alignas(64) float more[kMaxRows * (kMaxHeadDim + 2)];
        const Partial part = partial_at(more, head_dim);
        keep(rows, head_dim, part);
        merge(rows.count, head_dim, part, total);
      }
    }
  } else {
    const index_t partitions = piece.all_last - piece.all_first;
    float* partials = piece.partials + unit * partitions * call.partial_floats;
    for (index_t partition = piece.first; partition < piece.last; ++partition) {
      walk_partition<Format>(call, piece, kv_head, first_head, partition, rows);
      keep(rows, head_dim, partial_at(partials + (partition - piece.all_first) * call.partial_floats, head_dim));
    }
    if (__atomic_sub_fetch(piece.pending + unit, 1, __ATOMIC_ACQ_REL) != 0) return;
    for (index_t i = 0; i < partitions; ++i) {
      const Partial part = partial_at(partials + i * call.partial_floats, head_dim);
      if (i == 0) {
        for (index_t r = 0; r < rows.count; ++r) total.most[r] = part.most[r], total.normalizer[r] = part.normalizer[r];
        for (index_t k = 0; k < rows.count * head_dim; k += kLanes) store(total.sums + k, load(part.sums + k));
      } else {
        merge(rows.count, head_dim, part, total);
      }
    }
  }
  finish<Element>(call, piece, first_head, rows.heads, rows.count, total);
}

template <class Format, class Element>
void attend(const void* description, index_t begin, index_t end) {
  const AttentionCall& call = *(const AttentionCall*)description;
  const index_t units = call.kv.kv_heads * call.kv_head_units;
  for (index_t i = begin; i < end; ++i) attend_unit<Format, Element>(call, call.pieces[i / units], i % units);
}

template <class Stored>
using Widened = Format<Singles<Stored>, Singles<float>>;
using WidenedPairs = Format<Halves, Singles<float>>;

}  // namespace

const AttentionKernels attention = {
    .attend = {attend<WidenedPairs, bf16>, attend<Widened<fp16>, fp16>, attend<Widened<float>, float>},
    .attend_bytes = {attend<Widened<std::int8_t>, bf16>, attend<Widened<std::int8_t>, fp16>,
                     attend<Widened<std::int8_t>, float>},
#if defined(__AVX512BF16__)
    .attend_in_pairs = attend<Format<Pairs, Pairs>, bf16>,
#else
    .attend_in_pairs = nullptr,
#endif
};

}  // namespace qt::QT_ISA
