// Attention over the paged cache and KV writes: layout of the cache and arguments of the kernels.
//
// The cache of one layer is [blocks][kv_heads][block_size / 16] tiles. A tile holds 16 consecutive positions of one KV head:
//
//   bf16         keys   [key_dim / 2][16][2]     a vector of 32-bit words is a pair of dimensions of 16 keys
//                values [8][value_dim][2]        ... or a pair of keys of 16 dimensions
//   fp16, fp32   keys   [key_dim][16]
//                values [16][value_dim]
//   int8         keys and values as in fp16, one byte per number; then fp32 scales: of the 16 keys, of the 16 values
//   fp8          as int8 without scales: e4m3; the head has one key scale and one value scale
//   int4         keys   [key_dim / 2][16]        a byte is a pair of dimensions of a key, the lower one in its low bits; then
//                       [key_dim / 32][2][16]    fp16 factors per 32 dimensions: scales of 16 keys, and their minima
//                values [8][value_dim]           ... or a pair of keys in a dimension; then
//                       [value_dim / 32][2][16]  fp16 factors per 32 dimensions: scales of 16 values, and their minima
//
// With AttentionLayer::values_in_keys (latent attention), a value is the beginning of its key; the cache holds keys and their
// scales only.
//
// The kernels load their operands without a shuffle, and the reads of one head are contiguous. Widths that are not multiples of
// 16 are padded with zeros: key_dim and value_dim are the padded widths. The layout does not depend on the instruction set.
#pragma once

#include "dispatch.hpp"
#include "program.hpp"
#include "work.hpp"

namespace qt {

inline constexpr index_t kTileKeys = 16;
inline constexpr index_t kChunkKeys = 128;      // keys of one step of the online softmax
inline constexpr index_t kPartitionKeys = 512;  // keys that are reduced separately, then merged in order
inline constexpr index_t kPartitionTiles = kPartitionKeys / kTileKeys;
inline constexpr index_t kMaxRows = 64;         // (token, query head) pairs of a group of tokens
inline constexpr index_t kFewRows = 16;         // up to these, the kernels multiply the cache without a copy
inline constexpr index_t kMaxKeyDim = 576, kMaxValueDim = 512;
inline constexpr index_t kFourGroup = 32;       // numbers of an int4 head with one scale and one minimum; the last group may
                                                // have 16
inline constexpr index_t kMaxFourGroups = kMaxKeyDim / kFourGroup;
inline constexpr index_t kMaxGroups = 16;       // groups of tokens in one piece, and elements of their queries
inline constexpr index_t kMaxNumbers = 3 * kMaxRows * 256;
static_assert(kMaxNumbers >= kMaxRows * kMaxKeyDim && kMaxKeyDim >= kMaxValueDim);

// Attention parameters of one layer, with the layout of `quintet.executor.backends.cpu.ops.host_attention.CAttention`.
struct AttentionLayer {
  index_t heads, kv_heads;
  index_t key_width, value_width;    // unpadded widths
  index_t block_size;
  index_t window;                    // sliding window in keys, the token's own included; 0: none
  index_t chunk;                     // chunked attention: a token sees only its chunk of so many positions; 0: none
  index_t rope;                      // index in the step's rotations
  index_t rotary, rotary_first;      // number of rotated elements of a head (0: none); the first one
  index_t interleaved;               // 1: elements 2 i and 2 i + 1 are a pair; 0: i and i + rotary / 2
  const float* alibi_slopes;         // [heads]; null: none
  const float* sinks;                // [heads]; null: none
  const void *q_norm, *k_norm;       // [key_width]; null: none
  const float *key_scales, *value_scales;  // [kv_heads]: scales of an fp8 cache; null: 1
  index_t norms_after_rope;              // 1: norms after the rotation
  float scale, softcap;              // softcap 0: none
  float eps, norm_offset;            // of the norms; norm_offset is added to their weights
  float growth;                      // queries are multiplied by 1 + growth * log(1 + (position + shift) / period) if it
                                     // exceeds 1; 0: off
  int dtype, kv_dtype;
  index_t period, shift;
  index_t in_parts;                  // 1: fractional periods count; 0: full ones only
  index_t values_in_keys;            // 1: a value is the first value_width numbers of its key and is not stored
};

// Geometry of one layer's cache, computed once. Plain fields, because kernel sources share no inline functions.
struct PagedKv {
  char* memory;
  Dtype dtype;
  index_t kv_heads, key_dim, value_dim;
  index_t block_tiles;             // tiles of one head in a block
  index_t key_bytes, value_bytes;  // of a tile; value_bytes is 0 with values_in_keys
  index_t tile_bytes, head_bytes, block_bytes;
};

// Consecutive tokens of a row and the partitions [first, last) of their keys.
struct AttentionPiece {
  const std::int32_t* blocks;  // block table of the row
  index_t token;               // index of the first token in the step
  index_t count;
  index_t position;            // of the first token
  index_t first, last;
  index_t all_first, all_last; // partitions of all pieces of these tokens
  // Partial results [units][parts of values][all_last - all_first][partial_floats]; null: the piece has all partitions. Each
  // entry holds, for one group of tokens after another, sums [rows][numbers of a part], largest scores [rows], normalizers
  // [rows].
  float* partials;
  index_t partial_floats;
  std::uint32_t* pending;      // [units][parts of values]: unfinished pieces of these tokens; null: another work merges
  // Scores computed by a separate work: [units][chunks from all_first's first on][rows][kChunkKeys]. unit_scores, chunk_scores:
  // floats of a unit and of a chunk.
  float* scores;
  index_t unit_scores, chunk_scores;
};

// A piece of the scores work, with a unit: the tokens of pieces[piece] and the keys of tiles [tile, end).
struct ScorePiece {
  index_t piece, tile, end;
};

// Arguments of attention. A piece of work is an AttentionPiece and a unit: a KV head and up to unit_heads of its query heads.
// If scores are a separate work, its successor has pieces of values: part_dim numbers of each value.
struct AttentionCall {
  PagedKv kv;
  AttentionLayer layer;
  const void* q;                 // heads of key_dim numbers
  void* out;                     // heads of value_width numbers
  index_t q_stride, out_stride;  // in elements
  index_t group;                 // query heads of a KV head
  index_t unit_heads;            // most query heads of a unit
  index_t kv_head_units;         // units of a KV head
  index_t group_tokens;          // tokens of a group of tokens
  bool unit_after_unit;          // order of pieces: unit by unit, so that a unit's keys and values stay in a core's cache
  const AttentionPiece* pieces;
  index_t num_pieces;
  const ScorePiece* score_pieces;
  index_t part_dim;              // numbers of a value in one part; all, if there is one work
  void* (*scratch)(index_t bytes);  // memory of the calling thread, valid until its next call
};

// Consecutive tokens of one row in one tile.
struct KvWritePiece {
  const std::int32_t* blocks;
  index_t token, count, position;
};

struct KvWriteCall {
  PagedKv kv;
  AttentionLayer layer;
  index_t sharers, sharer;       // see KvPlace: this process writes its own blocks only
  const void *q, *k, *v;         // heads of each token side by side
  void* q_out;                   // heads of key_dim numbers
  index_t q_stride, k_stride, v_stride, out_stride;  // elements between tokens
  Rotation rotation;
  const KvWritePiece* pieces;
};

struct AttentionKernel {
  void (*run)(const void* call, index_t begin, index_t end);  // null: not available
  // Two separate works, for pieces of few rows (kFewRows) without values_in_keys: scores, then values.
  void (*scores)(const void* call, index_t begin, index_t end);
  void (*values)(const void* call, index_t begin, index_t end);
  index_t group_rows;                                         // preferred rows of a group of tokens
  index_t most_groups;                                        // preferred groups of a piece, up to kMaxGroups
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

// Returns the first position that a token sees. Inlined everywhere: kernels of several instruction sets include it.
static inline __attribute__((always_inline)) index_t seen_from(index_t window, index_t chunk, index_t position) {
  if (chunk) return position - position % chunk;
  return window && position >= window ? position + 1 - window : 0;
}

QT_DECLARE_KERNELS(AttentionKernels, attention)
QT_DECLARE_KERNELS(KvWriteKernels, kv_write)

}  // namespace qt
