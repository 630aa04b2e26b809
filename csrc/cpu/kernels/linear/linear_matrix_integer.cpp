// y[M, N] = x[M, K] · W[N, K]ᵀ with integer weights on AMX: formats and results of linear_integer.cpp, bit by bit. Fewer than
// kManyRows rows use linear_matrix_few.hpp, or the kernels of the parent instruction set.
//
// x is quantized first (linear_quantize.hpp): a row is one plane of bytes; in 16 bits two planes, high * 256 + low. A thread owns
// 64 columns (a tile; 32 or 16 if tiles are few) for a panel of rows. k is divided into pieces of whole groups. The weights of a
// piece stay in the L1 cache for all units of rows. Codes of fewer bits are expanded to bytes once per piece. A unit is 32 rows
// by 32 columns, 48 rows without groups, or both planes of 16 rows with 16-bit x (linear_matrix.hpp).
//
// The integers of a group go through memory to the vector units, which scale and add them while AMX multiplies the next group.
// Groups of 128 and 16-bit x: products of 16 rows by 16 columns take 64 cycles. The vectors need 16 times seven operations on two
// ports, about as long. Groups of 32: the products take 32 cycles, the vectors the same as before. Bytes: as in
// linear_integer.cpp. Limiter: the weight's bandwidth up to about a hundred rows. Then the products with their loads (no groups,
// 8-bit x: 64 k in a step), or the vectors.
//
// Few rows of 16-bit x: see linear_matrix_few.hpp. Other formats and still fewer rows use VPDPBUSD, 64 products of 16-bit x a
// cycle: more than memory supplies weights for, up to about five rows. It passes no groups through memory.
//
// Reduction order: as in linear_integer.cpp. Sums over a group are exact, so the bits are the same without AMX.
#include "amx.hpp"

#if defined(QT_AMX)
#include "linear_matrix_few.hpp"
#include "thread_memory.hpp"

namespace qt::QT_ISA {
namespace {

constexpr const LinearKernels& kParent = avx512_vnni::integer_linear;

constexpr index_t kPanelBytes = 5 << 18;    // of x: most of a 2 MB L2 cache
constexpr index_t kLowestPanel = 96;

// Some groups of a piece, as bytes.
struct Groups {
  const char* lines;  // of the first
  index_t apart;      // bytes from a group to the next
  index_t count, steps, last_steps;
  bool rest;  // one more step from Buffers::last after the last group's steps
};

// Expands the piece's weights to bytes if needed, and pads them to whole steps.
Groups groups_of(const Weight& weight, const Plan& plan, const Piece& piece, const Columns& columns, Buffers& buffers) {
  Groups groups{};
  groups.count = (piece.depth + plan.in_group - 1) / plan.in_group;
  groups.steps = plan.in_group / plan.in_step;
  const index_t in_last = piece.depth - (groups.count - 1) * plan.in_group;
  const index_t stored_apart = plan.grouped ? weight.block_bytes : plan.in_group * kTileColumns;
  const char* const stored = piece.memory + weight.head_bytes;
  if (weight.codes != Codes::eight) {
    const Expand expand = expander_of(weight.codes);
    const index_t at_once = columns.count == kBlocks ? kBlocks : 1;  // blocks of a narrower item may be apart
    const index_t k = step_of(weight.codes).k;
    groups.lines = buffers.bytes, groups.apart = plan.in_group * kTileColumns;
    groups.last_steps = (in_last + plan.in_step - 1) / plan.in_step;
    char* bytes = buffers.bytes;
    const char* codes = stored;
    for (index_t left = piece.depth; left > 0; left -= weight.block, codes += stored_apart, bytes += weight.block * kTileColumns)
      for (index_t block = 0; block < columns.count; block += at_once)
        expand(codes, columns.begin[block], at_once * kAmxColumns, ((left < weight.block ? left : weight.block) + k - 1) / k,
               weight.table, bytes + columns.begin[block] * 4, kLineBytes);
    char* const written = buffers.bytes + (groups.count - 1) * groups.apart + (in_last + k - 1) / k * k * kTileColumns;
    char* const end = buffers.bytes + (groups.count - 1) * groups.apart + groups.last_steps * plan.in_step * kTileColumns;
    if (written < end) std::memset(written, 0, std::size_t(end - written));
    return groups;
  }
  groups.lines = stored, groups.apart = stored_apart;
  groups.last_steps = in_last / plan.in_step;
  const index_t lines = (in_last % plan.in_step + 3) / 4;
  groups.rest = lines != 0;
  if (groups.rest) {
    std::memcpy(buffers.last, stored + (groups.count - 1) * stored_apart + groups.last_steps * plan.in_step / 4 * kLineBytes,
                std::size_t(lines * kLineBytes));
    std::memset(buffers.last + lines * kLineBytes, 0, sizeof buffers.last - std::size_t(lines * kLineBytes));
  }
  return groups;
}

// One piece of k of an item.
struct Work {
  Piece piece;
  index_t k;
  Groups groups;
  bool begins, ends;  // of its slice, or of the single group
  float* sums;        // of the item: [rows][64]
  Unit unit;          // of its first row and column
  Piece next;         // prefetched
};

void multiply_group(Registers& registers, MultiplyShare multiply, Share& share, const Groups& groups, index_t g, index_t in_step,
                    const Buffers& buffers) {
  share.weight = groups.lines + g * groups.apart;
  share.steps = g + 1 < groups.count ? groups.steps : groups.last_steps;
  if (share.steps != 0) multiply(registers.unit, share);
  if (g + 1 < groups.count || !groups.rest) return;
  Share rest = share;
  rest.first = share.first && share.steps == 0;
  for (int i = 0; i < kMostBlocks; ++i) rest.x[i] = share.x[i] + share.steps * in_step;
  rest.weight = buffers.last, rest.steps = 1, rest.fetch = {};
  multiply(registers.unit, rest);
}

// Pending vector work: a group's integers of a unit, or the last piece's sums.
class Waiting {
 public:
  Waiting(const Plan& plan, const Share& share, index_t blocks, index_t rows)
      : plan_(plan), share_(share), blocks_(blocks), rows_(rows) {}

  void take(const std::int32_t* integers, Unit& unit, index_t g, bool ends) {
    settle();
    integers_ = integers, unit_ = &unit, g_ = g, ends_ = ends;
  }
  void settle() {
    if (unit_ == nullptr) return;
    GroupScales scales{unit_->heads + g_ / unit_->in_block * unit_->head_stride, g_ % unit_->in_block, 0, g_};
    for (index_t block = 0; !plan_.whole && block < blocks_; ++block) {
      scales.column = share_.columns[block];
      plan_.add_rows(integers_ + scales.column, kTileColumns, rows_, *unit_, scales);
    }
    if (ends_) (plan_.whole ? end_single_group : end_slice_rows)(share_.columns, blocks_, rows_, *unit_);
    unit_ = nullptr;
  }

 private:
  const Plan& plan_;
  const Share& share_;
  index_t blocks_, rows_;
  const std::int32_t* integers_ = nullptr;
  Unit* unit_ = nullptr;
  index_t g_ = 0;
  bool ends_ = false;
};

// Rows [row, row + units * unit_rows) of an item, all units of equal size. Vectors process a group's integers while AMX
// multiplies the next group.
void multiply_part(Registers& registers, const LinearCall& call, const LinearItem& item, const Plan& plan, const Columns& columns,
                   const Work& work, index_t first_row, index_t unit_rows, index_t units, bool fetches, Buffers& buffers) {
  const index_t planes = unit_rows * plan.planes, x_blocks = (planes + kAmxRows - 1) / kAmxRows;
  const index_t at_once = x_blocks == 1 || columns.count < 2 ? columns.count : 2;
  const MultiplyShare multiply = multiply_for<Numbers::bytes>(x_blocks, at_once);
  Share share{};
  for (index_t i = 0, left = planes; i < x_blocks; ++i, left -= kAmxRows) share.x_rows[i] = left < kAmxRows ? left : kAmxRows;
  share.x_stride = plan.plane_stride, share.x_step = plan.in_step;
  share.weight_step = plan.in_step / 4 * kLineBytes;
  registers.shape(share.x_rows[0], share.x_rows[1], plan.in_step);
  const index_t steps = (work.groups.count - 1) * work.groups.steps + work.groups.last_steps;
  share.fetch = NextLines::of(fetches ? work.next.memory : nullptr, work.next.bytes / kLineBytes, columns,
                          units * columns.count * steps);
  Waiting waiting(plan, share, at_once, unit_rows);
  Unit two_units[2];
  int integers = 0;
  for (index_t block = 0; block < columns.count; block += at_once) {
    for (index_t i = 0; i < at_once; ++i) share.columns[i] = columns.begin[block + i];
    for (index_t u = 0; u < units; ++u) {
      const index_t row = first_row + u * unit_rows;
      const char* const x = (const char*)call.prepared + (item.row + row) * call.prepared_stride + work.k;
      Unit& unit = two_units[u % 2];
      unit = work.unit;
      unit.x_scales = row_of(unit.x_scales, row, unit.x_stride), unit.x_offsets = row_of(unit.x_offsets, row, unit.x_stride);
      unit.x_shares = row_of(unit.x_shares, row, unit.x_stride);
      unit.sums += row * kTileColumns;
      if (unit.total) unit.total += row * kTileColumns;
      for (index_t g = 0; g < work.groups.count; ++g) {
        const bool leaves = g + 1 == work.groups.count;
        std::int32_t* const sums = plan.whole ? (std::int32_t*)unit.sums : buffers.integers[integers];
        for (index_t i = 0; i < x_blocks; ++i) {
          share.x[i] = x + g * plan.in_group + i * kAmxRows * plan.plane_stride;
          share.sums[i] = (char*)(sums + i * kAmxRows * kTileColumns);
        }
        share.first = !plan.whole || work.begins;
        multiply_group(registers, multiply, share, work.groups, g, plan.in_step, buffers);
        if (!plan.whole || work.ends) waiting.take(buffers.integers[integers], unit, g, leaves && work.ends);
        integers = 1 - integers;
      }
    }
    waiting.settle();
  }
}

// Computes all slices of an item. The first slice accumulates in `first_sums`, which receives the total. after: the thread's
// probable next piece.
void multiply_slices(Registers& registers, const LinearCall& call, const LinearItem& item, const Piece& after, float* first_sums,
                     Buffers& buffers) {
  const Weight& weight = *call.weight;
  const Plan plan(call);
  const QuantizedX x = quantized_x(call);
  const Columns columns(item);
  const char* const x_row = (const char*)call.prepared + item.row * call.prepared_stride;
  Work work{};
  work.unit = unit_of(call, item, plan);
  for (index_t end = item.k; end < item.k_end;) {
    work.k = end;
    work.piece = piece_at(weight, plan, item, work.k);
    end = work.k + work.piece.depth;
    const bool in_first = plan.whole || work.k < item.k + weight.slice_depth, all = end == item.k_end;
    work.begins = plan.whole ? work.k == item.k : work.k % weight.slice_depth == 0;
    work.ends = all || (!plan.whole && end % weight.slice_depth == 0);
    work.sums = in_first ? first_sums : buffers.sums;
    work.groups = groups_of(weight, plan, work.piece, columns, buffers);
    const index_t first_group = plan.whole ? 0 : work.k / plan.in_group;
    work.unit.heads = work.piece.memory;
    work.unit.x_scales = (const float*)(x_row + x.scales_at) + first_group;
    work.unit.x_offsets = (const std::int32_t*)(x_row + x.offsets_at) + first_group;
    work.unit.x_shares = (const float*)(x_row + x.shares_at) + first_group;
    work.unit.sums = work.sums;
    work.unit.total = in_first ? nullptr : first_sums;
    work.unit.first = item.k == 0, work.unit.last = all && !call.sliced;
    work.next = all ? after : piece_at(weight, plan, item, end);
    if (!plan.whole && work.begins) clear(work.sums, item);
    const index_t in_last = item.rows % plan.unit_rows, smaller = plan.unit_rows > kUnitRows ? kUnitRows : plan.unit_rows;
    index_t row = 0;
    for (const index_t unit_rows : {plan.unit_rows, smaller, in_last % smaller}) {
      const index_t units = unit_rows == 0 ? 0 : (item.rows - row) / unit_rows;
      if (units == 0) continue;
      multiply_part(registers, call, item, plan, columns, work, row, unit_rows, units, row == 0, buffers);
      row += units * unit_rows;
    }
  }
}

using MultiplySlices = void (*)(Registers&, const LinearCall&, const LinearItem&, const Piece&, float*, Buffers&);

// Adds the results of an item's leaves in buffers.total[0].
void multiply_leaves(Registers& registers, const LinearCall& call, const LinearItem& item, const Piece& after,
                     MultiplySlices multiply, Buffers& buffers) {
  const Weight* const weights = call.weight;
  add_as_tree(
      weights->leaves,
      [&](index_t leaf, index_t place) {
        const Piece next = leaf + 1 < weights->leaves ? piece_at(weights[leaf + 1], Plan(call), item, item.k) : after;
        multiply(registers, leaf_of(call, leaf), item, next, buffers.total[place], buffers);
      },
      [&](index_t from, index_t to) { add_sums(item, item.rows, buffers.total[from], buffers.total[to]); });
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  const bool few = is_few(call);
  if (call.rows < kManyRows && !few) return kParent.multiply(described, begin, end);
  const auto multiply = few ? multiply_few_slices : multiply_slices;
  const index_t turn = (end - begin) * call.threads;
  Registers registers;
  Buffers& buffers = *(Buffers*)thread_memory(sizeof(Buffers));
  for (index_t i = begin; i < end; ++i) {
    const LinearItem item = item_of(call, i);
    const index_t next = i + 1 < end ? i + 1 : begin + turn;  // the thread's probable next item
    const LinearItem next_item = item_of(call, next < call.items ? next : i);
    const Piece after = piece_at(call.weight[next_item.leaf], Plan(call), next_item, next_item.k);
    float* const total = buffers.total[0];
    if (call.sliced) {
      float* const sums = partials_of(call, item, item.slice);
      multiply(registers, leaf_of(call, item.leaf), item, after, sums, buffers);
      if (!brings_last_slice(call, item)) continue;
      add_integer_slices(call, item, total);
    } else {
      multiply_leaves(registers, call, item, after, multiply, buffers);
    }
    finish_by_blocks({call, item.tile, item.from, item.to}, total, item.row, item.rows);
  }
}

Preparation preparation(const Weight& weight, Dtype dtype, Inputs inputs) {
  Preparation prepared = kParent.preparation(weight, dtype, inputs);
  const bool eight = are_eight_bits(inputs);
  const index_t row_bytes = quantized_x(weight, prepared.x_group, eight).row_bytes;
  if (row_bytes > prepared.row_bytes) prepared.row_bytes = row_bytes;
  // An odd number of lines from a plane to the next: a stride with more factors of two maps to fewer cache sets.
  if (eight) prepared.row_bytes |= 64;
  const index_t rows = kPanelBytes / prepared.row_bytes / kLargeUnitRows * kLargeUnitRows;
  prepared.panel_rows = rows < kLowestPanel ? kLowestPanel : rows < kHighestPanel ? rows : kHighestPanel;
  prepared.panel_step = kLargeUnitRows;
  return prepared;
}

index_t prepare_items(const LinearCall& call) { return kParent.prepare_items(call); }

void prepare(const void* call, index_t begin, index_t end) {
  const LinearCall& its = *(const LinearCall*)call;
  its.rows < kManyRows && !is_few(its) ? kParent.prepare(call, begin, end) : quantize_rows(call, begin, end);
}

}  // namespace

const LinearKernels integer_linear = {preparation, prepare_items, prepare, multiply_items};

}  // namespace qt::QT_ISA
#endif
