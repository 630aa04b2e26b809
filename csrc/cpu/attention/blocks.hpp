// Addresses of a layer's KV or state blocks, from the block table of its cache group. See `quintet.wire.kv_spec`. For sources
// that are compiled once: kernel sources share no inline functions.
#pragma once

#include "program.hpp"

namespace qt {

// Memory of one layer's blocks, with the layout of `quintet.executor.backends.cpu.program.step.KvPlace`.
struct KvPlace {
  char* memory;         // of all blocks at this place
  index_t block_bytes;  // from one block to the next: at least the bytes of the layer
  index_t group;        // cache group; its table has the block ids
  index_t sharers;      // ranks that share these blocks: each writes every sharers-th block, all read all blocks
  index_t sharer;       // index of this rank among them
  index_t drafts;       // state group: block of its first draft state
};

// Block table of a row in a cache group. Block i of keys and values holds positions [i * block_size, (i + 1) * block_size).
inline const std::int32_t* blocks_of(const Step& step, index_t row, index_t group) {
  return step.block_table + group * step.block_table_group_stride + step.row_slots[row] * step.block_table_stride;
}

// State before the row's first token, for the layer at this place; null (zeros) at the start of a request.
inline const char* state_read(const Step& step, index_t row, const KvPlace& place) {
  return step.row_starts[row] == 0 ? nullptr : place.memory + blocks_of(step, row, place.group)[0] * place.block_bytes;
}

// Destination of the row's state. It may equal state_read; no other row uses it.
inline char* state_written(const Step& step, index_t row, const KvPlace& place) {
  return place.memory + blocks_of(step, row, place.group)[1] * place.block_bytes;
}

// Destination of the state before a draft of the step, by the number of the draft. See
// `quintet.executor.speculation.draft_states`.
inline char* draft_state(const KvPlace& place, index_t draft) {
  return place.memory + (place.drafts + draft) * place.block_bytes;
}

}  // namespace qt
