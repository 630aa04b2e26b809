// y[M, N] = x[M, K] · W[N, K]ᵀ with 8- and 4-bit weights, multiplied as integers: nothing is dequantized.
//
// x is quantized first (kernels/linear_quantize.hpp), per row and group of k to 16 bits, or per row to 8, and multiplied
// in units of some rows by some columns (kernels/linear_integer_unit.hpp).
//
// A thread owns a tile of 64 columns (32 or 16 where tiles are few) for a panel of rows. K goes in pieces; while a
// piece's units are multiplied, the next piece, or the first one of the tile that this thread probably takes next, is
// fetched into the second-level cache, evenly over the units. Where many rows share 4-bit weights, they become bytes
// once per piece, in a buffer. Bytes per panel: the weight once (1 or 1/2 byte a number, scales beside it), x once per
// tile (per half of one for many rows) out of the cache. Limiter: the weight's bandwidth up to some 20 rows, then the
// multiply rate, half of it for 16-bit x.
//
// Reduction order: the sum over a group of k is an integer and exact: the same on every processor, in any order. Then,
// groups ascending, fma(float(sum), scale of w * scale of x, result), and once at the end the column's scale.
#include "linear_integer_unit.hpp"
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

// k at a time, whole groups: short for few rows, for which the memory never rests, so that little is read before
// anything is fetched; for more rows so much that two pieces leave the cache to the rows of x.
constexpr index_t kStreamPiece = 512, kPiece = 2048, kExpandedPiece = 1024;
constexpr index_t kStreamRows = 32;
constexpr index_t kExpandFrom = 16;       // rows in a panel from which 4-bit weights are expanded once
constexpr index_t kPanelBytes = 1 << 20;  // of x, half of a second-level cache
constexpr index_t kFewestPanelRows = 48;  // or weights would be read too often

// `steps` lines of 4-bit weights, `columns` of them, as twice as many lines of bytes.
void expand(const char* weight, index_t steps, index_t columns, char* out) {
  const i32v nibbles = all(std::int32_t(0x0F0F0F0F));
  const index_t line = columns * 4;
  for (index_t s = 0; s < steps; ++s, weight += kLineBytes, out += 2 * line)
    for (index_t byte = 0; byte < line; byte += kLanes * 4) {
      const i32v w = load_bits(weight + byte), low = w & nibbles, high = (i32v)((u32v)w >> 4) & nibbles;
      std::memcpy(out + byte, &low, sizeof low);
      std::memcpy(out + line + byte, &high, sizeof high);
    }
}

// How an item is cut.
struct Plan {
  bool grouped, whole, expanded;
  index_t in_group;        // of k that have a scale in common; a piece where all have
  index_t in_step, piece;  // of k: where the units read; at a time
  index_t units, width;    // width: columns of a unit
};

template <class Dot>
Plan plan_of(const LinearCall& call, const Item& item) {
  const Weight& weight = *call.weight;
  const bool four = weight.format == Dtype::int4;
  Plan plan{};
  plan.grouped = weight.group != kWholeDepth, plan.whole = call.int8_activations && !plan.grouped;
  plan.expanded = four && item.rows >= kExpandFrom;
  plan.piece = plan.expanded ? kExpandedPiece : item.rows <= kStreamRows ? kStreamPiece : kPiece;
  plan.in_group = plan.whole ? plan.piece : call.x_group;
  plan.in_step = four && !plan.expanded ? 8 : 4;
  plan.units = (item.rows + Dot::kUnitRows - 1) / Dot::kUnitRows;
  const index_t most = (item.rows + plan.units - 1) / plan.units, width = vectors_of<Dot>(int(most)) * kLanes;
  plan.width = width < item.to - item.from ? width : item.to - item.from;
  return plan;
}

// Some k of a tile, from the first group's scales on, or its integers where there are no groups.
struct Piece {
  index_t depth;
  const char* memory;
  index_t bytes;
};

Piece piece_at(const Weight& weight, const Plan& plan, index_t tile, index_t begin) {
  const index_t left = weight.depth - begin, depth = left < plan.piece ? left : plan.piece;
  const char* memory = weight.memory + tile * weight.tile_bytes + kTileColumns * 4;
  if (!plan.grouped) return {depth, memory + begin * kTileColumns, depth * kTileColumns};
  const index_t groups = (depth + weight.group - 1) / weight.group;
  return {depth, memory + begin / weight.group * weight.group_bytes, groups * weight.group_bytes};
}

// What pass `pass` of `passes` over a piece, of `steps` each, fetches of what comes next.
Fetch fetch_of(const Piece& next, const Item& item, const Plan& plan, index_t pass, index_t passes, index_t steps) {
  if (item.to - item.from < kTileColumns) {  // other threads fetch the rest of its lines
    return {next.memory + item.from * 4, pass == 0 ? kLineBytes : 0};
  }
  const index_t vectors = plan.width / kLanes, places = passes * steps * vectors;
  const index_t apart = (next.bytes + places - 1) / places;
  return {next.memory + pass * steps * vectors * apart, apart};
}

template <class Dot>
void multiply_item(const LinearCall& call, const Item& item, const Item& next_item) {
  alignas(64) float sums[kMaxPanelRows * kTileColumns];
  alignas(64) char bytes[kExpandedPiece * kTileColumns];
  const Weight& weight = *call.weight;
  const FinishRows finish_rows = finish_for(call.dtype);
  const Finish target{call, item.tile, item.from, item.to};
  const Plan plan = plan_of<Dot>(call, item);
  const QuantizedX x = quantized_x(call);
  const auto multiply = plan.in_step == 8 ? multiply_rows<Dot, 4, 1> : multiply_rows<Dot, 8, 1>;
  const index_t parts = (item.to - item.from) / plan.width, passes = parts * plan.units;
  const index_t unit_rows = item.rows / plan.units, larger_units = item.rows % plan.units;
  // Groups of weights lie group_bytes apart; without groups, integers lie one after another.
  const index_t group_bytes = plan.grouped ? weight.group_bytes : plan.in_group * kTileColumns;
  Unit unit{};
  unit.scales = !plan.grouped ? Scales::column : weight.zeros ? Scales::group_and_zero : Scales::group;
  unit.column_scales = weight.memory + item.tile * weight.tile_bytes;
  unit.x_stride = call.prepared_stride;
  unit.zero = zero_of(weight);
  unit.whole = plan.whole;
  unit.line = plan.expanded ? plan.width * 4 : kLineBytes;
  unit.weight_stride = plan.expanded ? plan.in_group * plan.width : group_bytes;
  unit.head_stride = group_bytes;
  if (!plan.whole) std::memset(sums, 0, item.rows * kTileColumns * sizeof(float));
  for (index_t begin = 0; begin < weight.depth; begin += plan.piece) {
    const Piece piece = piece_at(weight, plan, item.tile, begin);
    const index_t first_group = plan.whole ? 0 : begin / plan.in_group;
    unit.groups = (piece.depth + plan.in_group - 1) / plan.in_group;
    const index_t in_last = piece.depth - (unit.groups - 1) * plan.in_group;
    unit.steps = plan.in_group / plan.in_step;
    unit.last_steps = (in_last + plan.in_step - 1) / plan.in_step;
    unit.heads = piece.memory;
    unit.first = begin == 0, unit.last = begin + piece.depth == weight.depth;
    const index_t steps = (unit.groups - 1) * unit.steps + unit.last_steps;
    const Piece next = unit.last ? piece_at(weight, plan, next_item.tile, 0)
                                 : piece_at(weight, plan, item.tile, begin + plan.piece);
    for (index_t pass = 0, row = 0; pass < passes; ++pass) {
      const index_t u = pass % plan.units, rows = unit_rows + (u < larger_units);
      unit.column = item.from + pass / plan.units * plan.width;
      if (u == 0) {
        row = 0;
        unit.weight = piece.memory + weight.head_bytes + unit.column * 4;
        if (plan.expanded) {
          for (index_t g = 0; g < unit.groups; ++g)
            expand(unit.weight + g * group_bytes, (g + 1 < unit.groups ? plan.in_group : in_last + 7) / 8, plan.width,
                   bytes + g * unit.weight_stride);
          unit.weight = bytes;
        }
      }
      const bool finishes = unit.last && pass + plan.units >= passes;
      if (finishes) prefetch_outputs(target, item.row + row, rows);
      const char* x_row = (const char*)call.prepared + (item.row + row) * call.prepared_stride;
      unit.x = x_row + begin / 4 * Dot::x_bytes;
      unit.x_scales = (const float*)(x_row + x.scales_at) + first_group;
      unit.x_offsets = (const std::int32_t*)(x_row + x.offsets_at) + first_group;
      unit.sums = sums + row * kTileColumns + unit.column;
      unit.fetch = fetch_of(next, item, plan, pass, passes, steps);
      multiply(unit, rows, plan.width);
      if (finishes) finish_rows(target, sums + row * kTileColumns, item.row + row, rows);
      row += rows;
    }
  }
}

template <class Dot>
void multiply_items_as(const LinearCall& call, index_t begin, index_t end) {
  const Weight& weight = *call.weight;
  const index_t items = call.panels * call.parts, turn = (end - begin) * call.threads;
  if (begin < turn)  // nothing went before that fetched it
    prefetch_begin(weight.memory + item_of(call, begin).tile * weight.tile_bytes,
                   weight.memory + weight.tiles * weight.tile_bytes);
  for (index_t i = begin; i < end; ++i) {
    const index_t next = i + 1 < end ? i + 1 : begin + turn;  // what this thread probably takes
    multiply_item<Dot>(call, item_of(call, i), item_of(call, next < items ? next : i));
  }
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  if (call.int8_activations)
    multiply_items_as<Dot8>(call, begin, end);
  else
    multiply_items_as<Dot16>(call, begin, end);
}

Preparation preparation(const Weight& weight, Dtype, bool int8_activations) {
  const index_t group = weight.group != kWholeDepth ? weight.group : int8_activations ? weight.depth : kXGroup;
  const index_t row_bytes = quantized_x(weight.depth, group, int8_activations).row_bytes;
  // Whole units, of either kind.
  const index_t rows = kPanelBytes / row_bytes / Dot8::kUnitRows * Dot8::kUnitRows;
  const index_t panel_rows = rows < kFewestPanelRows ? kFewestPanelRows : rows < kMaxPanelRows ? rows : kMaxPanelRows;
  return {1, row_bytes, group, panel_rows};
}

index_t prepare_items(const LinearCall& call) { return call.rows; }

}  // namespace

const LinearKernels integer_linear = {preparation, prepare_items, quantize_rows, multiply_items};

}  // namespace qt::QT_ISA
