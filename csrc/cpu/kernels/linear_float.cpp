// y[M, N] = x[M, K] · W[N, K]ᵀ in bf16, fp16 or fp32, accumulated in fp32.
//
// A thread owns 64 columns (a tile; 32 or 16 where tiles are few) for a panel of up to 192 rows. K goes in pieces, so
// that a tile's piece stays in the caches while the panel's rows pass over it; sums wait in between as fp32. Within a
// piece a unit of 6 rows x 64 columns (AVX-512: 24 registers of sums) loads the weights of one step of k once and
// multiplies them with 6 broadcasts of x. x and weights are widened to fp32: weights in registers, or where more than
// kDirectRows rows share them once per piece into a buffer; x piece by piece, or for more than kOwnRows rows once before
// (the op's scratch). bf16 where the processor's dot product of pairs is fast (Weight::dot): a step is two k,
// VDPBF16PS, nothing is widened.
//
// Bytes moved per panel: the weight once (each unit prefetches its share of the next piece: memory streams while the
// units compute), x once per tile out of the cache, y once. Limiter: the weight's bandwidth up to some 12 rows, then
// the multiply rate.
//
// Reduction order: one fp32 sum per output, k ascending (VDPBF16PS: in pairs), then the bias, one rounding. It depends
// on neither M nor the place of a row or column in units, panels and pieces: a row has the same bits in every batch.
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

constexpr index_t kPiece = 128;      // k at a time: 32 KiB in fp32
constexpr index_t kOwnRows = 12;    // rows of an item that widens x for itself
constexpr index_t kDirectRows = 36;  // rows for which weights are widened in registers, by each unit
static_assert(kPiece % 2 == 0);

// A unit's share of one piece.
struct Unit {
  const void* x;     // of its first row
  index_t x_stride;  // elements of what x points to
  const char* weight;
  index_t steps;
  bool odd;     // pairs: one single k follows the steps
  float* sums;  // [rows][64]
  bool first;   // sums begin at zero
  const char* ahead;  // what to prefetch: the lines of `ahead_steps` steps from here
  index_t ahead_steps;
};

#if defined(__AVX512BF16__)
// Two neighbouring k of bf16 per step, x as it is.
struct NativePairs {
  using X = bf16;
  static constexpr index_t k = 2, bytes = kTileColumns * 4;

  template <int R, int V>
  QT_INLINE void step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    i32v w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load_bits(weight + v * 64);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const i32v a = spread_word(x + r * x_stride);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = dot_pairs(sums[r][v], a, w[v]);
    }
  }

  template <int R, int V>
  QT_INLINE void odd_step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v)
        sums[r][v] = dot_pairs(sums[r][v], all(std::int32_t(x[r * x_stride].bits)), load_bits(weight + v * 64));
  }
};
#endif

// Two neighbouring k of bf16 per step, x in fp32; the lower k first.
struct WidePairs {
  using X = float;
  static constexpr index_t k = 2, bytes = kTileColumns * 4;

  template <int R, int V>
  QT_INLINE void step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    f32v w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = as_float(load_bits(weight + v * kLanes * 4) << 16);
    multiply_one(sums, x, x_stride, w);
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = as_float(load_bits(weight + v * kLanes * 4) & all(std::int32_t(0xFFFF0000)));
    multiply_one(sums, x + 1, x_stride, w);
  }

  template <int R, int V>
  QT_INLINE void multiply_one(f32v (&sums)[R][V], const X* x, index_t x_stride, const f32v (&w)[V]) {
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const f32v a = all(x[r * x_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(a, w[v], sums[r][v]);
    }
  }

  template <int R, int V>
  QT_INLINE void odd_step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v)
#pragma GCC unroll 6
      for (int r = 0; r < R; ++r)
        sums[r][v] = fma(all(x[r * x_stride]), as_float(load_bits(weight + v * kLanes * 4) << 16), sums[r][v]);
  }
};

// One k per step, x in fp32.
template <class Element>
struct Single {
  using X = float;
  static constexpr index_t k = 1, bytes = kTileColumns * index_t(sizeof(Element));

  template <int R, int V>
  QT_INLINE void step(f32v (&sums)[R][V], const X* x, index_t x_stride, const char* weight) {
    f32v w[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) w[v] = load((const Element*)weight + v * kLanes);
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const f32v a = all(x[r * x_stride]);
#pragma GCC unroll 8
      for (int v = 0; v < V; ++v) sums[r][v] = fma(a, w[v], sums[r][v]);
    }
  }

  template <int R, int V>
  QT_INLINE void odd_step(f32v (&)[R][V], const X*, index_t, const char*) {}
};

// `fetches` groups of `Spread` steps, in each of which one step's lines of what comes next are fetched: a few at a time,
// for a burst of them would fill the core's line fill buffers and stop the loads that the multiplications wait for.
template <class Step, int R, int V, int Spread>
QT_INLINE void multiply_and_fetch(f32v (&sums)[R][V], const typename Step::X*& x, index_t x_stride, const char*& weight,
                                  const char* fetch, index_t fetches) {
  constexpr int kLine = 64, kBytes = int(Step::bytes) * V * kLanes / int(kTileColumns);
  constexpr int kLines = kBytes < kLine ? 1 : kBytes / kLine;
  for (index_t group = 0; group < fetches; ++group, fetch += Step::bytes)
#pragma GCC unroll 4
    for (int part = 0; part < Spread; ++part, x += Step::k, weight += Step::bytes) {
#pragma GCC unroll 8
      for (int line = part * kLines / Spread; line < (part + 1) * kLines / Spread; ++line)
        __builtin_prefetch(fetch + line * kLine, 0, 2);
      Step::template step<R, V>(sums, x, x_stride, weight);
    }
}

template <class Step, int R, int V>
void multiply(const Unit& unit) {
  const typename Step::X* x = (const typename Step::X*)unit.x;
  const index_t x_stride = unit.x_stride, fetches = unit.ahead_steps;
  const char* weight = unit.weight;
  f32v sums[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) sums[r][v] = unit.first ? f32v{} : load(unit.sums + r * kTileColumns + v * kLanes);
  const int spread = 4 * fetches <= unit.steps ? 4 : 2 * fetches <= unit.steps ? 2 : 1;
  if (spread == 4)
    multiply_and_fetch<Step, R, V, 4>(sums, x, x_stride, weight, unit.ahead, fetches);
  else if (spread == 2)
    multiply_and_fetch<Step, R, V, 2>(sums, x, x_stride, weight, unit.ahead, fetches);
  else
    multiply_and_fetch<Step, R, V, 1>(sums, x, x_stride, weight, unit.ahead, fetches);
  for (index_t s = spread * fetches; s < unit.steps; ++s, x += Step::k, weight += Step::bytes)
    Step::template step<R, V>(sums, x, x_stride, weight);
  if (unit.odd) Step::template odd_step<R, V>(sums, x, x_stride, weight);
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 8
    for (int v = 0; v < V; ++v) store(unit.sums + r * kTileColumns + v * kLanes, sums[r][v]);
}

// Columns [from, to) of a unit of `rows` rows; the unit points to column 0.
template <class Step, int R>
void multiply_columns(const Unit& unit, index_t from, index_t to) {
  constexpr int V = vectors_for(R);
  constexpr index_t kByte = Step::bytes / kTileColumns;
  Unit part = unit;
  for (index_t column = from; column < to;) {
    part.weight = unit.weight + column * kByte;
    part.ahead = unit.ahead + column * kByte;
    part.sums = unit.sums + column;
    if (to - column >= V * kLanes) {
      multiply<Step, R, V>(part);
      column += V * kLanes;
    } else if (V > 2 && to - column >= 2 * kLanes) {
      multiply<Step, R, 2>(part);
      column += 2 * kLanes;
    } else {
      multiply<Step, R, 1>(part);
      column += kLanes;
    }
  }
}

template <class Step>
void multiply_rows(const Unit& unit, index_t rows, index_t from, index_t to) {
  switch (rows) {
    case 1: return multiply_columns<Step, 1>(unit, from, to);
    case 2: return multiply_columns<Step, 2>(unit, from, to);
    case 3: return multiply_columns<Step, 3>(unit, from, to);
    case 4: return multiply_columns<Step, 4>(unit, from, to);
    case 5: return multiply_columns<Step, 5>(unit, from, to);
    default: return multiply_columns<Step, 6>(unit, from, to);
  }
}

using MultiplyRows = void (*)(const Unit&, index_t rows, index_t from, index_t to);

// How a step multiplies: so many k, `bytes` of the tile, x in numbers of `x_size` bytes.
struct Way {
  MultiplyRows rows;
  index_t k, bytes, x_size;
};

template <class Step>
constexpr Way kWay = {multiply_rows<Step>, Step::k, Step::bytes, index_t(sizeof(typename Step::X))};

// Straight from the tile.
Way way_of(const Weight& weight) {
#if defined(__AVX512BF16__)
  if (weight.format == Dtype::bf16 && weight.dot) return kWay<NativePairs>;
#endif
  return weight.format == Dtype::bf16   ? kWay<WidePairs>
         : weight.format == Dtype::fp16 ? kWay<Single<fp16>>
                                        : kWay<Single<float>>;
}

bool widens(const Weight& weight) {
#if defined(__AVX512BF16__)
  if (weight.dot && weight.format == Dtype::bf16) return false;
#endif
  return weight.format != Dtype::fp32;
}

template <class Element>
void widen_row(const Element* x, index_t depth, float* out) {
  for (index_t k = 0; k < depth; k += kLanes) store(out + k, load(x + k, depth - k));
}

void widen_row(Dtype dtype, const void* x, index_t at, index_t depth, float* out) {
  if (dtype == Dtype::bf16)
    widen_row((const bf16*)x + at, depth, out);
  else
    widen_row((const fp16*)x + at, depth, out);
}

// `depth` k of a tile as fp32 [k][64].
void widen_piece(Dtype format, const char* weight, index_t depth, float* out) {
  if (format == Dtype::fp16) {
    for (index_t i = 0; i < depth * kTileColumns; i += kLanes) store(out + i, load((const fp16*)weight + i));
    return;
  }
  for (index_t k = 0; k < depth; k += 2, weight += kTileColumns * 4, out += 2 * kTileColumns)
    for (index_t c = 0; c < kTileColumns; c += kLanes) {
      const i32v pair = load_bits(weight + c * 4);
      store(out + c, as_float(pair << 16));
      if (k + 1 < depth) store(out + kTileColumns + c, as_float(pair & all(std::int32_t(0xFFFF0000))));
    }
}

// An item's buffers.
struct alignas(64) Buffers {
  float sums[kMaxPanelRows * kTileColumns];
  float weights[kPiece * kTileColumns];
  float x[kRows * kPiece];  // of a unit
};

void multiply_item(const LinearCall& call, const Item& item, const char* weight_end, Buffers& buffers) {
  const Weight& weight = *call.weight;
  const FinishRows finish_rows = finish_for(call.dtype);
  const Finish target{call, item.tile, item.from, item.to};
  const Way stored = way_of(weight);
  const bool widens_x = widens(weight) && !call.is_prepared, widens_weights = widens(weight) && item.rows > kDirectRows;
  const Way way = widens_weights ? kWay<Single<float>> : stored;
  const index_t piece_bytes = kPiece / stored.k * stored.bytes;
  const char* piece = weight.memory + item.tile * weight.tile_bytes;
  for (index_t begin = 0; begin < weight.depth; begin += kPiece) {
    const bool last = begin + kPiece >= weight.depth;
    const index_t depth = last ? weight.depth - begin : kPiece;
    const index_t bytes = (depth + stored.k - 1) / stored.k * stored.bytes;
    // As many bytes one piece on, which may be the next tile's; each unit fetches its share of them.
    const char* next = piece + piece_bytes;
    const index_t next_steps = (weight_end - next < bytes ? weight_end - next : bytes) / way.bytes;
    const index_t share = (next_steps + item.units - 1) / item.units;
    if (widens_weights) widen_piece(weight.format, piece, depth, buffers.weights);
    Unit unit{};
    unit.x_stride = widens_x ? kPiece : call.prepared_stride / way.x_size;
    unit.weight = widens_weights ? (const char*)buffers.weights : piece;
    unit.steps = depth / way.k;
    unit.odd = way.k == 2 && depth % 2 != 0;
    unit.first = begin == 0;
    for (index_t row = 0, fetched = 0; row < item.rows; row += item.unit_rows, fetched += share) {
      const index_t rows = item.rows - row < item.unit_rows ? item.rows - row : item.unit_rows;
      if (last) prefetch_outputs(target, item.row + row, rows);
      if (widens_x) {
        for (index_t r = 0; r < rows; ++r)
          widen_row(call.dtype, call.x, (item.row + row + r) * call.x_stride + begin, depth, buffers.x + r * kPiece);
        unit.x = buffers.x;
      } else {
        unit.x = (const char*)call.prepared + (item.row + row) * call.prepared_stride + begin * way.x_size;
      }
      unit.sums = buffers.sums + row * kTileColumns;
      const index_t left = next_steps - fetched;
      unit.ahead = next + fetched * way.bytes;
      unit.ahead_steps = left <= 0 ? 0 : left < share ? left : share;
      if (unit.ahead_steps > unit.steps) unit.ahead_steps = unit.steps;
      way.rows(unit, rows, item.from, item.to);
      if (last) finish_rows(target, unit.sums, item.row + row, rows);
    }
    piece += bytes;
  }
}

void multiply_items(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  // Prefetching may run on into the tiles that this thread takes next, no further.
  const char* weight_end = call.weight->memory + (item_of(call, end - 1, kRows).tile + 1) * call.weight->tile_bytes;
  prefetch_begin(call.weight->memory + item_of(call, begin, kRows).tile * call.weight->tile_bytes, weight_end);
  Buffers buffers;
  for (index_t i = begin; i < end; ++i) multiply_item(call, item_of(call, i, kRows), weight_end, buffers);
}

// --- x in fp32, for more rows ---

Preparation preparation(const Weight& weight, Dtype, bool) {
  return {widens(weight) ? kOwnRows + 1 : kNever, (weight.depth + 15) / 16 * 16 * 4 + 64, 0};
}

void prepare(const void* described, index_t begin, index_t end) {
  const LinearCall& call = *(const LinearCall*)described;
  for (index_t row = begin; row < end; ++row)
    widen_row(call.dtype, call.x, row * call.x_stride, call.weight->depth,
              (float*)((char*)call.prepared + row * call.prepared_stride));
}

}  // namespace

const LinearKernels float_linear = {preparation, prepare, multiply_items};

}  // namespace qt::QT_ISA
