// Where a layer keeps what it needs of each request: blocks of its place, named by the table of its group. See
// `quintet.wire.kv_spec`. For sources that are compiled once: kernel sources share no inline functions.
#pragma once

#include "program.hpp"

namespace qt {

// Laid out like `quintet.executor.backends.cpu.program.step.KvPlace`.
struct KvPlace {
  char* memory;         // of all blocks at this place
  index_t block_bytes;  // from one block to the next: at least what the layer needs
  index_t group;        // its table names the blocks
  index_t sharers;      // processes that keep these blocks together: each writes every so-many-th, and all read all
  index_t sharer;       // which of them this one is
};

// A row's block table in a group: of keys and values, block i holds positions [i * block_size, (i + 1) * block_size).
inline const std::int32_t* blocks_of(const Step& step, index_t row, index_t group) {
  return step.block_table + group * step.block_table_group_stride + step.row_slots[row] * step.block_table_stride;
}

// The state that a row begins with, of the layer at this place; null for zeros, where the row begins a request.
inline const char* state_read(const Step& step, index_t row, const KvPlace& place) {
  return step.row_starts[row] == 0 ? nullptr : place.memory + blocks_of(step, row, place.group)[0] * place.block_bytes;
}

// Where a row's state is to be left: perhaps where it was read, and never where another row's is.
inline char* state_written(const Step& step, index_t row, const KvPlace& place) {
  return place.memory + blocks_of(step, row, place.group)[1] * place.block_bytes;
}

}  // namespace qt
