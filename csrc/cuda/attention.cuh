// Common parts of the attention kernels: division of rows into work items, visible positions of a query, merge of partial
// softmax states. The kernels: attention_plan.cu (once per step), attention_decode.cu and attention_chunk.cu (matrix
// instructions), attention_plain.cu.
//
// Terms. A ROW is a request in this step: `count` new tokens after `start` cached ones. A QUERY is a (new token, query head)
// pair. A row has count * group queries per KV head, with query = token * group + head in the query group. So the queries of a
// query group share every load of a key (Ainslie et al., "GQA", 2023). A QUERY TILE is up to QUERY_TILE consecutive queries,
// computed together by one thread block. A TILE is 64 positions of the cache. A SPLIT is a range of full tiles at fixed
// positions: split s is [s * size, (s + 1) * size) for every row.
//
//   positions   0                size              2 size            3 size
//   tiles       |----|----|----|----|----|----|----|----|----|----|
//   splits      |       0         |        1       |        2
//   a row       |------------ start ------------->|-- count --|
//
// A WORK ITEM is (row, query tile, KV head, split), or (row, query tile, KV head) over all positions if the row is not split.
//
// Reduction order of a query: tiles ascending within a split by the online softmax (Milakov and Gimelshein, 2018; Dao et al.,
// "FlashAttention-2", 2023), splits ascending by `SoftmaxMerge`. A tile or split without visible positions leaves the query's
// state unchanged, exactly. So with a fixed split size, a query's bits are independent of the batch, of its chunk, of its query
// tile and of the kernel. One block may compute all splits in sequence, or several blocks may compute them in parallel:
// `SoftmaxMerge` combines the same numbers. In the parallel case partial states are stored in the workspace; the block that
// stores the last one of a query tile merges them.
#pragma once
#include "device.cuh"

#include "attention_softmax.cuh"

namespace quintet {

constexpr int TILE = 64;
constexpr int DECODE_QUERY_TILE = 16;

// Plan of one step for one attention window and one kernel: a table of ints, written by attention_plan.cu.
struct Plan {
  int* table;
  int max_rows;
  __device__ __forceinline__ int split_size() const { return table[0]; }
  __device__ __forceinline__ int num_items() const { return table[1]; }
  // Number of work items taken after each block's first one; number of blocks that found no more. Both are 0 between launches.
  __device__ __forceinline__ int* taken() const { return table + 2; }
  __device__ __forceinline__ int* finished() const { return table + 3; }
  // prefix()[row]: work items of the previous rows; one entry more than rows.
  __device__ __forceinline__ int* prefix() const { return table + 4; }
  // parts()[row]: splits that are separate work items; 1: a work item covers all positions.
  __device__ __forceinline__ int* parts() const { return table + 4 + max_rows + 1; }
  // base()[row]: the row's first query tile in the workspace, if it has several parts.
  __device__ __forceinline__ int* base() const { return table + 4 + 2 * max_rows + 1; }
};

__device__ __forceinline__ int divide_up(int a, int b) { return (a + b - 1) / b; }

// True for rows with queries that fit one query tile of the decode kernel; the chunk kernel computes all other rows.
__device__ __forceinline__ bool is_decode(int count, int group) { return count * group <= DECODE_QUERY_TILE; }

// Positions [begin, end) visible to the tokens [first, last], counted from the row's first new token.
struct Range {
  int begin, end;
};
__device__ __forceinline__ Range seen_by(int start, int first, int last, const AttentionWindow& mask) {
  return {mask.first(start + first), start + last + 1};
}

// Arguments of the kernels with matrix instructions.
struct Attention {
  unsigned char* out;
  const unsigned char* q;
  const unsigned char* kv;
  const int *slots, *starts, *counts, *offsets, *block_table;
  float *part_sums, *part_stats, *totals;
  int* tickets;  // stored parts of a query tile, at the slot of its first part; 0 between launches
  const float *alibi, *sinks;
  int num_rows, num_tokens, num_heads, num_kv_heads, head_dim, block_size, max_blocks, q_stride;
  AttentionWindow mask;
  int split_tiles, stages;
  long long plane;         // numbers from a key to its value
  long long block_stride;  // numbers from one KV block to the next
  Plan plan;
  Scores scores;
  float value_scale;       // of all values
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
        num_kv_heads, head_dim, block_size, max_blocks, q_stride, quintet::AttentionWindow{window, chunk}, split_tiles, stages, \
        plane, block_stride,                                                                                          \
        quintet::Plan{plan, max_rows},                                                                                \
        quintet::Scores{scale, soft_cap, soft_cap == 0.0f && alibi == nullptr}, value_scale, num_heads / num_kv_heads              \
  }

// One work item. Empty if its query tile sees no position of its split.
struct WorkItem {
  int head;         // KV head
  int token;        // index of the row's first token in the step
  int start;        // position of that token
  int first_query;  // of the query tile
  int num_queries;  // of the query tile, at most QUERY_TILE
  int begin, end;   // positions
  int slot;         // query tile of the workspace; -1: the result is final
  int first_slot;   // of the query tile's parts, which are num_kv_heads slots apart
  int num_parts;    // of the query tile
  const int* blocks;
  // Multiplier for the division by block_size: position / block_size is the upper word of position * inverse_size. Valid for
  // block_size >= 2 and position * block_size up to 2^32, as it exceeds 2^32 / block_size by less than 1.
  unsigned inverse_size;
};

// Returns the last row with prefix[row] <= index. One warp; its lanes test 32 entries at a time.
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

// Returns the work item with this index. One warp; all lanes get the result.
template <int QUERY_TILE>
__device__ __forceinline__ WorkItem find_item(const Attention& a, int index) {
  const int* prefix = a.plan.prefix();
  const int row = find_row(prefix, a.num_rows, index);
  int parts = a.plan.parts()[row], size = a.plan.split_size();
  int start = a.starts[row], queries = a.counts[row] * a.group;
  int query_tiles = divide_up(queries, QUERY_TILE);

  // The last query tiles of a prompt see the most positions, so they come first.
  int within = index - prefix[row];
  int head = within % a.num_kv_heads;
  int part = within / a.num_kv_heads % parts;
  int query_tile = query_tiles - 1 - within / a.num_kv_heads / parts;

  WorkItem item;
  item.head = head;
  item.token = a.offsets[row];
  item.start = start;
  item.first_query = query_tile * QUERY_TILE;
  item.num_queries = queries - item.first_query < QUERY_TILE ? queries - item.first_query : QUERY_TILE;
  item.blocks = a.block_table + (long long)a.slots[row] * a.max_blocks;
  Range range = seen_by(start, item.first_query / a.group, (item.first_query + item.num_queries - 1) / a.group, a.mask);
  item.slot = -1;
  item.num_parts = 1;
  if (parts > 1) {
    int first = seen_by(start, 0, 0, a.mask).begin / size;
    int first_seen = range.begin / size, last_seen = (range.end - 1) / size;
    if (first_seen != last_seen) {
      int base = a.plan.base()[row] + query_tile * parts * a.num_kv_heads + head;
      item.slot = base + part * a.num_kv_heads;
      item.first_slot = base + (first_seen - first) * a.num_kv_heads;
      item.num_parts = last_seen - first_seen + 1;
    }
    int from = (first + part) * size;
    if (from > range.begin) range.begin = from;
    if (from + size < range.end) range.end = from + size;
  }
  item.inverse_size = 0xffffffffu / unsigned(a.block_size) + 1u;
  item.begin = range.begin;
  item.end = range.end;
  return item;
}

// Starts the copy of a query tile's queries to shared memory; queries beyond the tile are zero. It completes with
// the next group of copies.
template <class T, int DIM, int QUERY_TILE, int THREADS>
__device__ __forceinline__ void copy_queries(const Attention& a, const WorkItem& item, unsigned char* into) {
  constexpr int ROW = DIM * int(sizeof(T)) + 16, CHUNKS = DIM / 8;
  for (int chunk = threadIdx.x; chunk < QUERY_TILE * CHUNKS; chunk += THREADS) {
    int row = chunk / CHUNKS, column = chunk % CHUNKS;
    bool valid = row < item.num_queries && column * 8 < a.head_dim;
    const T* source = reinterpret_cast<const T*>(a.q);
    if (valid) {
      int query = item.first_query + row;
      int token = query / a.group, head = item.head * a.group + query % a.group;
      source += (long long)(item.token + token) * a.q_stride + (long long)head * a.head_dim + column * 8;
    }
    copy_async_16(into + row * ROW + column * 16, source, valid);
  }
}

// Visible positions of one query; none beyond the end of the query tile.
struct QueryMask {
  int first, last;  // the last one is the query's own position
  float slope;  // ALiBi (Press et al., "Train Short, Test Long", 2022)
  __device__ __forceinline__ QueryMask() {}
  __device__ __forceinline__ QueryMask(const Attention& a, const WorkItem& item, int index) {
    bool exists = index < item.num_queries;
    int query = item.first_query + index;
    last = exists ? item.start + query / a.group : -1;
    first = exists ? a.mask.first(last) : 0;
    slope = a.alibi != nullptr && exists ? a.alibi[item.head * a.group + query % a.group] : 0.0f;
  }
};

__device__ __forceinline__ bool sees(const QueryMask& mask, int position) {
  return position <= mask.last && position >= mask.first;
}

// True if the tile needs a mask: a token of the query tile does not see all its positions.
__device__ __forceinline__ bool sees_partly(const Attention& a, const WorkItem& item, int tile) {
  int first = item.start + item.first_query / a.group;
  int last = item.start + (item.first_query + item.num_queries - 1) / a.group;
  return (tile + 1) * TILE - 1 > first || tile * TILE < a.mask.first(last);
}

__device__ __forceinline__ const float* sink_of(const Attention& a, int head) {
  return a.sinks != nullptr ? a.sinks + head : nullptr;
}

// Stores a query's result: final to the output, or unscaled to the workspace. This thread has two columns of every 8, from
// `column` on. In the workspace, the thread with column 0 also stores the query's largest score and normalizer.
template <class T, int QUERY_TILE, int COLUMNS>
__device__ __forceinline__ void store_query(
    const Attention& a, const WorkItem& item, int index, int column, int half, const float (&sums)[COLUMNS][4],
    float normalizer, float most) {
  if (item.slot < 0) {
    const int query = item.first_query + index;
    const long long token = item.token + query / a.group;
    const int head = item.head * a.group + query % a.group;
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
    const long long place = (long long)item.slot * QUERY_TILE + index;
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

// Merges the parts of a query tile from the workspace, if this block stored the last one. The parts' order is fixed, so
// the bits do not depend on the block. A warp merges a query at a time; its lanes share the columns.
template <class T, int DIM, int QUERY_TILE, int THREADS>
__device__ __forceinline__ void merge_parts(const Attention& a, const WorkItem& item) {
  constexpr int PER_LANE = DIM / WARP_SIZE;
  __shared__ bool is_last;
  __threadfence();  // release: this thread's stores precede its ticket
  __syncthreads();
  if (threadIdx.x == 0) {
    int* tickets = a.tickets + item.first_slot;
    is_last = atomicAdd(tickets, 1) == item.num_parts - 1;
    if (is_last) *tickets = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();  // acquire: stores before the other blocks' tickets are visible

  const int lane = threadIdx.x % WARP_SIZE;
  const float unit = a.scores.unit();
#pragma unroll 1
  for (int index = threadIdx.x / WARP_SIZE; index < item.num_queries; index += THREADS / WARP_SIZE) {
    float total[PER_LANE] = {}, normalizer = 0.0f, most = UNSEEN;
    // Branch-free, so that the loads of several parts are in flight before the first merge.
#pragma unroll 4
    for (int part = 0; part < item.num_parts; ++part) {
      const long long place = (long long)(item.first_slot + part * a.num_kv_heads) * QUERY_TILE + index;
      const float part_most = a.part_stats[place * 2], part_normalizer = a.part_stats[place * 2 + 1];
      const bool seen = has_seen(part_most), is_first = !has_seen(most);
      const SoftmaxMerge merge(most, part_most, unit);
#pragma unroll
      for (int i = 0; i < PER_LANE; ++i) {
        const int column = i * WARP_SIZE + lane;
        const float one = column < a.head_dim ? a.part_sums[place * a.head_dim + column] : 0.0f;
        total[i] = !seen ? total[i] : is_first ? one : merge(total[i], one);
      }
      normalizer = !seen ? normalizer : is_first ? part_normalizer : merge(normalizer, part_normalizer);
      most = merge.most;
    }
    const int query = item.first_query + index;
    const long long token = item.token + query / a.group;
    const int head = item.head * a.group + query % a.group;
    T* to = reinterpret_cast<T*>(a.out) + (token * a.num_heads + head) * a.head_dim;
    const float share = share_of(normalizer, most, unit, sink_of(a, head)) * a.value_scale;
#pragma unroll
    for (int i = 0; i < PER_LANE; ++i) {
      const int column = i * WARP_SIZE + lane;
      if (column < a.head_dim) to[column] = from_float<T>(total[i] * share);
    }
  }
}

// Epilogue of a block without further work items: zeroes its share of the padding tokens. The last block resets the counters for
// the next layer.
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
