// y[M, N] = x[M, K] · W[N, K]ᵀ with weights of 8 to 2 bits, in integer arithmetic without dequantization.
//
// x is quantized first (linear_quantize.hpp): to 16 or 8 bits per row and group of k, or to 8 bits per row. Units of some rows by
// some columns are then multiplied (linear_integer_unit.hpp).
//
// A thread owns a tile of 64 columns (32 or 16 if tiles are few) for a panel of rows. It computes all slices of k, or one. K is
// divided into pieces. The units of a piece prefetch the next piece into the L2 cache, each an equal share. After the last piece
// they prefetch the thread's probable next tile. If the hardware prefetcher follows sequential reads (Weight::follows), a unit
// that reads a whole piece issues no prefetch (exception: Weight::asked_rows). Otherwise it also prefetches into the L1 cache
// shortly before the read (kNearBytes). If many rows share weights of fewer than 8 bits, the weights are expanded to bytes once
// per piece. Codes with expensive unpacking are expanded from three rows on. Composed scales of several units become floats once
// per piece.
//
// Bytes per panel: the weight once (1 or 1/2 byte a number, plus scales). x once per tile from cache; once per half tile for many
// rows. Limiter: the weight's bandwidth up to about 20 rows, then the multiply rate, half of it for 16-bit x.
//
// Reduction order: the sum over a group of k is an exact integer, the same on every processor and in any order. Groups of a slice
// (linear.hpp) ascending: fma(float(sum), scale of w * scale of x, result). With zero points or minima then fma(shift of w, scale
// of x * float(middle * sum of x), result), see linear_scales.hpp. Then the slices ascending, the column's scale once, and the
// leaves as a tree. If all of k is one group, the slices' sums are exact integers too. Independent of batch size.
#include "linear_integer_piece.hpp"
#include "linear_integer_row.hpp"
#include "thread_memory.hpp"

namespace qt::QT_ISA {
namespace {

// k per piece, whole groups. Few rows: short, because memory is the limiter and the first piece has no prefetch. More rows:
// large, but two pieces must leave cache for the rows of x.
constexpr index_t kStreamPiece = 512, kPiece = 2048, kExpandedPiece = 1024;
constexpr index_t kStreamSlice = 768;  // a slice of this depth is one short piece
// Maximum depth that is one piece for one row. A depth of 768 would split into 512 and 256, and the second piece would prefetch
// twice its own size.
constexpr index_t kRowDepth = 1024;
constexpr index_t kLeastGroup = 16;  // of k
constexpr index_t kStreamRows = 32;
// Panel rows from which 4-bit weights are expanded once, with and without software prefetch. Other codes: more than kFewRows
// rows.
constexpr index_t kExpandFrom = 16, kExpandWholeUnitsFrom = 65;
constexpr index_t kLine = 64;  // cache line
constexpr index_t kPanelBytes = 1 << 20;  // of x: half of an L2 cache
constexpr index_t kFewestPanelRows = 48;  // fewer rows would re-read the weights too often

// The largest piece of at most `largest` k that divides a slice evenly. The prefetch of the next piece then has the size of this
// one.
index_t even_piece(const Weight& weight, index_t largest) {
  if (weight.slices == 1) return largest;
  index_t piece = largest;
  while (weight.slice_depth % piece != 0) piece -= kXGroup;
  return piece;
}

// Division of items with a given number of rows.
struct Plan : Cutting {
  index_t rows;
  bool expanded;
  index_t in_group;      // k with a common scale; a piece if all of k is one group
  CodeStep step;         // as read by the units
  index_t units, width;  // width: columns of a unit
  index_t unit_rows, larger_units;  // rows of a unit; the first `larger_units` have one more
  index_t parts;         // parts of an item's columns
  bool near;             // units also prefetch into L1 shortly before the read
  bool alone;            // one unit reads a whole piece sequentially, without prefetch: see Fetch
  bool singles;                // composed scales are made fp32 once for all units
  index_t block, block_bytes;  // k; ungrouped integers are contiguous
  QuantizedX x;                // layout of a row of x
  MultiplyUnit multiply;
};

// True if weights are expanded to bytes for this number of rows.
bool is_expanded(Codes codes, index_t rows, bool follows) {
  switch (codes) {
    case Codes::eight: return false;
    case Codes::four: return rows >= (follows ? kExpandWholeUnitsFrom : kExpandFrom);
    default: return rows > kFewRows;
  }
}

// True if units prefetch in software. One row of 8-bit weights needs no unpacking; the hardware prefetcher always follows it.
bool asks_for(const Weight& weight, index_t rows) {
  if (!weight.follows) return true;
  return rows <= weight.asked_rows && (rows > 1 || weight.codes != Codes::eight);
}

template <class Dot>
auto multiply_for(Codes codes) {
  switch (codes) {
    case Codes::four: return multiply_rows<Dot, Codes::four>;
    case Codes::table: return multiply_rows<Dot, Codes::table>;
    case Codes::six: return multiply_rows<Dot, Codes::six>;
    case Codes::five: return multiply_rows<Dot, Codes::five>;
    case Codes::three: return multiply_rows<Dot, Codes::three>;
    case Codes::two: return multiply_rows<Dot, Codes::two>;
    default: return multiply_rows<Dot, Codes::eight>;
  }
}

// Number of whole steps that hold `k`.
QT_INLINE index_t steps_of(index_t k, const CodeStep& step) { return parts_of(k, step.k); }

// Fields that all units of an item share. The others are left uninitialized: clearing them would take measurable time.
QT_INLINE void begin_units(const LinearCall& call, const Plan& plan, const LinearItem& item, Unit& unit) {
  const Weight& weight = *call.weight;
  const std::int32_t middle = middle_of(weight.codes);
  unit.scales = weight.scales;
  unit.column_scales = weight.memory + item.tile * weight.tile_bytes;
  unit.x_stride = call.prepared_stride;
  unit.over_middle = 1.0f / float(middle), unit.table = &weight.table;
  unit.biased = 1 - kDotBias / middle;  // an offset is -middle * sum(x); times `biased` it is (kDotBias - middle) * sum(x)
  unit.whole = plan.whole;
  unit.line = plan.expanded ? plan.width * 4 : plan.step.bytes;
  unit.steps = steps_of(plan.in_group, plan.step);
  unit.in_block = plan.block == plan.in_group ? 1 : plan.block / plan.in_group;
  unit.group_stride = unit.steps * unit.line;
  unit.weight_stride = plan.expanded ? plan.block * plan.width : plan.block_bytes;
  unit.head_stride = plan.block_bytes, unit.head_bytes = weight.head_bytes;
  if (plan.singles) {
    unit.scales = singles_of(weight.scales);
    unit.head_stride = unit.in_block * single_bytes(weight.scales);
  }
}

// Rows of a unit. With a hardware prefetcher that follows, units take all columns: the first reads the piece from memory
// sequentially, the others from cache. Taller units of half the columns need slightly fewer loads per multiplication, but would
// break the sequential read.
template <class Dot>
index_t unit_rows_of(const Weight& weight, const LinearItem& item, const Plan& plan) {
  if (plan.expanded || !weight.follows || item.to - item.from < kTileColumns) return Dot::kUnitRows;
  index_t rows = Dot::kUnitRows;
  while (rows > 1 && vectors_of<Dot>(int(rows)) * kLanes < kTileColumns) --rows;
  return rows;
}

template <class Dot>
Plan plan_of(const LinearCall& call, const LinearItem& item) {
  const Weight& weight = *call.weight;
  Plan plan{};
  plan.rows = item.rows, plan.x = quantized_x(call);
  plan.grouped = weight.group != kWholeDepth, plan.whole = are_eight_bits(call.inputs) && !plan.grouped;
  plan.expanded = is_expanded(weight.codes, item.rows, weight.follows);
  const index_t unit_rows = unit_rows_of<Dot>(weight, item, plan);
  plan.piece = plan.expanded ? kExpandedPiece : item.rows <= kStreamRows ? kStreamPiece : kPiece;
  // With more units, too little of a longer piece would be in cache.
  const bool once = plan.piece == kStreamPiece && item.rows <= unit_rows;
  if (!plan.whole) plan.piece = even_piece(weight, once && weight.slices > 1 ? kStreamSlice : plan.piece);
  if (item.rows == 1 && weight.slices == 1 && weight.depth <= kRowDepth) plan.piece = kRowDepth;
  plan.in_group = plan.whole ? plan.piece : plan.grouped ? weight.group : call.x_group;
  plan.step = step_of(plan.expanded ? Codes::eight : weight.codes);
  plan.units = (item.rows + unit_rows - 1) / unit_rows;
  plan.unit_rows = item.rows / plan.units, plan.larger_units = item.rows - plan.units * plan.unit_rows;
  const index_t most = plan.unit_rows + (plan.larger_units > 0), width = vectors_of<Dot>(int(most)) * kLanes;
  plan.width = width < item.to - item.from ? width : item.to - item.from;
  const bool asks = asks_for(weight, item.rows);
  plan.alone = !asks && !plan.expanded && plan.units == 1 && plan.width == kTileColumns;
  plan.near = asks && !plan.expanded;
  plan.singles = plan.units > 1 && is_composed(weight.scales);
  plan.parts = (item.to - item.from) * item.spans / plan.width;
  plan.block = plan.grouped ? weight.block : plan.in_group;
  plan.block_bytes = plan.grouped ? weight.block_bytes : plan.in_group * kTileColumns;
  plan.multiply = multiply_for<Dot>(plan.expanded ? Codes::eight : weight.codes);
  if constexpr (kDotsBytes && kLanes == 16) {
    const bool alike = !plan.whole && weight.depth % plan.in_group == 0 && plan.width == kTileColumns;
    const MultiplyUnit row =
        item.rows == 1 && alike ? row_multiplier<Dot>(weight.codes, weight.scales, weight.group, asks) : nullptr;
    if (row != nullptr) plan.multiply = row;
  }
  return plan;
}

// Prefetch of the next piece, distributed over the passes of the current one. Narrow items prefetch only their own columns; other
// threads own the rest.
struct Ahead {
  const char* memory;  // null: no prefetch
  bool narrow;
  index_t apart, in_pass;  // bytes
  index_t at_head;  // lines
  index_t further;  // bytes from the piece's end to the next piece
  const char* end;  // of the piece; null: no L1 prefetch

  // steps, blocks: of a pass. head_bytes: of a block.
  Ahead(const Piece& piece, const Piece& next, const LinearItem& item, const Plan& plan, index_t steps, index_t blocks,
        index_t head_bytes)
      : memory(plan.alone ? nullptr : next.memory), narrow((item.to - item.from) * item.spans < kTileColumns), apart(kLineBytes),
        in_pass(0), at_head(0), further(next.memory - (piece.memory + piece.bytes)),
        end(plan.near ? piece.memory + piece.bytes : nullptr) {
    if (plan.alone || narrow) return;
    index_t places = steps * (plan.width / kLanes * plan.step.bytes / kCodeLine);
    const index_t passes = plan.parts * plan.units;
    if (places * passes * kLine < next.bytes) at_head = (head_bytes + passes * kLine - 1) / (passes * kLine);
    places += blocks * at_head;
    apart = (next.bytes + places * passes - 1) / (places * passes);
    in_pass = places * apart;
  }
  // Prefetch of unit `unit` for the columns from `column` on. Must be called for all parts of an item in order.
  Fetch next(index_t unit, index_t column) {
    if (narrow) return {memory + column * 4, unit == 0 ? apart : 0, 0, end, further};
    const Fetch fetch{memory, apart, at_head, end, further};
    memory += in_pass;
    return fetch;
  }
};

// Buffers of a thread for one item.
struct alignas(64) Buffers {
  float sums[kMaxPanelRows * kTileColumns];                // of a slice
  float total[kTreeHeight][kMaxPanelRows * kTileColumns];  // of the slices so far; several for leaves only
  char bytes[kExpandedPiece * kTileColumns];
  char singles[kPiece / kLeastGroup * single_bytes(Scales::single_shift)];  // of a piece's groups
};

// Expands the codes of a unit's columns of a piece to bytes.
void expand_piece(const Weight& weight, const Plan& plan, const Piece& piece, index_t column, char* bytes) {
  const Expand expand = expander_of(weight.codes);
  const CodeStep step = step_of(weight.codes);
  const index_t block = plan.block;
  const char* codes = piece.memory + weight.head_bytes;
  for (index_t left = piece.depth; left > 0; left -= block, codes += plan.block_bytes, bytes += block * plan.width)
    expand(codes, column, plan.width, steps_of(left < block ? left : block, step), weight.table, bytes, plan.width * 4);
}

// Converts the scales of a piece's groups to fp32, for an item's columns.
void make_singles(const Weight& weight, const Plan& plan, const LinearItem& item, const Piece& piece, char* singles) {
  const MakeSingles make = singles_maker_of(weight.scales);
  const index_t in_block = plan.block / plan.in_group;
  const char* head = piece.memory;
  for (index_t groups = parts_of(piece.depth, plan.in_group); groups > 0; groups -= in_block) {
    for (index_t span = 0; span < item.spans; ++span)
      make(head, groups < in_block ? groups : in_block, item.from + span * kPairedColumns, item.to - item.from,
           1.0f / float(middle_of(weight.codes)), singles);
    head += plan.block_bytes, singles += in_block * single_bytes(weight.scales);
  }
}

// Computes all slices of an item. The first slice accumulates in `first_sums`, which receives the total. Finishes the outputs if
// the item has all of k. after: the thread's probable next piece.
template <class Dot>
void multiply_slices(const LinearCall& call, const Plan& plan, const LinearItem& item, const Piece& after, float* first_sums,
                     Buffers& buffers) {
  const Weight& weight = *call.weight;
  const Finish target{call, item.tile, item.from, item.to};
  const FinishRows finish_rows = finish_for(call);
  const QuantizedX& x = plan.x;
  Unit unit;
  begin_units(call, plan, item, unit);
  if (plan.near && !call.sliced)
    for (index_t at = 0; at < kTileColumns * 4; at += 64) __builtin_prefetch(unit.column_scales + at, 0, 3);
  for (index_t begin = item.k, end; begin < item.k_end; begin = end) {
    const Piece piece = piece_at(weight, plan, item, begin);
    end = begin + piece.depth;
    const bool in_first = plan.whole || begin < item.k + weight.slice_depth;
    float* const sums = in_first ? first_sums : buffers.sums;
    // A single group starts with its offset in its first slice; its other slices start with zero.
    unit.first = begin == 0;
    unit.ends = end == item.k_end || is_between_slices(weight, end);
    unit.last = end == item.k_end && !call.sliced;
    if (begin == item.k ? !plan.whole || begin != 0 : !plan.whole && is_between_slices(weight, begin)) clear(sums, item);
    const index_t first_group = plan.whole ? 0 : parts_before(begin, plan.in_group);
    unit.groups = plan.whole ? 1 : parts_of(piece.depth, plan.in_group);
    const index_t in_last = piece.depth - (unit.groups - 1) * plan.in_group;
    unit.last_steps = steps_of(in_last, plan.step);
    unit.heads = plan.singles ? buffers.singles : piece.memory;
    if (plan.singles) make_singles(weight, plan, item, piece, buffers.singles);
    const index_t steps = (unit.groups - 1) * unit.steps + unit.last_steps;
    const Piece next = end == item.k_end ? after : piece_at(weight, plan, item, end);
    Ahead ahead(piece, next, item, plan, steps, parts_of(piece.depth, plan.block), weight.head_bytes);
    for (index_t part = 0; part < plan.parts; ++part) {
      unit.column = column_of(item, part * plan.width);
      unit.weight = piece.memory + weight.head_bytes + unit.column * 4;
      if (plan.expanded) {
        expand_piece(weight, plan, piece, unit.column, buffers.bytes);
        unit.weight = buffers.bytes;
      }
      const bool finishes = unit.last && part + 1 == plan.parts && weight.leaves == 1;
      for (index_t u = 0, row = 0, rows; u < plan.units; ++u, row += rows) {
        rows = plan.unit_rows + (u < plan.larger_units);
        if (finishes) prefetch_outputs(target, item.row + row, rows);
        const char* x_row = (const char*)call.prepared + (item.row + row) * call.prepared_stride;
        unit.x = x_row + begin / 4 * Dot::x_bytes;
        unit.x_scales = (const float*)(x_row + x.scales_at) + first_group;
        unit.x_offsets = (const std::int32_t*)(x_row + x.offsets_at) + first_group;
        unit.x_shares = (const float*)(x_row + x.shares_at) + first_group;
        unit.sums = sums + row * kTileColumns + unit.column;
        unit.total = in_first ? nullptr : first_sums + row * kTileColumns + unit.column;
        unit.fetch = ahead.next(u, unit.column);
        plan.multiply(unit, rows, plan.width);
        if (finishes) finish_rows(target, first_sums + row * kTileColumns, item.row + row, rows);
      }
    }
  }
}

// Adds the results of an item's leaves in buffers.total[0].
template <class Dot>
void multiply_leaves(const LinearCall& call, const Plan& plan, const LinearItem& item, const Piece& after, Buffers& buffers) {
  const Weight* const weights = call.weight;
  add_as_tree(
      weights->leaves,
      [&](index_t leaf, index_t place) {
        const Piece next = leaf + 1 < weights->leaves ? piece_at(weights[leaf + 1], plan, item, item.k) : after;
        multiply_slices<Dot>(leaf_of(call, leaf), plan, item, next, buffers.total[place], buffers);
      },
      [&](index_t from, index_t to) { add_sums(item, item.rows, buffers.total[from], buffers.total[to]); });
}

template <class Dot>
void multiply_item(const LinearCall& call, const Plan& plan, const LinearItem& item, const Piece& after, Buffers& buffers) {
  float* const total = buffers.total[0];
  if (call.sliced) {
    float* const sums = partials_of(call, item, item.slice);
    multiply_slices<Dot>(item.leaf == 0 ? call : leaf_of(call, item.leaf), plan, item, after, sums, buffers);
    if (!brings_last_slice(call, item)) return;
    add_integer_slices(call, item, total);
  } else if (call.weight->leaves == 1) {
    return multiply_slices<Dot>(call, plan, item, after, total, buffers);
  } else {
    multiply_leaves<Dot>(call, plan, item, after, buffers);
  }
  finish_for(call)({call, item.tile, item.from, item.to}, total, item.row, item.rows);
}

template <class Dot>
void multiply_items_as(const LinearCall& call, index_t begin, index_t end) {
  const index_t turn = (end - begin) * call.threads;
  LinearItem item = item_of(call, begin);
  Plan plan = plan_of<Dot>(call, item);
  if (begin < turn) {  // no earlier item prefetched it
    const Piece piece = piece_at(call.weight[item.leaf], plan, item, item.k);
    prefetch_begin(piece.memory, piece.memory + piece.bytes);
  }
  Buffers& buffers = *(Buffers*)thread_memory(sizeof(Buffers));
  for (index_t i = begin; i < end; ++i) {
    const index_t next = i + 1 < end ? i + 1 : begin + turn;  // the thread's probable next item
    const LinearItem next_item = item_of(call, next < call.items ? next : i);
    if (item.rows != plan.rows) plan = plan_of<Dot>(call, item);
    const Piece after = piece_at(call.weight[next_item.leaf], plan, next_item, next_item.k);
    multiply_item<Dot>(call, plan, item, after, buffers);
    item = next_item;
  }
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  if (are_eight_bits(call.inputs))
    multiply_items_as<Dot8>(call, begin, end);
  else
    multiply_items_as<Dot16>(call, begin, end);
}

Preparation preparation(const Weight& weight, Dtype, Inputs inputs) {
  const index_t least = weight.group < kXBlock ? kXBlock : weight.group;
  const index_t group = weight.group != kWholeDepth ? least : are_eight_bits(inputs) ? weight.depth : kXGroup;
  const index_t row_bytes = quantized_x(weight, group, are_eight_bits(inputs)).row_bytes;
  // Whole units of both precisions.
  const index_t rows = kPanelBytes / row_bytes / Dot8::kUnitRows * Dot8::kUnitRows;
  const index_t panel_rows = rows < kFewestPanelRows ? kFewestPanelRows : rows < kMaxPanelRows ? rows : kMaxPanelRows;
  return {1, row_bytes, group, panel_rows};
}

index_t prepare_items(const LinearCall& call) { return call.rows; }

}  // namespace

const LinearKernels integer_linear = {preparation, prepare_items, quantize_rows, multiply_items};

}  // namespace qt::QT_ISA
