// Unpacks a plan: from the buffer that a step copies to the device, into the tables and rows that kernels read.
//
// The buffer has 32-bit words: a header of counts, then sections in the order of `Staging` with the lengths of the header.
// quintet.executor.backends.cuda.ops.tables writes it. First come the deltas (data of new requests, new block table entries),
// then the step's rows, then the token ids. Token ids are gathered from the token table, so they must follow the deltas. Decode
// steps use `apply_plan`: both phases in one launch of one block with a barrier between them, because launch latency dominates.
// Steps of many tokens use `apply_deltas` and `fill_rows`: two launches of many blocks, ordered by the stream.
//
// Ownership: a thread owns a word, a row or a token at a time, strided over all threads of the launch. No two threads write the
// same address: the host keeps one entry per position of the block table. Bytes: some 30 per row and 40 per token. Limiter:
// latency of a few dependent loads. There is no reduction; a bisection in the rows' first tokens finds the row of a token.
// Results are independent of the batch size.
#include "device.cuh"

namespace quintet {
namespace {

constexpr int HEADER_WORDS = 16;
constexpr int RECORD_WORDS = 8;  // sampling parameters of a slot: quintet.executor.sampling.settings.RECORD

// Sections of the buffer.
struct Staging {
  int num_rows, num_tokens, num_sampled, num_entries, num_new_rows, num_new_tokens;
  const int* slots;              // [num_rows]
  const int* starts;             // [num_rows]
  const int* counts;             // [num_rows]
  const int* offsets;            // [num_rows + 1]
  const int* sampled_slots;      // [num_sampled]
  const int* sampled_positions;  // [num_sampled]
  const int* sampled_tokens;     // [num_sampled]
  const int* entries;            // [num_entries, 3]: row of the block tables, index in it, KV block
  const int* new_slots;          // [num_new_rows]
  const int* new_prompts;        // [num_new_rows]: tokens of the prompt
  const int* new_offsets;        // [num_new_rows + 1]: offset of the request's tokens in new_tokens
  const int* settings;           // [num_new_rows, RECORD_WORDS]
  const int* new_tokens;         // [num_new_tokens]
};

__device__ __forceinline__ Staging read_staging(const int* words) {
  Staging s;
  s.num_rows = words[0];
  s.num_tokens = words[1];
  s.num_sampled = words[2];
  s.num_entries = words[3];
  s.num_new_rows = words[4];
  s.num_new_tokens = words[5];
  s.slots = words + HEADER_WORDS;
  s.starts = s.slots + s.num_rows;
  s.counts = s.starts + s.num_rows;
  s.offsets = s.counts + s.num_rows;
  s.sampled_slots = s.offsets + s.num_rows + 1;
  s.sampled_positions = s.sampled_slots + s.num_sampled;
  s.sampled_tokens = s.sampled_positions + s.num_sampled;
  s.entries = s.sampled_tokens + s.num_sampled;
  s.new_slots = s.entries + 3 * s.num_entries;
  s.new_prompts = s.new_slots + s.num_new_rows;
  s.new_offsets = s.new_prompts + s.num_new_rows;
  s.settings = s.new_offsets + s.num_new_rows + 1;
  s.new_tokens = s.settings + RECORD_WORDS * s.num_new_rows;
  return s;
}

// Device tables of all slots.
struct Tables {
  int* token_ids;  // [slots, token_columns]
  long long token_columns;
  int* block_table;  // [cache groups, slots, block_columns]
  long long block_columns;
  int block_size;
  int num_groups;
  long long group_entries;  // slots * block_columns
  int* prompts;   // [slots]: tokens of the prompt
  int* settings;  // [slots, RECORD_WORDS]
};

// The step's rows, with the padded lengths of the launch.
struct Rows {
  int* slots;
  int* starts;
  int* counts;
  int* offsets;
  int num_rows;
  int* token_ids;
  int* positions;
  int* token_rows;
  int* prompts;
  int* kv_rows;  // [cache groups, kv_columns]
  long long kv_columns;
  int num_tokens;
  int* sampled_slots;
  int* sampled_positions;
  int* sampled_tokens;
  int num_sampled;
};

// Returns the largest i with offsets[i] <= index, of `count` ascending offsets; offsets[0] <= index.
__device__ __forceinline__ int owner_of(const int* offsets, int count, int index) {
  int low = 0, high = count;  // offsets[low] <= index < offsets[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offsets[middle] <= index) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

__device__ __forceinline__ void write_deltas(const Staging& s, const Tables& t, int first, int stride) {
  for (int i = first; i < s.num_new_tokens; i += stride) {
    const int tenant = owner_of(s.new_offsets, s.num_new_rows, i);
    t.token_ids[s.new_slots[tenant] * t.token_columns + (i - s.new_offsets[tenant])] = s.new_tokens[i];
  }
  for (int i = first; i < s.num_new_rows * RECORD_WORDS; i += stride) {
    const int slot = s.new_slots[i / RECORD_WORDS];
    t.settings[static_cast<long long>(slot) * RECORD_WORDS + i % RECORD_WORDS] = s.settings[i];
  }
  for (int i = first; i < s.num_new_rows; i += stride) t.prompts[s.new_slots[i]] = s.new_prompts[i];
  for (int i = first; i < s.num_entries; i += stride) {
    const int* entry = s.entries + 3 * i;
    t.block_table[entry[0] * t.block_columns + entry[1]] = entry[2];
  }
}

__device__ __forceinline__ void write_rows(const Staging& s, const Tables& t, const Rows& out, int first, int stride) {
  for (int i = first; i < out.num_rows; i += stride) {
    const bool real = i < s.num_rows;
    out.slots[i] = real ? s.slots[i] : -1;
    out.starts[i] = real ? s.starts[i] : 0;
    out.counts[i] = real ? s.counts[i] : 0;
  }
  for (int i = first; i <= out.num_rows; i += stride) out.offsets[i] = s.offsets[i < s.num_rows ? i : s.num_rows];
  for (int i = first; i < out.num_sampled; i += stride) {
    const bool real = i < s.num_sampled;
    out.sampled_slots[i] = real ? s.sampled_slots[i] : -1;
    out.sampled_positions[i] = real ? s.sampled_positions[i] : 0;
    out.sampled_tokens[i] = real ? s.sampled_tokens[i] : 0;
  }
  for (int i = first; i < out.num_tokens; i += stride) {
    int row = -1, position = -1, id = 0, prompt = 0;
    const int* blocks = nullptr;  // block table of the token's row, first cache group
    if (i < s.num_tokens) {
      // In a decode step token i belongs to row i; no search is needed.
      const bool own = i < s.num_rows && s.offsets[i] == i && s.offsets[i + 1] == i + 1;
      row = own ? i : owner_of(s.offsets, s.num_rows, i);
      position = s.starts[row] + (i - s.offsets[row]);
      const int slot = s.slots[row];
      id = t.token_ids[slot * t.token_columns + position];
      prompt = t.prompts[slot];
      blocks = t.block_table + slot * t.block_columns + position / t.block_size;
    }
    out.token_rows[i] = row;
    out.positions[i] = position;
    out.token_ids[i] = id;
    out.prompts[i] = prompt;
    for (int group = 0; group < t.num_groups; ++group)
      out.kv_rows[group * out.kv_columns + i] =
          blocks ? blocks[group * t.group_entries] * t.block_size + position % t.block_size : -1;
  }
}

}  // namespace
}  // namespace quintet

using namespace quintet;

#define QT_TABLES                                                                                                \
  const int *staging, int *token_table, long long token_columns, int *block_table, long long block_columns,     \
      int block_size, int num_groups, long long group_entries, int *prompts, int *settings
#define QT_ROWS                                                                                                  \
  int *slots, int *starts, int *counts, int *offsets, int num_rows, int *token_ids, int *positions,              \
      int *token_rows, int *row_prompts, int *kv_rows, long long kv_columns, int num_tokens, int *sampled_slots,     \
      int *sampled_positions, int *sampled_tokens, int num_sampled

QT_KERNEL(512, apply_plan, (QT_TABLES, QT_ROWS)) {
  const Staging s = read_staging(staging);
  const Tables tables{token_table, token_columns, block_table, block_columns, block_size,
                      num_groups,  group_entries, prompts,     settings};
  const Rows rows{slots,   starts,     counts,     offsets,       num_rows,          token_ids,      positions,  token_rows,
                  row_prompts, kv_rows,    kv_columns, num_tokens,    sampled_slots,     sampled_positions, sampled_tokens,
                  num_sampled};
  write_deltas(s, tables, threadIdx.x, blockDim.x);
  __syncthreads();  // one block: the barrier makes its writes visible to all its threads
  write_rows(s, tables, rows, threadIdx.x, blockDim.x);
}

QT_KERNEL(256, apply_deltas, (QT_TABLES)) {
  const Tables tables{token_table, token_columns, block_table, block_columns, block_size,
                      num_groups,  group_entries, prompts,     settings};
  write_deltas(read_staging(staging), tables, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

QT_KERNEL_OCCUPANCY(256, 4, fill_rows, (QT_TABLES, QT_ROWS)) {
  const Tables tables{token_table, token_columns, block_table, block_columns, block_size,
                      num_groups,  group_entries, prompts,     settings};
  const Rows rows{slots,   starts,     counts,     offsets,       num_rows,          token_ids,      positions,  token_rows,
                  row_prompts, kv_rows,    kv_columns, num_tokens,    sampled_slots,     sampled_positions, sampled_tokens,
                  num_sampled};
  write_rows(read_staging(staging), tables, rows, blockIdx.x * blockDim.x + threadIdx.x, gridDim.x * blockDim.x);
}

// Stores sampled tokens in the token table. A thread owns a token.
QT_KERNEL(128, scatter_tokens,
          (const int* drawn, const int* slots, const int* positions, int* token_table, long long token_columns,
           int num_drawn)) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < num_drawn && slots[i] >= 0) token_table[slots[i] * token_columns + positions[i]] = drawn[i];
}
