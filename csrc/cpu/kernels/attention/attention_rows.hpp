// Setup shared by all attention kernels: formats of rows and cache, query layouts, tile addresses and the buffers of a thread.
#pragma once

#include "attention_latent.hpp"
#include "attention_matrix.hpp"

namespace qt::QT_ISA {
namespace {

// A cache format: how stored numbers are multiplied directly, and whether many rows widen a chunk to fp32 first.
template <class StoredNumber, class DirectForm, bool kWidenable, bool kWithScales = false>
struct Format {
  using Stored = StoredNumber;
  using Direct = DirectForm;
  using Word = typename Direct::Word;
  struct Unit {};
  static constexpr bool kWidens = kWidenable, kScaled = kWithScales, kInFours = std::is_same_v<Direct, Fours>, kOfMatrix = false;
};

#if defined(QT_AMX)
// bf16, int8 or int4 on AMX.
template <class StoredNumber>
struct OfMatrix {
  using Stored = StoredNumber;
  using Word = MatrixWord;
  using Unit = MatrixUnit;
  static constexpr bool kWidens = false, kScaled = std::is_same_v<Stored, std::int8_t>, kInFours = std::is_same_v<Stored, Fours>,
                        kOfMatrix = true;
};
#endif

using Bytes = Format<std::int8_t, Singles<std::int8_t>, true, true>;
using InFours = Format<Fours, Fours, true>;
using InEighths = Format<Eighth, Singles<Eighth>, true>;

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

// Addresses of the tiles [begin, end) of a KV head.
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

// Resets a group's state at the start of a partition.
template <class Word>
void clear(Group<Word>& group, index_t value_dim) {
  for (index_t r = 0; r < kMaxRows; ++r) group.most[r] = kNothing;
  for (index_t r = 0; r < group.rows || r % kLanes; ++r) store(group.normalizer + r * kLanes, all(0.0f));
  for (index_t i = 0; i < group.rows * value_dim; i += kLanes) store(group.sums + i, all(0.0f));
}

// Scales and minima of a tile's int4 keys or values, widened to fp32.
const float* take_factors(const char* plane, index_t dim, float* to) {
  const fp16* from = (const fp16*)(plane + kTileKeys / 2 * dim);
  const index_t count = (dim + kFourGroup - 1) / kFourGroup * kFactorsOfGroup;
  for (index_t i = 0; i < count; i += kLanes) store(to + i, load(from + i));
  return to;
}

// Copies the int8 scales of a chunk's tiles to scratch.
template <class Word>
void take_scales(const AttentionCall& call, const Chunk& chunk, Scratch<Word>& scratch) {
  for (index_t i = 0; i < chunk.count; ++i) {
    const char* scales = chunk.keys[i] + call.kv.key_bytes + call.kv.value_bytes;
    std::memcpy(scratch.key_scales + chunk.begin + i * kTileKeys, scales, 64);
    std::memcpy(scratch.value_scales + chunk.begin + i * kTileKeys, scales + (call.layer.values_in_keys ? 0 : 64), 64);
  }
}

// Buffers of a thread: about a megabyte, too much for its stack.
template <class Word>
struct Room {
  Group<Word> groups[kMaxGroups];
  Scratch<Word> scratch;
};

// Query heads of a unit.
struct Heads {
  index_t kv_head, first, count;
};

QT_INLINE Heads heads_of(const AttentionCall& call, index_t unit) {
  const index_t skipped = unit % call.kv_head_units * call.unit_heads, left = call.group - skipped;
  const index_t kv_head = unit / call.kv_head_units;
  return {kv_head, kv_head * call.group + skipped, left < call.unit_heads ? left : call.unit_heads};
}

// Initializes group g of a piece with buffers for `value_dim` value dimensions.
template <class Word>
void begin_group(const AttentionCall& call, const AttentionPiece& piece, Heads heads, index_t g, index_t value_dim,
                 Room<Word>& room) {
  Group<Word>& group = room.groups[g];
  const index_t skip = g * call.group_tokens;
  group.sums = room.scratch.sums + skip * heads.count * value_dim;
  group.queries = room.scratch.queries + skip * heads.count * call.kv.key_dim;
  group.total = room.scratch.totals + skip * heads.count * value_dim + 2 * g * kMaxRows;
  group.token = piece.token + skip;
  group.position = piece.position + skip;
  group.tokens = piece.count - skip < call.group_tokens ? piece.count - skip : call.group_tokens;
  group.heads = heads.count;
  group.rows = group.tokens * heads.count;
  group.first_row = skip * heads.count;
  for (index_t r = 0; r < kMaxRows; ++r) group.shrink[r] = 0;
  clear(group, value_dim);
}

// Loads a group's queries in the layout of its kernel. wide: the layout of attention_wide.hpp.
template <class Format, class Element>
void take_queries_of(const AttentionCall& call, index_t first_head, bool wide, Group<typename Format::Word>& group) {
  const index_t key_dim = call.kv.key_dim;
  const Element* q = (const Element*)call.q + group.token * call.q_stride + first_head * key_dim;
  if constexpr (Format::kWidens)
    if (wide) take_queries_wide(q, call.q_stride, key_dim, group);
  if constexpr (Format::kOfMatrix)
    take_queries_of_matrix(q, call.q_stride, key_dim, group);
  else if (!wide)
    take_queries<typename Format::Direct>(q, call.q_stride, key_dim, group);
}

}  // namespace
}  // namespace qt::QT_ISA
