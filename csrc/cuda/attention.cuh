// What the attention kernels share: how a step's rows are cut into pieces of work, which positions a query sees, and the
// arithmetic by which parts of a softmax are put together. The kernels: attention_plan.cu (once per step),
// attention_decode.cu and attention_chunk.cu (matrix instructions), attention_merge.cu, attention_plain.cu.
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
// are computed one after the other by one block or at the same time by many, the same two numbers meet in `Fold`.
#pragma once
#include "device.cuh"

#include "attention_softmax.cuh"

namespace quintet {

constexpr int TILE = 64;
constexpr int DECODE_PATCH = 16;

// The plan of one step for one window and one kernel, as attention_plan.cu leaves it: a table of ints.
struct Plan {
  int* table;
  int max_rows;
  __device__ __forceinline__ int split_size() const { return table[0]; }
  __device__ __forceinline__ int num_pieces() const { return table[1]; }
  // Pieces taken so far beyond the first of each block; the merge sets it to 0 for the next layer.
  __device__ __forceinline__ int* taken() const { return table + 2; }
  // prefix()[row]: pieces of the rows before it; one entry more than rows.
  __device__ __forceinline__ int* prefix() const { return table + 4; }
  // parts()[row]: splits that are pieces of their own; 1: a piece walks all positions.
  __device__ __forceinline__ int* parts() const { return table + 4 + max_rows + 1; }
  // base()[row]: the row's first patch in the workspace, if it has several parts.
  __device__ __forceinline__ int* base() const { return table + 4 + 2 * max_rows + 1; }
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// Rows whose lines fit one patch of the decode kernel are its work, all others the chunk kernel's.
__device__ __forceinline__ bool is_decode(int count, int group) { return count * group <= DECODE_PATCH; }

// Positions [begin, end) that some line sees, of the tokens [first, last] counted from the row's first new one.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range seen_by(int start, int first, int last, int window) {
  int begin = window > 0 ? start + first - window + 1 : 0;
  return {begin > 0 ? begin : 0, start + last + 1};
}

// Who computes what: the arguments that the kernels with matrix instructions have in common.
struct Attention {
  unsigned char* out;
  const unsigned char* q;
  const unsigned char* kv;
  const int *slots, *starts, *counts, *offsets, *block_table;
  float *part_sums, *part_stats, *totals;
  const float* alibi;
  int num_rows, num_heads, num_kv_heads, head_dim, block_size, max_blocks, q_stride, window, split_tiles, stages;
  long long plane;  // numbers from a key to its value
  Plan plan;
  Scores scores;
  int group;
};

#define QT_ATTENTION_PARAMETERS                                                                                       \
  void *out, const void *q, const void *kv, const int *slots, const int *starts, const int *counts,                   \
      const int *offsets, const int *block_table, int *plan, float *part_sums, float *part_stats, float *totals,      \
      const float *alibi, int num_rows, int max_rows, int num_heads, int num_kv_heads, int head_dim, int block_size,  \
      int max_blocks, int q_stride, int window, int split_tiles, int stages, long long plane, float scale,            \
      float soft_cap

#define QT_ATTENTION_ARGUMENTS                                                                                        \
  quintet::Attention {                                                                                                \
    (unsigned char*)out, (const unsigned char*)q, (const unsigned char*)kv, slots, starts, counts, offsets,           \
        block_table, part_sums, part_stats, totals, alibi, num_rows, num_heads, num_kv_heads, head_dim, block_size,   \
        max_blocks, q_stride, window, split_tiles, stages, plane, quintet::Plan{plan, max_rows},                      \
        quintet::Scores{scale, soft_cap, soft_cap == 0.0f && alibi == nullptr}, num_heads / num_kv_heads              \
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
  const int* blocks;
};

template <int PATCH>
__device__ __forceinline__ Piece find_piece(const Attention& a, int index) {
  const int* prefix = a.plan.prefix();
  int row = 0, beyond = a.num_rows;  // the last row with prefix[row] <= index
  while (beyond - row > 1) {
    int middle = (row + beyond) / 2;
    if (prefix[middle] <= index) {
      row = middle;
    } else {
      beyond = middle;
    }
  }
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
  Range range = seen_by(start, piece.first_line / a.group, (piece.first_line + piece.num_lines - 1) / a.group, a.window);
  piece.slot = -1;
  if (parts > 1) {
    int first = seen_by(start, 0, 0, a.window).begin / size;
    if (range.begin / size != (range.end - 1) / size) {
      piece.slot = a.plan.base()[row] + (patch * parts + part) * a.num_kv_heads + head;
    }
    int from = (first + part) * size;
    if (from > range.begin) range.begin = from;
    if (from + size < range.end) range.end = from + size;
  }
  piece.begin = range.begin;
  piece.end = range.end;
  return piece;
}

// The cache as a ring of buffers in shared memory: unit 2 t holds the keys of a piece's tile t, unit 2 t + 1 its values,
// positions outside [begin, end) and numbers past the head's end as zeros (0 times what nobody wrote may be NaN).
//
// A row of a tile is 16 bytes longer than its numbers: then the 8 rows that one matrix load touches lie in different
// banks. An fp8 tile stays packed in the ring; the thread that copied 16 bytes widens them into one of two buffers, so
// only the widened tile needs a barrier.
template <class T, class KV, int DIM, int THREADS>
struct Ring {
  static constexpr bool WIDENS = sizeof(KV) != sizeof(T);
  static constexpr int ROW = DIM * int(sizeof(T)) + 16;
  static constexpr int SOURCE_ROW = WIDENS ? DIM : ROW;
  static constexpr int UNIT = TILE * SOURCE_ROW;
  static constexpr int WIDE = WIDENS ? 2 * TILE * ROW : 0;
  static constexpr int CHUNKS = DIM * int(sizeof(KV)) / 16;  // of 16 bytes in a row
  static_assert(TILE * CHUNKS % THREADS == 0, "every thread copies equally many chunks");
  static_assert(ROW % 128 == 16 || ROW % 128 == 80, "8 consecutive rows begin in 8 different groups of 4 banks");

  // Which 16 bytes of a unit are this thread's i-th: where rows divide the threads, those of one column.
  static __device__ __forceinline__ int row_of(int i) {
    if constexpr (THREADS % CHUNKS == 0) return int(threadIdx.x) / CHUNKS + i * (THREADS / CHUNKS);
    return (i * THREADS + int(threadIdx.x)) / CHUNKS;
  }
  static __device__ __forceinline__ int column_of(int i) {
    if constexpr (THREADS % CHUNKS == 0) return int(threadIdx.x) % CHUNKS;
    return (i * THREADS + int(threadIdx.x)) % CHUNKS;
  }

  const Attention& a;
  const Piece& piece;  // in shared memory
  unsigned char* memory;
  int next = 0, into = 0, from = 0;  // unit to copy next, its stage, stage to use next
  // position / block_size is the upper word of position * this, for positions below 2^22 and blocks of 2 to 1024.
  unsigned inverse_size;

  __device__ __forceinline__ Ring(const Attention& a, const Piece& piece, unsigned char* memory)
      : a(a), piece(piece), memory(memory), inverse_size(0xffffffffu / unsigned(a.block_size) + 1u) {}

  // Copy the next unit; past the last an empty group, so that groups can be counted. A thread's loads of block numbers
  // come before its first copy, as the compiler moves no load over a copy: they wait for memory once, not in turn. Where
  // nothing is copied the address is some other position's, so that there is no branch.
  __device__ __forceinline__ void copy() {
    const int begin = piece.begin, end = piece.end;
    const int first = (begin / TILE + next / 2) * TILE;
    if (first < end) {
      constexpr int COPIES = TILE * CHUNKS / THREADS;
      const int* blocks = piece.blocks;
      const int row_bytes = a.head_dim * int(sizeof(KV)), head_bytes = a.block_size * row_bytes;
      const int block_bytes = a.num_kv_heads * head_bytes;
      const unsigned char* plane = a.kv + (long long)piece.head * head_bytes;
      if (next % 2 != 0) plane += a.plane * int(sizeof(KV));
      unsigned char* unit = memory + WIDE + into * UNIT;
      int number[COPIES], place[COPIES];
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int position = max(begin, min(first + row_of(i), end - 1));
        const int block = int(__umulhi(unsigned(position), inverse_size));
        place[i] = position - block * a.block_size;
        number[i] = blocks[block];
      }
#pragma unroll
      for (int i = 0; i < COPIES; ++i) {
        const int position = first + row_of(i), column = column_of(i);
        const bool valid = position >= begin && position < end && column * 16 < row_bytes;
        const unsigned char* source = plane + column * 16 + (long long)place[i] * row_bytes;
        copy_async_16(unit + row_of(i) * SOURCE_ROW + column * 16, source + (long long)number[i] * block_bytes, valid);
      }
    }
    copy_async_commit();
    ++next;
    into = into + 1 == a.stages ? 0 : into + 1;
  }

  __device__ __forceinline__ void fill() {
#pragma unroll 1
    for (int i = 0; i + 1 < a.stages; ++i) copy();
  }

  // Wait for the next unit, barrier, copy ahead into the stage that everyone has left, and return its rows of T.
  __device__ __forceinline__ const unsigned char* take() {
    switch (a.stages) {
      case 2: copy_async_wait<0>(); break;
      case 3: copy_async_wait<1>(); break;
      case 4: copy_async_wait<2>(); break;
      case 5: copy_async_wait<3>(); break;
      case 6: copy_async_wait<4>(); break;
      case 7: copy_async_wait<5>(); break;
      default: copy_async_wait<6>(); break;
    }
    const unsigned char* unit = memory + WIDE + from * UNIT;
    if constexpr (WIDENS) {
      unsigned char* buffer = memory + (next - a.stages + 1) % 2 * TILE * ROW;
#pragma unroll
      for (int i = 0; i < TILE * CHUNKS / THREADS; ++i) {
        const int row = row_of(i), column = column_of(i);
        uint4 packed = *reinterpret_cast<const uint4*>(unit + row * SOURCE_ROW + column * 16);
        uint4 low, high;
        low.x = widen_fp8_pair<T>(uint16_t(packed.x & 0xffffu));
        low.y = widen_fp8_pair<T>(uint16_t(packed.x >> 16));
        low.z = widen_fp8_pair<T>(uint16_t(packed.y & 0xffffu));
        low.w = widen_fp8_pair<T>(uint16_t(packed.y >> 16));
        high.x = widen_fp8_pair<T>(uint16_t(packed.z & 0xffffu));
        high.y = widen_fp8_pair<T>(uint16_t(packed.z >> 16));
        high.z = widen_fp8_pair<T>(uint16_t(packed.w & 0xffffu));
        high.w = widen_fp8_pair<T>(uint16_t(packed.w >> 16));
        uint4* to = reinterpret_cast<uint4*>(buffer + row * ROW + column * 32);
        to[0] = low;
        to[1] = high;
      }
      unit = buffer;
    }
    __syncthreads();
    copy();
    from = from + 1 == a.stages ? 0 : from + 1;
    return unit;
  }
};

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
  int last;     // its own position
  float slope;  // ALiBi (Press et al., "Train Short, Test Long", 2022)
  __device__ __forceinline__ Line() {}
  __device__ __forceinline__ Line(const Attention& a, const Piece& piece, int index) {
    bool exists = index < piece.num_lines;
    int line = piece.first_line + index;
    last = exists ? piece.start + line / a.group : -1;
    slope = a.alibi != nullptr && exists ? a.alibi[piece.head * a.group + line % a.group] : 0.0f;
  }
};

__device__ __forceinline__ bool sees(const Attention& a, const Line& line, int position) {
  return position <= line.last && (a.window <= 0 || position > line.last - a.window);
}

// Whether a tile has positions that some token of the patch, first to last, does not see.
__device__ __forceinline__ bool sees_partly(const Attention& a, const Piece& piece, int tile) {
  int first = piece.start + piece.first_line / a.group;
  int last = piece.start + (piece.first_line + piece.num_lines - 1) / a.group;
  return (tile + 1) * TILE - 1 > first || (a.window > 0 && tile * TILE < last - a.window + 1);
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
    const float inverse = reciprocal(normalizer);
#pragma unroll
    for (int n = 0; n < COLUMNS; ++n) {
      if (column + 8 * n < a.head_dim) {
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            pack_pair<T>(sums[n][2 * half] * inverse, sums[n][2 * half + 1] * inverse);
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

}  // namespace quintet
