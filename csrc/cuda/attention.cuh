// What the attention kernels share: how a step's rows are cut into pieces of work, which positions a query sees, and the
// arithmetic by which parts of a softmax are put together. The kernels: attention_plan.cu (once per step),
// attention_decode.cu and attention_chunk.cu (matrix instructions), attention_plain.cu.
//
// Words. A ROW is a request in this step: `count` new tokens after `start` cached ones. A LINE is one (new token, query
// head) pair of one KV head; a row has count * group lines per KV head, line = token * group + head within the group, so
// that grouped queries (Ainslie et al., "GQA", 2023) share every load of a key. A PATCH is up to PATCH consecutive lines
// that one block computes together. A TILE is 64 positions of the cache. A SPLIT is a range of whole tiles at fixed
// places, split s being positions [s * size, (s + 1) * size) for every row.
//
//   positions   0                size              2 size            3 size
//   tiles       |----|----|----|----|----|----|----|----|----|----|
//   splits      |       0         |        1       |        2
//   a row       |------------ start ------------->|-- count --|
//
// A PIECE of work is (row, patch, KV head, split), or (row, patch, KV head) over all positions where the row is not
// split. The order of all roundings of one line: tiles ascending within a split by the online softmax (Milakov and
// Gimelshein, 2018; Dao et al., "FlashAttention-2", 2023), splits ascending by `Fold`. A tile or split that a line does
// not see leaves its numbers untouched, exactly. So when the split size is fixed, a line's bits do not depend on the
// chunk it came in, on its patch, on which of the two kernels computed it or on what else is in the step: whether splits
// are computed one after the other by one block or at the same time by many, the same two numbers meet in `Fold`. In the
// second case parts lie in the workspace, and the block that stores the last one of a patch puts them together.
#pragma once
#include "device.cuh"

#include "attention_softmax.cuh"

namespace quintet {

constexpr int TILE = 64;
constexpr int DECODE_PATCH = 16;

// The plan of one step for one sight and one kernel, as attention_plan.cu leaves it: a table of ints.
struct Plan {
  int* table;
  int max_rows;
  __device__ __forceinline__ int split_size() const { return table[0]; }
  __device__ __forceinline__ int num_pieces() const { return table[1]; }
  // Pieces taken so far beyond the first of each block, and blocks that found no more: 0 between launches.
  __device__ __forceinline__ int* taken() const { return table + 2; }
  __device__ __forceinline__ int* finished() const { return table + 3; }
  // prefix()[row]: pieces of the rows before it; one entry more than rows.
  __device__ __forceinline__ int* prefix() const { return table + 4; }
  // parts()[row]: splits that are pieces of their own; 1: a piece walks all positions.
  __device__ __forceinline__ int* parts() const { return table + 4 + max_rows + 1; }
  // base()[row]: the row's first patch in the workspace, if it has several parts.
  __device__ __forceinline__ int* base() const { return table + 4 + 2 * max_rows + 1; }
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// Rows with lines that fit one patch of the decode kernel are its work, all others the chunk kernel's.
__device__ __forceinline__ bool is_decode(int count, int group) { return count * group <= DECODE_PATCH; }

// Positions [begin, end) that some line sees, of the tokens [first, last] counted from the row's first new one.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range seen_by(int start, int first, int last, const Sight& sight) {
  return {sight.first(start + first), start + last + 1};
}

// Division of the work: the arguments that the kernels with matrix instructions have in common.
struct Attention {
  unsigned char* out;
  const unsigned char* q;
  const unsigned char* kv;
  const int *slots, *starts, *counts, *offsets, *block_table;
  float *part_sums, *part_stats, *totals;
  int* tickets;  // a patch's parts that are stored, at its first part's slot: 0 between launches
  const float *alibi, *sinks;
  int num_rows, num_tokens, num_heads, num_kv_heads, head_dim, block_size, max_blocks, q_stride;
  Sight sight;
  int split_tiles, stages;
  long long plane;         // numbers from a key to its value
  long long block_stride;  // numbers from a block's first key to the next block's
  Plan plan;
  Scores scores;
  float value_scale;       // of all numbers of all values
  int group;
};

#define QT_ATTENTION_PARAMETERS                                                                                       \
  void *out, const void *q, const void *kv, const int *slots, const int *starts, const int *counts,                   \
      const int *offsets, const int *block_table, int *plan, float *part_sums, float *part_stats, float *totals,      \
      int *tickets, const float *alibi, const float *sinks, int num_rows, int num_tokens, int max_rows,               \
      int num_heads, int num_kv_heads, int head_dim, int block_size, int max_blocks, int q_stride, int window,        \
      int chunk, int split_tiles, int stages, long long plane, long long block_stride, float scale, float soft_cap,\
      float value_scale

#define QT_ATTENTION_ARGUMENTS                                                                                        \
  quintet::Attention {                                                                                                \
    (unsigned char*)out, (const unsigned char*)q, (const unsigned char*)kv, slots, starts, counts, offsets,           \
        block_table, part_sums, part_stats, totals, tickets, alibi, sinks, num_rows, num_tokens, num_heads,           \
        num_kv_heads, head_dim, block_size, max_blocks, q_stride, quintet::Sight{window, chunk}, split_tiles, stages, \
        plane, block_stride,                                                                                          \
        quintet::Plan{plan, max_rows},                                                                                \
        quintet::Scores{scale, soft_cap, soft_cap == 0.0f && alibi == nullptr}, value_scale, num_heads / num_kv_heads              \
  }

// One piece of work. Empty: its split lies where its patch sees nothing.
struct Piece {
  int head;         // KV head
  int token;        // the row's first token among the step's
  int start;        // its position
  int first_line;   // of the patch
  int num_lines;    // of the patch, at most PATCH
  int begin, end;   // positions
  int slot;         // patch of the workspace; -1: the result is final
  int first_slot;   // of the patch's parts, which lie num_kv_heads apart
  int num_parts;    // of the patch
  const int* blocks;
  // position / block_size is the upper word of position * this, for blocks of 2 and more and position * block_size up to 2^32:
  // this is above 2^32 / block_size by less than 1.
  unsigned inverse_size;
};

// The last row with prefix[row] <= index, by one warp: the lanes look at 32 places at a time.
__device__ __forceinline__ int find_row(const int* prefix, int num_rows, int index) {
  const int lane = threadIdx.x % WARP_SIZE;
  int row = 0;  // prefix[row] <= index
  for (int rows = num_rows; rows > 1;) {
    const int step = divide_up(rows, WARP_SIZE);
    const bool before = lane * step < rows && prefix[row + lane * step] <= index;
    const int passed = (__popc(__ballot_sync(FULL_WARP, before)) - 1) * step;
    row += passed;
    rows = step < rows - passed ? step : rows - passed;
  }
  return row;
}

// The piece of that index, by one warp; all its lanes get it.
template <int PATCH>
__device__ __forceinline__ Piece find_piece(const Attention& a, int index) {
  const int* prefix = a.plan.prefix();
  const int row = find_row(prefix, a.num_rows, index);
  int parts = a.plan.parts()[row], size = a.plan.split_size();
  int start = a.starts[row], lines = a.counts[row] * a.group;
  int patches = divide_up(lines, PATCH);

  // Long patches first: a prompt's last ones see the most.
  int within = index - prefix[row];
  int head = within % a.num_kv_heads;
  int part = within / a.num_kv_heads % parts;
  int patch = patches - 1 - within / a.num_kv_heads / parts;

  Piece piece;
  piece.head = head;
  piece.token = a.offsets[row];
  piece.start = start;
  piece.first_line = patch * PATCH;
  piece.num_lines = lines - piece.first_line < PATCH ? lines - piece.first_line : PATCH;
  piece.blocks = a.block_table + (long long)a.slots[row] * a.max_blocks;
  Range range = seen_by(start, piece.first_line / a.group, (piece.first_line + piece.num_lines - 1) / a.group, a.sight);
  piece.slot = -1;
  piece.num_parts = 1;
  if (parts > 1) {
    int first = seen_by(start, 0, 0, a.sight).begin / size;
    int first_seen = range.begin / size, last_seen = (range.end - 1) / size;
    if (first_seen != last_seen) {
      int base = a.plan.base()[row] + patch * parts * a.num_kv_heads + head;
      piece.slot = base + part * a.num_kv_heads;
      piece.first_slot = base + (first_seen - first) * a.num_kv_heads;
      piece.num_parts = last_seen - first_seen + 1;
    }
    int from = (first + part) * size;
    if (from > range.begin) range.begin = from;
    if (from + size < range.end) range.end = from + size;
  }
  piece.inverse_size = 0xffffffffu / unsigned(a.block_size) + 1u;
  piece.begin = range.begin;
  piece.end = range.end;
  return piece;
}

// Start to copy a patch's queries to shared memory, lines past the patch as zeros; they arrive with the next group.
template <class T, int DIM, int PATCH, int THREADS>
__device__ __forceinline__ void copy_queries(const Attention& a, const Piece& piece, unsigned char* into) {
  constexpr int ROW = DIM * int(sizeof(T)) + 16, CHUNKS = DIM / 8;
  for (int chunk = threadIdx.x; chunk < PATCH * CHUNKS; chunk += THREADS) {
    int row = chunk / CHUNKS, column = chunk % CHUNKS;
    bool valid = row < piece.num_lines && column * 8 < a.head_dim;
    const T* source = reinterpret_cast<const T*>(a.q);
    if (valid) {
      int line = piece.first_line + row;
      int token = line / a.group, head = piece.head * a.group + line % a.group;
      source += (long long)(piece.token + token) * a.q_stride + (long long)head * a.head_dim + column * 8;
    }
    copy_async_16(into + row * ROW + column * 16, source, valid);
  }
}

// What one line sees: nothing if it lies past the patch's end.
struct Line {
  int first, last;  // its own position is the last
  float slope;  // ALiBi (Press et al., "Train Short, Test Long", 2022)
  __device__ __forceinline__ Line() {}
  __device__ __forceinline__ Line(const Attention& a, const Piece& piece, int index) {
    bool exists = index < piece.num_lines;
    int line = piece.first_line + index;
    last = exists ? piece.start + line / a.group : -1;
    first = exists ? a.sight.first(last) : 0;
    slope = a.alibi != nullptr && exists ? a.alibi[piece.head * a.group + line % a.group] : 0.0f;
  }
};

__device__ __forceinline__ bool sees(const Line& line, int position) {
  return position <= line.last && position >= line.first;
}

// Whether a tile has positions that some token of the patch, first to last, does not see.
__device__ __forceinline__ bool sees_partly(const Attention& a, const Piece& piece, int tile) {
  int first = piece.start + piece.first_line / a.group;
  int last = piece.start + (piece.first_line + piece.num_lines - 1) / a.group;
  return (tile + 1) * TILE - 1 > first || tile * TILE < a.sight.first(last);
}

__device__ __forceinline__ const float* sink_of(const Attention& a, int head) {
  return a.sinks != nullptr ? a.sinks + head : nullptr;
}

// A line's result, of which this thread has two columns of every 8 from `column` on: to the output, or unscaled to the
// workspace, there with the line's largest score and normalizer by the thread that has column 0.
template <class T, int PATCH, int COLUMNS>
__device__ __forceinline__ void store_line(
    const Attention& a, const Piece& piece, int index, int column, int half, const float (&sums)[COLUMNS][4],
    float normalizer, float most) {
  if (piece.slot < 0) {
    const int line = piece.first_line + index;
    const long long token = piece.token + line / a.group;
    const int head = piece.head * a.group + line % a.group;
    T* to = reinterpret_cast<T*>(a.out) + (token * a.num_heads + head) * a.head_dim + column;
    const float share = share_of(normalizer, most, a.scores.unit(), sink_of(a, head)) * a.value_scale;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (column + 8 * n < a.head_dim) {
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            pack_pair<T>(sums[n][2 * half] * share, sums[n][2 * half + 1] * share);
      }
    }
  } else {
    const long long place = (long long)piece.slot * PATCH + index;
    float* to = a.part_sums + place * a.head_dim + column;
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (column + 8 * n < a.head_dim) {
        to[8 * n] = sums[n][2 * half];
        to[8 * n + 1] = sums[n][2 * half + 1];
      }
    }
    if (column == 0) {
      a.part_stats[place * 2] = most;
      a.part_stats[place * 2 + 1] = normalizer;
    }
  }
}

// Put together what the parts of a patch left in the workspace, if this block stored the last of them: by whichever
// block that is, in the parts' order, so the same bits. A warp takes a line at a time, its lanes sharing the columns.
template <class T, int DIM, int PATCH, int THREADS>
__device__ __forceinline__ void merge_parts(const Attention& a, const Piece& piece) {
  constexpr int PER_LANE = DIM / WARP_SIZE;
  __shared__ bool is_last;
  __threadfence();  // what this thread stored is there before the ticket that says so
  __syncthreads();
  if (threadIdx.x == 0) {
    int* tickets = a.tickets + piece.first_slot;
    is_last = atomicAdd(tickets, 1) == piece.num_parts - 1;
    if (is_last) *tickets = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();  // what the others stored before their tickets is read after this one

  const int lane = threadIdx.x % WARP_SIZE;
  const float unit = a.scores.unit();
#pragma unroll 1
  for (int index = threadIdx.x / WARP_SIZE; index < piece.num_lines; index += THREADS / WARP_SIZE) {
    float total[PER_LANE] = {}, normalizer = 0.0f, most = UNSEEN;
    // No branches: then the loads of several parts are under way before the first is folded.
#pragma unroll 4
    for (int part = 0; part < piece.num_parts; ++part) {
      const long long place = (long long)(piece.first_slot + part * a.num_kv_heads) * PATCH + index;
      const float part_most = a.part_stats[place * 2], part_normalizer = a.part_stats[place * 2 + 1];
      const bool seen = has_seen(part_most), is_first = !has_seen(most);
      const Fold fold(most, part_most, unit);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int column = i * WARP_SIZE + lane;
        const float one = column < a.head_dim ? a.part_sums[place * a.head_dim + column] : 0.0f;
        total[i] = !seen ? total[i] : is_first ? one : fold(total[i], one);
      }
      normalizer = !seen ? normalizer : is_first ? part_normalizer : fold(normalizer, part_normalizer);
      most = fold.most;
    }
    const int line = piece.first_line + index;
    const long long token = piece.token + line / a.group;
    const int head = piece.head * a.group + line % a.group;
    T* to = reinterpret_cast<T*>(a.out) + (token * a.num_heads + head) * a.head_dim;
    const float share = share_of(normalizer, most, unit, sink_of(a, head)) * a.value_scale;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = i * WARP_SIZE + lane;
      if (column < a.head_dim) to[column] = from_float<T>(total[i] * share);
    }
  }
}

// When a block has found no more pieces: its share of the padding tokens, and the counters back to 0 for the next layer by
// the last block, which no other takes from any more.
template <class T, int THREADS>
__device__ __forceinline__ void finish(const Attention& a) {
  for (int token = a.offsets[a.num_rows] + int(blockIdx.x); token < a.num_tokens; token += int(gridDim.x)) {
    T* to = reinterpret_cast<T*>(a.out) + (long long)token * a.num_heads * a.head_dim;
    for (int i = threadIdx.x; i < a.num_heads * a.head_dim; i += THREADS) to[i] = from_float<T>(0.0f);
  }
  if (threadIdx.x == 0 && atomicAdd(a.plan.finished(), 1) == int(gridDim.x) - 1) {
    *a.plan.finished() = 0;
    *a.plan.taken() = 0;
  }
}

}  // namespace quintet
