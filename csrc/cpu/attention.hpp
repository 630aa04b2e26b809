// Attention over the paged cache, and the writes to it: the cache's layout and what the kernels are told.
//
// The cache of one layer is [blocks][kv_heads][block_size / 16] tiles. A tile holds 16 consecutive positions of one KV head:
//
//   bf16         keys   [head_dim / 2][16][2]    a vector of 32-bit words is a pair of dimensions of 16 keys
//                values [8][head_dim][2]         ... or a pair of keys of 16 dimensions
//   fp16, fp32   keys   [head_dim][16]
//                values [16][head_dim]
//   int8         keys and values as in fp16, a byte a number; then fp32 scales: of the 16 keys, of the 16 values
//
// so that the multiplication loads its operands as they lie, and what is read of a head is contiguous. The layout does not
// depend on the instruction set.
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
inline constexpr index_t kMaxHeadDim = 256;
inline constexpr index_t kMaxGroups = 16;       // groups that one piece of work computes, and the numbers of their queries
inline constexpr index_t kMaxNumbers = 3 * kMaxRows * kMaxHeadDim;

// The cache of one layer. Plain numbers, computed once: kernel sources share no inline functions.
struct PagedKv {
  char* memory;
  Dtype dtype;
  index_t kv_heads, head_dim;
  index_t block_tiles;  // tiles of one head in a block
  index_t plane_bytes;  // keys, or values, of a tile
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
  // [units][all_last - all_first][partial_floats]; null: this piece has them all. One group, whose rows alone have room:
  // sums [rows][head_dim], largest scores [rows], normalizers [rows]
  float* partials;
  index_t partial_floats;
  std::uint32_t* pending;      // [units]: pieces of these tokens that are not done yet
};

// A piece of work is an AttentionPiece and a unit: a KV head and up to unit_heads of its query heads.
struct AttentionCall {
  PagedKv kv;
  const void* q;
  void* out;
  index_t q_stride, out_stride;  // in numbers
  index_t group;                 // query heads of a KV head
  index_t unit_heads;            // at most these of them in one unit
  index_t kv_head_units;         // units of a KV head
  index_t group_tokens;          // tokens of a group
  bool unit_after_unit;          // all pieces of a unit first: its keys and values stay in a core's cache
  index_t window;                // 0: unlimited
  float scale, softcap;          // softcap 0: none
  const float* alibi_slopes;     // [heads]; null: none
  const AttentionPiece* pieces;
  index_t num_pieces;
  void* (*scratch)(index_t bytes);  // memory of the calling thread, valid until its next call
};

// Consecutive tokens of one row that lie in one tile.
struct KvWritePiece {
  const std::int32_t* blocks;
  index_t token, count, position;
};

struct KvWriteCall {
  PagedKv kv;
  const void *q, *k, *v;         // each token's heads side by side
  void* q_out;
  index_t q_stride, k_stride, v_stride, out_stride;  // from token to token, in numbers
  index_t heads, rotary;
  const void *q_norm, *k_norm;   // [head_dim]; null: none
  float eps;
  const void *cosines, *sines;   // see Step
  bool rope_by_token;
  const KvWritePiece* pieces;
};

struct AttentionKernel {
  void (*run)(const void* call, index_t begin, index_t end);  // null: not there
  index_t group_rows;                                         // that a group should have
  index_t most_groups;                                        // that one piece should compute, up to kMaxGroups
};

// Indexed by the activations' Dtype.
struct AttentionKernels {
  AttentionKernel attend[3];
  AttentionKernel attend_bytes[3];  // int8 cache
  AttentionKernel attend_in_pairs;  // bf16 with VDPBF16PS
};

struct KvWriteKernels {
  void (*write[3])(const void* call, index_t begin, index_t end);
  void (*write_bytes[3])(const void* call, index_t begin, index_t end);
};

QT_DECLARE_KERNELS(AttentionKernels, attention)
QT_DECLARE_KERNELS(KvWriteKernels, kv_write)

}  // namespace qt
