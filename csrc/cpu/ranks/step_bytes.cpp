// Serialization of a step's arrays for ranks on another machine: the arrays of Ranks::send, in the same order.
//
//     | token ids | positions | slots, starts, counts, offsets, adapters of rows | outputs | of each row, of each table: its entries |
//
// Received bytes are validated: table rows and entries that are written, and the preconditions of the kernels. Block ids are
// those of the sender.
#include <cstring>

#include "ranks.hpp"

namespace qt {
namespace {

// Calls visit(memory, bytes) for each array.
template <class Visit>
void each_array(const Step& step, Visit visit) {
  const auto show = [&](auto* array, index_t count) { visit(reinterpret_cast<char*>(array), count * index_t(sizeof *array)); };
  show(step.token_ids, step.num_tokens);
  show(step.positions, step.num_tokens);
  for (auto* array : {step.row_slots, step.row_starts, step.row_counts, step.row_offsets, step.row_adapters})
    show(array, step.num_rows);
  show(step.output_tokens, step.num_outputs);
}

// Calls visit for each written part of the block tables.
template <class Visit>
void each_table(const Ranks& ranks, const Step& step, Visit visit) {
  std::int32_t* const tables = const_cast<std::int32_t*>(step.block_table);
  for (index_t row = 0; row < step.num_rows; ++row) {
    const index_t entries = ranks.table_entries(step.row_starts[row] + step.row_counts[row]);
    for (index_t table = 0; table < ranks.shape().tables; ++table)
      visit(reinterpret_cast<char*>(tables + table * step.block_table_group_stride +
                                    step.row_slots[row] * step.block_table_stride),
            entries * index_t(sizeof(std::int32_t)));
  }
}

bool is_within(index_t value, index_t end) { return 0 <= value && value < end; }

bool fits(const RanksShape& shape, const Order& order) {
  return is_within(order.num_tokens, shape.max_tokens + 1) && is_within(order.num_rows, shape.max_rows + 1) &&
         is_within(order.num_outputs, shape.max_outputs + 1) && order.length >= 0;
}

bool makes_sense(const RanksShape& shape, const Step& step, index_t length) {
  const index_t most = shape.table_stride * shape.block_size;  // tokens of a request
  index_t tokens = 0;
  for (index_t row = 0; row < step.num_rows; ++row) {
    const index_t start = step.row_starts[row], count = step.row_counts[row];
    if (!is_within(step.row_slots[row], shape.slots) || !is_within(start, most) || count < 1 || count > most - start ||
        start + count > length || step.row_offsets[row] != tokens || !is_within(step.row_adapters[row], shape.adapters + 1))
      return false;
    for (index_t token = 0; token < count && tokens + token < step.num_tokens; ++token)
      if (step.positions[tokens + token] != start + token) return false;
    tokens += count;
  }
  for (index_t output = 0; output < step.num_outputs; ++output)
    if (!is_within(step.output_tokens[output], step.num_tokens)) return false;
  return tokens == step.num_tokens && length <= most;
}

Step shown(const Ranks& ranks, const Order& order) {
  Step step = ranks.step();
  step.num_tokens = order.num_tokens, step.num_rows = order.num_rows, step.num_outputs = order.num_outputs;
  return step;
}

}  // namespace
}  // namespace qt

// Returns the bytes of the step of the last received order. Writes them to `to` unless it is null.
QT_EXPORT index_t qt_ranks_pack_step(const qt::Ranks* ranks, const qt::Order* order, char* to) {
  const qt::Step step = qt::shown(*ranks, *order);
  index_t bytes = 0;
  const auto write = [&](const char* part, index_t size) {
    if (to != nullptr && size > 0) std::memcpy(to + bytes, part, std::size_t(size));
    bytes += size;
  };
  qt::each_array(step, write);
  qt::each_table(*ranks, step, write);
  return bytes;
}

// Writes received bytes to the step arrays of the next order, for which there must be room. Returns 1; returns 0 if the bytes
// are invalid, and the arrays are then undefined.
QT_EXPORT int qt_ranks_unpack_step(const qt::Ranks* ranks, const qt::Order* order, const char* from, index_t bytes) {
  if (!qt::fits(ranks->shape(), *order)) return 0;
  const qt::Step step = qt::shown(*ranks, *order);
  const auto read = [&](char* part, index_t size) {
    if (size > 0) std::memcpy(part, from, std::size_t(size));
    from += size, bytes -= size;
  };
  index_t expected = 0;
  const auto add = [&](const char*, index_t size) { expected += size; };
  qt::each_array(step, add);
  if (bytes < expected) return 0;
  qt::each_array(step, read);
  if (!qt::makes_sense(ranks->shape(), step, order->length)) return 0;
  expected = 0;
  qt::each_table(*ranks, step, add);
  if (bytes != expected) return 0;
  qt::each_table(*ranks, step, read);
  return 1;
}
