// Attention over the paged cache, and the writes to it: the cache's layout and the kernels' arguments.
//
// The cache of one layer is [blocks][kv_heads][block_size / 16] tiles. A tile holds 16 consecutive positions of one KV head:
//
//   bf16         keys   [key_dim / 2][16][2]     a vector of 32-bit words is a pair of dimensions of 16 keys
//                values [8][value_dim][2]        ... or a pair of keys of 16 dimensions
//   fp16, fp32   keys   [key_dim][16]
//                values [16][value_dim]
//   int8         keys and values as in fp16, a byte a number; then fp32 scales: of the 16 keys, of the 16 values
//   fp8          the same without scales: e4m3, of what the head's two scales divide
//   int4         keys   [key_dim / 2][16]        a byte is a pair of dimensions of a key, the lower one in its low bits; then
//                       [key_dim / 32][2][16]    fp16 factors of each 32 dimensions: scales of 16 keys, and their least numbers
//                values [8][value_dim]           ... or a pair of keys in a dimension; then
//                       [value_dim / 32][2][16]  fp16 factors of each 32 dimensions: scales of 16 values, and their least numbers
//
// Where values are what keys begin with (AttentionLayer::values_in_keys: latent attention) there are keys and their scales alone.
//
// so that the multiplication loads its operands as they lie, and what is read of a head is contiguous. Heads of other widths
// than multiples of 16 have zeros after their numbers: key_dim and value_dim are what a head takes with them. The layout does
// not depend on the instruction set.
#pragma once

#include "dispatch.hpp"
#include "program.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kTileKeys = 16;
inline constexpr index_t kChunkKeys = 128;      // keys of one turn of the online softmax
inline constexpr index_t kPartitionKeys = 512;  // keys that are reduced apart from others, then merged in order
inline constexpr index_t kPartitionTiles = kPartitionKeys / kTileKeys;
inline constexpr index_t kMaxRows = 64;         // (token, query head) pairs of a group
inline constexpr index_t kFewRows = 16;         // up to these, the cache is multiplied as it lies
inline constexpr index_t kMaxKeyDim = 576, kMaxValueDim = 512;
inline constexpr index_t kFourGroup = 32;       // numbers of an int4 head that share a scale and a least number; the last may be 16
inline constexpr index_t kMaxFourGroups = kMaxKeyDim / kFourGroup;
inline constexpr index_t kMaxGroups = 16;       // groups that one piece of work computes, and the numbers of their queries
inline constexpr index_t kMaxNumbers = 3 * kMaxRows * 256;
static_assert(kMaxNumbers >= kMaxRows * kMaxKeyDim && kMaxKeyDim >= kMaxValueDim);

// Attention of one layer, laid out like `quintet.executor.backends.cpu.ops.host_attention.CAttention`.
struct AttentionLayer {
  index_t heads, kv_heads;
  index_t key_width, value_width;    // numbers of a head
  index_t block_size;
  index_t window;                    // keys a token sees, its own included; 0: all
  index_t chunk;                     // a token sees its own chunk of so many positions only; 0: all
  index_t rope;                      // which of the step's rotations
  index_t rotary, rotary_first;      // how many numbers of a head are rotated, from which on; 0: none
  index_t interleaved;               // 1: numbers 2 i and 2 i + 1 are a pair; 0: i and i + rotary / 2
  const float* alibi_slopes;         // [heads]; null: none
  const float* sinks;                // [heads]; null: none
  const void *q_norm, *k_norm;       // [key_width]; null: none
  const float *key_scales, *value_scales;  // [kv_heads]: what an fp8 cache's numbers are multiplied with; null: 1
  index_t norms_after_rope;              // 1: they follow the rotation
  float scale, softcap;              // softcap 0: none
  float eps, norm_offset;            // of the norms: what is added to their weights
  float growth;                      // queries are multiplied by 1 + growth * log(1 + (position + shift) / period), if more than 1; 0: not
  int dtype, kv_dtype;
  index_t period, shift;
  index_t in_parts;                  // 1: parts of periods count; 0: whole ones only
  index_t values_in_keys;            // 1: a value is the first value_width numbers of its key, and not stored
};

// The cache of one layer. Plain numbers, computed once: kernel sources share no inline functions.
struct PagedKv {
  char* memory;
  Dtype dtype;
  index_t kv_heads, key_dim, value_dim;
  index_t block_tiles;             // tiles of one head in a block
  index_t key_bytes, value_bytes;  // of a tile; value_bytes 0: values_in_keys
  index_t tile_bytes, head_bytes, block_bytes;
};

// Some consecutive tokens of a row over the partitions [first, last) of what they see.
struct AttentionPiece {
  const std::int32_t* blocks;  // the row's
  index_t token;               // first one's index in the step
  index_t count;
  index_t position;            // first one's
  index_t first, last;
  index_t all_first, all_last; // the partitions of all pieces of these tokens
  // [units][parts of values][all_last - all_first][partial_floats]; null: this piece has them all. One group; only its rows
  // have room: sums [rows][numbers of a part], largest scores [rows], normalizers [rows]
  float* partials;
  index_t partial_floats;
  std::uint32_t* pending;      // [units][parts of values]: pieces of these tokens that are not done yet; null: others merge
  // Where scores are a work of their own: [units][chunks from all_first's first on][rows][kChunkKeys], so many floats of a
  // unit and of a chunk.
  float* scores;
  index_t unit_scores, chunk_scores;
};

// A piece of work of scores, with a unit: of the tokens of pieces[piece] and the keys of tiles [tile, end).
struct ScorePiece {
  index_t piece, tile, end;
};

// A piece of work is an AttentionPiece and a unit: a KV head and up to unit_heads of its query heads. Where scores are a work of
// their own, what follows them are pieces of values: with so many numbers of a value each.
struct AttentionCall {
  PagedKv kv;
  AttentionLayer layer;
  const void* q;                 // heads of key_dim numbers
  void* out;                     // heads of value_width numbers
  index_t q_stride, out_stride;  // in numbers
  index_t group;                 // query heads of a KV head
  index_t unit_heads;            // at most these of them in one unit
  index_t kv_head_units;         // units of a KV head
  index_t group_tokens;          // tokens of a group
  bool unit_after_unit;          // all pieces of a unit first: its keys and values stay in a core's cache
  const AttentionPiece* pieces;
  index_t num_pieces;
  const ScorePiece* score_pieces;
  index_t part_dim;              // numbers of a part of values; of one whole work, all
  void* (*scratch)(index_t bytes);  // memory of the calling thread, valid until its next call
};

// Consecutive tokens of one row that lie in one tile.
struct KvWritePiece {
  const std::int32_t* blocks;
  index_t token, count, position;
};

struct KvWriteCall {
  PagedKv kv;
  AttentionLayer layer;
  index_t sharers, sharer;       // see KvPlace: keys and values of other blocks than its own this process leaves to others
  const void *q, *k, *v;         // each token's heads side by side
  void* q_out;                   // heads of key_dim numbers
  index_t q_stride, k_stride, v_stride, out_stride;  // from token to token, in numbers
  Rotation rotation;
  const KvWritePiece* pieces;
};

struct AttentionKernel {
  void (*run)(const void* call, index_t begin, index_t end);  // null: not there
  // In two works, of few rows (kFewRows) with values that are not in keys: pieces of scores, then of values.
  void (*scores)(const void* call, index_t begin, index_t end);
  void (*values)(const void* call, index_t begin, index_t end);
  index_t group_rows;                                         // that a group should have
  index_t most_groups;                                        // that one piece should compute, up to kMaxGroups
};

// Indexed by the activations' Dtype.
struct AttentionKernels {
  AttentionKernel attend[3];
  AttentionKernel attend_bytes[3];  // int8 cache
  AttentionKernel attend_fours[3];  // int4 cache
  AttentionKernel attend_eighths[3];  // fp8 cache
  AttentionKernel attend_in_pairs;  // bf16 with VDPBF16PS
};

struct KvWriteKernels {
  void (*write[3])(const void* call, index_t begin, index_t end);
  void (*write_bytes[3])(const void* call, index_t begin, index_t end);
  void (*write_fours[3])(const void* call, index_t begin, index_t end);
  void (*write_eighths[3])(const void* call, index_t begin, index_t end);
};

// The first position that a token sees. Inlined everywhere: kernels of several instruction sets include it.
static inline __attribute__((always_inline)) index_t seen_from(index_t window, index_t chunk, index_t position) {
  if (chunk) return position - position % chunk;
  return window && position >= window ? position + 1 - window : 0;
}

QT_DECLARE_KERNELS(AttentionKernels, attention)
QT_DECLARE_KERNELS(KvWriteKernels, kv_write)

}  // namespace qt
