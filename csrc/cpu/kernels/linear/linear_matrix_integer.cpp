// y[M, N] = x[M, K] · W[N, K]ᵀ with integer weights on AMX: formats and results of linear_integer.cpp, bit by bit. Fewer than
// kFewestRows rows use the kernels of the parent instruction set.
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
// For few rows VPDPBUSD computes 64 products of 16-bit x a cycle: more than memory supplies weights for, up to about ten rows. It
// passes no groups through memory. Microseconds of gates and ups of S on two cores of Emerald Rapids:
//
//             int8 AMX  int8 vectors  int4 AMX  int4 vectors
//   8 rows         669           456       434           356
//   32 rows       1122          1071       869          1165
//
// Reduction order: as in linear_integer.cpp. Sums over a group are exact, so the bits are the same without AMX.
#include "amx.hpp"

#if defined(QT_AMX)
#include "linear_integer_piece.hpp"
#include "linear_matrix.hpp"
#include "thread_memory.hpp"

namespace qt::QT_ISA {
namespace {

constexpr const LinearKernels& kParent = avx512_vnni::integer_linear;

constexpr index_t kFewestRows = 16;
constexpr index_t kPiece = 256;             // k at a time, whole groups
constexpr index_t kWholePiece = 2048, kWholeStreamPiece = 512;  // all of k is one group; with only one unit
constexpr index_t kPanelBytes = 5 << 18;    // of x: most of a 2 MB L2 cache
constexpr index_t kHighestPanel = 576, kLowestPanel = 96;
constexpr int kRowsAtOnce = 8;              // rows that are scaled together
static_assert(kPiece % kXGroup == 0 && kHighestPanel % kLargeUnitRows == 0);

// Buffers of a thread.
struct alignas(64) Buffers {
  float sums[kHighestPanel * kTileColumns];                // of a slice
  float total[kTreeHeight][kHighestPanel * kTileColumns];  // of the slices so far; several for leaves only
  std::int32_t integers[2][kUnitRows * kTileColumns];      // a unit's sums of a group: rows, or high bytes, then low bytes
  char bytes[kPiece * kTileColumns];                // expanded weights
  char last[kAmxRows * kLineBytes];                 // the last k, zero-padded
};

// Division of a call.
struct Plan : Cutting {
  bool planes;                // x in 16 bits
  index_t in_group, in_step;  // k; a piece if `whole`
  index_t unit_rows;

  explicit Plan(const LinearCall& call) {
    grouped = call.weight->group != kWholeDepth, planes = !are_eight_bits(call.inputs), whole = !planes && !grouped;
    piece = !whole ? kPiece : call.rows <= kUnitRows ? kWholeStreamPiece : kWholePiece;
    in_group = whole ? piece : grouped ? call.weight->group : call.x_group;
    in_step = in_group < kAmxFours ? in_group : kAmxFours;
    unit_rows = planes ? kAmxRows : whole ? kLargeUnitRows : kUnitRows;
  }
};

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
    const index_t k = step_of(weight.codes).k;
    groups.lines = buffers.bytes, groups.apart = plan.in_group * kTileColumns;
    groups.last_steps = (in_last + plan.in_step - 1) / plan.in_step;
    char* bytes = buffers.bytes;
    const char* codes = stored;
    for (index_t left = piece.depth; left > 0; left -= weight.block, codes += stored_apart, bytes += weight.block * kTileColumns)
      for (index_t block = 0; block < columns.count; ++block)
        expand(codes, columns.begin[block], kAmxColumns, ((left < weight.block ? left : weight.block) + k - 1) / k, weight.table,
               bytes + columns.begin[block] * 4, kLineBytes);
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

// Scales a group's integers of R rows and 16 columns and adds them to the results.
template <class Dot, int R>
QT_INLINE void add_rows(const std::int32_t* integers, const Unit& unit, index_t g) {
  i32v sums[R][1][Dot::kSums];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    sums[r][0][0] = load_bits(integers + r * kTileColumns);
    if constexpr (Dot::kSums == 2) sums[r][0][1] = load_bits(integers + (kAmxRows + r) * kTileColumns);
    sums[r][0][Dot::kSums - 1] += all(row_of(unit.x_offsets, r, unit.x_stride)[g]);
  }
  add_group<Dot, R, 1>(sums, unit, unit.head, nullptr, unit.head_group, g);
}

// R rows and 16 columns of a single group. Complete: converts integers to results. A slice of it: keeps the integers, plus the
// offset if it is the first.
template <int R>
QT_INLINE void end_rows(const std::int32_t*, const Unit& unit, index_t) {
  i32v sums[R][1][1];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    sums[r][0][0] = load_bits(unit.sums + r * kTileColumns);
    if (unit.first) sums[r][0][0] += all(*row_of(unit.x_offsets, r, unit.x_stride));
  }
  end_part<Dot8, R, 1>(sums, unit);
}

// Adds the sums of R rows and 16 columns of a slice to the total, unless it is the first. Scales them if it is the last.
template <int R>
QT_INLINE void end_slice_rows(const std::int32_t*, const Unit& unit, index_t) {
  end_slice<R, 1>(unit);
}

using EachRows = void (*)(const std::int32_t*, const Unit&, index_t);

// Calls kSome for kRowsAtOnce rows at a time and kOne for the rest. integers, unit: of the first row.
template <EachRows kSome, EachRows kOne>
QT_INLINE void each_rows(index_t rows, const std::int32_t* integers, Unit unit, index_t g) {
  for (index_t r = 0; r < rows;) {
    const bool some = rows - r >= kRowsAtOnce;
    some ? kSome(integers, unit, g) : kOne(integers, unit, g);
    const index_t next = some ? kRowsAtOnce : 1;
    integers += next * kTileColumns, unit.sums += next * kTileColumns;
    if (unit.total) unit.total += next * kTileColumns;
    unit.x_scales = row_of(unit.x_scales, next, unit.x_stride), unit.x_offsets = row_of(unit.x_offsets, next, unit.x_stride);
    unit.x_shares = row_of(unit.x_shares, next, unit.x_stride);
    r += next;
  }
}

// Adds a group's integers to the results of `rows` rows of a unit, block by block of columns.
void add_integers(const Plan& plan, const Share& share, index_t blocks, index_t rows, const std::int32_t* integers, Unit unit,
                  index_t g) {
  float *const sums = unit.sums;
  for (index_t block = 0; block < blocks; ++block) {
    unit.column = share.columns[block], unit.sums = sums + unit.column;
    if (plan.planes)
      each_rows<add_rows<Dot16, kRowsAtOnce>, add_rows<Dot16, 1>>(rows, integers + unit.column, unit, g);
    else
      each_rows<add_rows<Dot8, kRowsAtOnce>, add_rows<Dot8, 1>>(rows, integers + unit.column, unit, g);
  }
}

// Finishes the single group or the slice that a piece completes.
void end_unit(const Plan& plan, const Share& share, index_t blocks, index_t rows, Unit unit) {
  float *const sums = unit.sums, *const total = unit.total;
  for (index_t block = 0; block < blocks; ++block) {
    unit.column = share.columns[block], unit.sums = sums + unit.column, unit.total = total ? total + unit.column : nullptr;
    if (plan.whole)
      each_rows<end_rows<kRowsAtOnce>, end_rows<1>>(rows, nullptr, unit, 0);
    else
      each_rows<end_slice_rows<kRowsAtOnce>, end_slice_rows<1>>(rows, nullptr, unit, 0);
  }
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
    unit_->head = unit_->heads + g_ / unit_->in_block * unit_->head_stride, unit_->head_group = g_ % unit_->in_block;
    if (!plan_.whole) add_integers(plan_, share_, blocks_, rows_, integers_, *unit_, g_);
    if (ends_) end_unit(plan_, share_, blocks_, rows_, *unit_);
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
  const index_t x_blocks = plan.planes ? 2 : (unit_rows + kAmxRows - 1) / kAmxRows;
  const index_t at_once = x_blocks == 1 || columns.count < 2 ? columns.count : 2;
  const MultiplyShare multiply = multiply_for<Numbers::bytes>(x_blocks, at_once);
  const index_t x_plane = plan.planes ? quantized_x(call).plane : kAmxRows * call.prepared_stride;
  Share share{};
  for (index_t i = 0, left = unit_rows; i < x_blocks; ++i, left -= plan.planes ? 0 : kAmxRows)
    share.x_rows[i] = left < kAmxRows ? left : kAmxRows;
  share.x_stride = call.prepared_stride, share.x_step = plan.in_step;
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
        for (index_t i = 0; i < x_blocks; ++i) {
          share.x[i] = x + g * plan.in_group + i * x_plane;
          share.sums[i] = plan.whole ? (char*)(work.sums + (row + i * kAmxRows) * kTileColumns)
                                     : (char*)(buffers.integers[integers] + i * kAmxRows * kTileColumns);
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
  work.unit.scales = weight.scales;
  work.unit.column_scales = weight.memory + item.tile * weight.tile_bytes;
  work.unit.x_stride = call.prepared_stride;
  work.unit.over_middle = 1.0f / float(middle_of(weight.codes));
  work.unit.whole = plan.whole;
  work.unit.head_stride = weight.block_bytes, work.unit.in_block = plan.grouped ? weight.block / weight.group : 1;
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

// Adds the results of an item's leaves in buffers.total[0].
void multiply_leaves(Registers& registers, const LinearCall& call, const LinearItem& item, const Piece& after, Buffers& buffers) {
  const Weight* const weights = call.weight;
  add_as_tree(
      weights->leaves,
      [&](index_t leaf, index_t place) {
        const Piece next = leaf + 1 < weights->leaves ? piece_at(weights[leaf + 1], Plan(call), item, item.k) : after;
        multiply_slices(registers, leaf_of(call, leaf), item, next, buffers.total[place], buffers);
      },
      [&](index_t from, index_t to) { add_sums(item, item.rows, buffers.total[from], buffers.total[to]); });
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  if (call.rows < kFewestRows) return kParent.multiply(described, begin, end);
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
      multiply_slices(registers, leaf_of(call, item.leaf), item, after, sums, buffers);
      if (!brings_last_slice(call, item)) continue;
      add_integer_slices(call, item, total);
    } else {
      multiply_leaves(registers, call, item, after, buffers);
    }
    finish_by_blocks({call, item.tile, item.from, item.to}, total, item.row, item.rows);
  }
}

Preparation preparation(const Weight& weight, Dtype dtype, Inputs inputs) {
  Preparation prepared = kParent.preparation(weight, dtype, inputs);
  const index_t row_bytes = quantized_x(weight, prepared.x_group, are_eight_bits(inputs)).row_bytes;
  if (row_bytes > prepared.row_bytes) prepared.row_bytes = row_bytes;
  prepared.row_bytes |= 64;  // odd number of lines: a row stride with more factors of two maps to fewer cache sets
  const index_t rows = kPanelBytes / prepared.row_bytes / kLargeUnitRows * kLargeUnitRows;
  prepared.panel_rows = rows < kLowestPanel ? kLowestPanel : rows < kHighestPanel ? rows : kHighestPanel;
  prepared.panel_step = kLargeUnitRows;
  return prepared;
}

index_t prepare_items(const LinearCall& call) { return kParent.prepare_items(call); }

void prepare(const void* call, index_t begin, index_t end) {
  const bool few = ((const LinearCall*)call)->rows < kFewestRows;
  few ? kParent.prepare(call, begin, end) : quantize_rows(call, begin, end);
}

}  // namespace

const LinearKernels integer_linear = {preparation, prepare_items, prepare, multiply_items};

}  // namespace qt::QT_ISA
#endif
