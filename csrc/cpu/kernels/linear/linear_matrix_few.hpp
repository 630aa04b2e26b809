// Integer products of few rows on AMX.
//
// For 16-bit x and codes of fewer than 8 bits. A register holds both planes of 8 rows of x; up to 15 rows take two turns of it.
// The products of one group of k take less time than their latency. Products run in order, and a register cannot be written
// before its sums are stored. Stored sums can be read after the store has reached the L1 cache. The loop is therefore a pipeline
// over blocks of 16 columns. Turn t begins the products of one block and ends those of the block before it. It stores the sums of
// the second block before it, and scales and adds those of the fifth. Codes of the next group are expanded once for all rows.
//
// 8 rows by 2048 x 2048 on one core of Emerald Rapids, over the time of one row: int4 in groups of 128 2.0 (3.1 with byte dot
// products of vectors), groups of 64 2.0 (3.0), Q4_1 3.8 (4.2). Groups of 32 pay off from 7 rows on, and for one register of x;
// 8-bit codes, 8-bit x and groups of 16 not at all.
#pragma once

#include "linear_matrix_unit.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(QT_AMX)
constexpr index_t kManyRows = 16;  // rows that are multiplied without this loop
constexpr index_t kMostExpanded = 128;  // k of the largest group with codes of fewer than 8 bits
constexpr index_t kFewBytes = kMostExpanded * kTileColumns, kFewIntegers = kAmxRows * kAmxColumns;
static_assert(2 * kFewBytes <= sizeof(Buffers::bytes) && kBlocks * kFewIntegers * 4 <= sizeof(Buffers::integers));

// Prefetch of a tile's weights into the L2 cache, kFewAhead bytes before they are read. After the tile, the next one follows.
constexpr index_t kFewAhead = 16384;
struct LinesAhead {
  const char *at, *end, *next;

  void take(index_t lines) {
    for (index_t i = 0; i < lines; ++i, at += 64) {
      if (at >= end) at = next, end = next + kFewAhead;
      __builtin_prefetch(at, 0, 2);
    }
  }
};

// A slice of k of an item with few rows.
struct FewRows {
  const Weight* weight;
  const Columns* columns;
  AddRows add;
  Unit unit;          // of the first row
  index_t rows;
  const char* x;      // first plane, at the slice's first k
  index_t x_stride;   // from a plane to the next
  index_t groups, in_group, last_k;            // k of a group; of the last one
  index_t in_block, block_bytes, group_bytes;  // groups of a scale block; from a block to the next; codes of a group
  index_t in_step;                             // k of a product
  LinesAhead ahead;
  index_t lines;           // to prefetch in a turn
  char* bytes;             // [2][kFewBytes]: expanded weights of two groups
  std::int32_t* integers;  // [4][kFewIntegers]: sums of the last four blocks of columns
};

// A group of k: its index, the head of its scale block, and its index in the block.
struct Group {
  index_t g;
  const char* head;
  index_t in_block;

  Group after(const FewRows& few) const {
    const bool ends = in_block + 1 == few.in_block;
    return {g + 1, ends ? head + few.block_bytes : head, ends ? 0 : in_block + 1};
  }
  const char* codes(const FewRows& few) const { return head + few.weight->head_bytes + in_block * few.group_bytes; }
};

// Expands a group.
QT_INLINE void expand_group(const FewRows& few, Expand expand, const Group& group) {
  const Weight& weight = *few.weight;
  const char* const codes = group.codes(few);
  const index_t g = group.g, k = g + 1 == few.groups ? few.last_k : few.in_group, steps = parts_of(k, step_of(weight.codes).k);
  char* const bytes = few.bytes + g % 2 * kFewBytes;
  if (few.columns->count == kBlocks) return expand(codes, 0, kTileColumns, steps, weight.table, bytes, kLineBytes);
  for (index_t block = 0; block < few.columns->count; ++block) {
    const index_t column = few.columns->begin[block];
    expand(codes, column, kAmxColumns, steps, weight.table, bytes + column * 4, kLineBytes);
  }
}

// One block of columns of one group.
struct Turn {
  const char *weights, *x;
  index_t block, steps, first_steps;  // products of the turn, and those before the next turn begins
};

// Steps [from, to) of a turn, with registers kX and kWeights. x stays in its registers for all blocks: a group has one or two
// steps.
template <int kSums, int kX, int kWeights>
QT_INLINE void multiply_steps(Amx& unit, const FewRows& few, const Turn& turn, index_t from, index_t to) {
  for (index_t s = from; s < to; ++s) {
    if (turn.block == 0) unit.load<kX>(turn.x + s * few.in_step, few.x_stride);
    unit.load<kWeights>(turn.weights + s * (few.in_step / 4) * kLineBytes, kLineBytes);
    unit.multiply_bytes<kSums, kX, kWeights>();
  }
}

// Computes a slice of an item. Turn t has its sums in register t % 4, later in few.integers[t % 4].
void multiply_few(Amx& unit, FewRows& few) {
  constexpr index_t kStoreLag = 2, kAddLag = 5;
  const Expand expand = expander_of(few.weight->codes);
  const index_t count = few.columns->count, turns = few.groups * count;
  Turn all[4] = {};
  GroupScales scales[8] = {};
  Group group{0, few.unit.heads, 0};
  index_t block = 0;
  expand_group(few, expand, group);
  for (index_t first = 0; first < turns + kAddLag; first += 4)
    repeat<0, 4>([&](auto now) {
      constexpr int kBefore = (now + 3) % 4, kStored = (now + 4 - kStoreLag) % 4, kAdded = (now + 8 - kAddLag) % 4;
      const index_t t = first + now;
      if (t < turns) {
        const index_t column = few.columns->begin[block];
        Turn& turn = all[now];
        turn.weights = few.bytes + group.g % 2 * kFewBytes + column * 4;
        turn.x = few.x + group.g * few.in_group;
        turn.block = block;
        turn.steps = parts_of(group.g + 1 == few.groups ? few.last_k : few.in_group, few.in_step);
        turn.first_steps = (turn.steps + 1) / 2;
        scales[t % 8] = {group.head, group.in_block, column, group.g};
        unit.zero<now>();
        multiply_steps<now, 4, 6>(unit, few, turn, 0, turn.first_steps);
      }
      if (t >= 1 && t < turns + 1)
        multiply_steps<kBefore, 5, 7>(unit, few, all[kBefore], all[kBefore].first_steps, all[kBefore].steps);
      if (t >= kStoreLag && t < turns + kStoreLag)
        unit.store<kStored>(few.integers + kStored * kFewIntegers, kLineBytes / kBlocks);
      if (t >= kAddLag && t < turns + kAddLag)
        few.add(few.integers + kAdded * kFewIntegers, kAmxColumns, few.rows, few.unit, scales[(t - kAddLag) % 8]);
      if (t >= turns) return;
      if (block == 0 && group.g + 1 < few.groups) expand_group(few, expand, group.after(few));
      few.ahead.take(few.lines);
      if (++block == count) block = 0, group = group.after(few);
    });
}

// True if the loop for few rows computes the call: if it is faster than vectors.
bool is_few(const LinearCall& call) {
  const Weight& weight = *call.weight;
  if (are_eight_bits(call.inputs) || weight.codes == Codes::eight || weight.group < 32) return false;
  const bool long_groups = weight.group >= kAmxFours;
  if (call.rows < (long_groups ? 6 : 7) || call.rows > (long_groups ? kManyRows - 1 : kAmxRows / 2)) return false;
  return weight.depth % (long_groups ? kAmxFours : weight.group) == 0;
}

// multiply_slices for few rows.
void multiply_few_slices(Registers& registers, const LinearCall& call, const LinearItem& item, const Piece& after,
                         float* first_sums, Buffers& buffers) {
  const Weight& weight = *call.weight;
  Plan plan(call);
  plan.piece = weight.slice_depth;
  const QuantizedX x = quantized_x(call);
  const Columns columns(item);
  const CodeStep step = step_of(weight.codes);
  FewRows few{};
  few.weight = &weight, few.columns = &columns, few.add = plan.add_rows;
  few.x_stride = plan.plane_stride, few.in_group = plan.in_group, few.in_step = plan.in_step;
  few.in_block = weight.block / weight.group;
  few.group_bytes = parts_of(plan.in_group, step.k) * step.bytes;
  few.block_bytes = weight.block_bytes;
  few.bytes = buffers.bytes, few.integers = buffers.integers[0];
  few.unit = unit_of(call, item, plan);
  const char* const tile = weight.memory + item.tile * weight.tile_bytes;
  few.ahead = {tile + weight.tile_bytes * item.k / weight.depth + kFewAhead, tile + weight.tile_bytes * item.k_end / weight.depth,
               after.memory};
  const index_t units = (item.rows * plan.planes + kAmxRows - 1) / kAmxRows;
  for (index_t begin = item.k, end; begin < item.k_end; begin = end) {
    const Piece piece = piece_at(weight, plan, item, begin);
    end = begin + piece.depth;
    const bool in_first = begin < item.k + weight.slice_depth;
    float* const sums = in_first ? first_sums : buffers.sums;
    clear(sums, item);
    few.groups = parts_of(piece.depth, plan.in_group), few.last_k = piece.depth - (few.groups - 1) * plan.in_group;
    few.unit.heads = piece.memory;
    few.unit.last = end == item.k_end && !call.sliced;
    for (index_t u = 0, row = 0; u < units; ++u, row += few.rows) {
      few.rows = (item.rows - row + units - u - 1) / (units - u);
      const char* const x_row = (const char*)call.prepared + (item.row + row) * call.prepared_stride;
      few.x = x_row + begin;
      few.unit.x_scales = (const float*)(x_row + x.scales_at) + begin / plan.in_group;
      few.unit.x_offsets = (const std::int32_t*)(x_row + x.offsets_at) + begin / plan.in_group;
      few.unit.x_shares = (const float*)(x_row + x.shares_at) + begin / plan.in_group;
      few.unit.sums = sums + row * kTileColumns, few.unit.total = in_first ? nullptr : first_sums + row * kTileColumns;
      few.lines = u > 0 ? 0 : (few.block_bytes / few.in_block + 64 * columns.count - 1) / (64 * columns.count);
      const index_t planes = few.rows * plan.planes;
      registers.shape(planes, planes, plan.in_step);
      multiply_few(registers.unit, few);
      end_slice_rows(columns.begin, columns.count, few.rows, few.unit);
    }
  }
}

#endif

}  // namespace
}  // namespace qt::QT_ISA
