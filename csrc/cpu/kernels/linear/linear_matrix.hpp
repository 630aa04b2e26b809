// AMX products of one unit with sums in registers (../amx.hpp), for linear layers in bf16 (linear_matrix.cpp) and integers
// (linear_matrix_integer.cpp).
//
// Eight registers, in one of three layouts by the rows of x in a unit:
//
//   rows     x  sums   weights
//   to 16    1  1 x 4  3, in turn
//   to 32    2  2 x 2  2
//   48       1  3 x 2  1: both operands are reloaded
//
// 16-bit activations of integer weights are two planes of bytes: the two registers of x are then the planes of the same 16 rows.
//
// Cycles of a step of 64 bytes of k (32 bf16, 64 bytes), measured on Emerald Rapids (bench/notes/024): a product takes 16. A load
// from the L1 cache takes 8, in parallel with products. 48 rows by 32 columns: products 96, loads 56, 80 lines of operands. 32 by
// 32: 64, 32 and 64. With operands in the L2 cache a product takes 23 cycles for 48 rows, 26 for 32. Storing and reloading a
// unit's sums costs 300 to 400 cycles, so a unit multiplies many k in between. A prefetch of x costs slightly more than it gains.
#pragma once

#include "amx.hpp"
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(QT_AMX)
inline constexpr index_t kUnitRows = 2 * kAmxRows, kLargeUnitRows = 3 * kAmxRows;
inline constexpr int kMostBlocks = 3;  // of x
inline constexpr index_t kBlocks = kTileColumns / kAmxColumns;

// The AMX registers of a thread and their current shape. first_rows, second_rows: rows of x in its first and second register, 0
// if unused. k_bytes: bytes of x in a step, four times the lines of weights. Full registers have one shape, so the shape of two
// full blocks of x also serves three.
class Registers {
 public:
  void shape(index_t first_rows, index_t second_rows, index_t k_bytes = kAmxRowBytes) {
    if (first_rows == first_rows_ && second_rows == second_rows_ && k_bytes == k_bytes_) return;
    first_rows_ = first_rows, second_rows_ = second_rows, k_bytes_ = k_bytes;
    AmxShapes shapes;
    const index_t in_step = k_bytes / 4;
    for (int r = 0; r < 4; ++r) shapes.set(r, second_rows != 0 && r >= 2 ? second_rows : first_rows, kAmxRowBytes);
    shapes.set(4, first_rows, k_bytes);
    shapes.set(5, second_rows != 0 ? second_rows : in_step, second_rows != 0 ? k_bytes : kAmxRowBytes);
    shapes.set(6, in_step, kAmxRowBytes);
    shapes.set(7, in_step, kAmxRowBytes);
    unit.configure(shapes);
  }

  Amx unit;

 private:
  index_t first_rows_ = 0, second_rows_ = 0, k_bytes_ = 0;
};

enum class Numbers { bf16, bytes };

// Start columns of an item's blocks of 16 columns in its tile.
struct Columns {
  index_t count, begin[kBlocks];

  explicit Columns(const LinearItem& item) : count((item.to - item.from) * item.spans / kAmxColumns) {
    for (index_t block = 0; block < count; ++block) begin[block] = column_of(item, block * kAmxColumns);
  }
};

// Prefetch of the next weights into the L2 cache, a few lines after each load of weights. A burst would fill the line fill
// buffers that loads need. Whole tiles prefetch every line; narrower items the lines of their blocks, at most two.
struct NextLines {
  const char *at, *end;
  index_t at_once, apart;
  index_t second;  // bytes to the other block's line; 0: none

  // Distributes `count` lines of all columns, from `lines` on, over `loads` loads.
  static NextLines of(const char* lines, index_t count, const Columns& columns, index_t loads) {
    if (lines == nullptr || loads == 0) return {};
    const bool whole = columns.count == kBlocks;
    const index_t places = whole ? count * kBlocks : count;
    return {lines + columns.begin[0] * 4, lines + count * kLineBytes, (places + loads - 1) / loads,
            whole ? kAmxRowBytes : kLineBytes, whole ? 0 : (columns.begin[columns.count - 1] - columns.begin[0]) * 4};
  }
};

// A unit's share of a piece of k: some rows by some blocks of 16 columns.
struct Share {
  const char* x[kMostBlocks];       // first row of each block of 16 rows, at the piece's first k
  index_t x_rows[kMostBlocks];
  index_t x_stride;       // bytes from a row to the next
  index_t x_step;         // bytes of a step
  const char* weight;     // first line of the piece
  index_t weight_step;    // bytes of a step
  index_t columns[kBlocks];  // start of each block in the tile
  index_t steps;
  bool first;      // sums begin at zero
  char* sums[kMostBlocks];  // for each block of x: [rows][64] fp32 or int32
  NextLines fetch;
};

template <int kFirst, int kCount, class Each>
QT_INLINE void repeat(Each each) {
  if constexpr (kCount > 0) {
    each(std::integral_constant<int, kFirst>{});
    repeat<kFirst + 1, kCount - 1>(each);
  }
}

QT_INLINE void fetch_weights(const NextLines& next, const char*& at) {
  if (at >= next.end) return;
  for (index_t line = 0; line < next.at_once; ++line, at += next.apart) {
    __builtin_prefetch(at, 0, 2);
    if (next.second != 0) __builtin_prefetch(at + next.second, 0, 2);
  }
}

// Forces an address into its own register. Otherwise the compiler adds several addresses in a vector and reloads each from
// memory.
QT_INLINE void keep(const char*& address) { asm("" : "+r"(address)); }

// One step of kX blocks of x by kWeights blocks of columns. With three blocks of x, odd ones take the columns in reverse order
// and reuse the loaded register.
template <Numbers kNumbers, int kX, int kWeights, class Fetch>
QT_INLINE void multiply_step(Amx& unit, const char* const* x, index_t x_stride, const char* weight, index_t second_block,
                             Fetch fetch) {
  constexpr bool kLarge = kX > 2;
  constexpr int kWeight = kLarge ? 7 : 4 + kX, kTurns = kLarge ? 1 : 4 - kX;  // first register of weights, and their number
  repeat<0, kX>([&](auto i) {
    constexpr int kFrom = kLarge ? 6 : 4 + i;
    unit.load<kFrom>(x[i], x_stride);
    repeat<0, kWeights>([&](auto turn) {
      constexpr int j = kLarge && i % 2 == 1 ? kWeights - 1 - turn : turn, kSum = 2 * i + j, kColumns = kWeight + j % kTurns;
      if constexpr (i == 0 || (kLarge && turn > 0)) unit.load<kColumns>(weight + j * second_block, kLineBytes);
      if constexpr (i == 0) fetch();
      if constexpr (kNumbers == Numbers::bf16)
        unit.multiply_bf16<kSum, kFrom, kColumns>();
      else
        unit.multiply_bytes<kSum, kFrom, kColumns>();
    });
  });
}

// kX blocks of x by kWeights blocks of columns.
template <Numbers kNumbers, int kX, int kWeights>
void multiply_share(Amx& unit, Share& share) {
  static_assert(kX == 1 ? kWeights <= 4 : kX <= kMostBlocks && kWeights <= 2);
  const index_t x_stride = share.x_stride, x_step = share.x_step, weight_step = share.weight_step, steps = share.steps;
  repeat<0, kX>([&](auto i) {
    repeat<0, kWeights>([&](auto j) {
      constexpr int kSum = 2 * i + j;
      if (share.first)
        unit.zero<kSum>();
      else
        unit.load<kSum>(share.sums[i] + share.columns[j] * 4, kLineBytes);
    });
  });
  const char* x[kX];
  const char* weight = share.weight + share.columns[0] * 4;
  repeat<0, kX>([&](auto i) { x[i] = share.x[i]; });
  // Four blocks are all columns of a tile.
  const index_t second_block = kWeights == 2 ? (share.columns[1] - share.columns[0]) * 4 : kAmxRowBytes;
  const NextLines fetch = share.fetch;
  const char* fetching = fetch.at;
  for (index_t s = 0; s < steps; ++s) {
    multiply_step<kNumbers, kX, kWeights>(unit, x, x_stride, weight, second_block, [&] { fetch_weights(fetch, fetching); });
    repeat<0, kX>([&](auto i) {
      x[i] += x_step;
      keep(x[i]);
    });
    weight += weight_step;
    keep(weight);
  }
  repeat<0, kX>([&](auto i) {
    repeat<0, kWeights>([&](auto j) {
      constexpr int kSum = 2 * i + j;
      unit.store<kSum>(share.sums[i] + share.columns[j] * 4, kLineBytes);
    });
  });
  share.fetch.at = fetching;
}

using MultiplyShare = void (*)(Amx&, Share&);  // advances the share's `fetch`

// x_blocks: blocks of 16 rows of x. blocks: of columns, 1 or 2; or 4 for one block of x.
template <Numbers kNumbers>
MultiplyShare multiply_for(index_t x_blocks, index_t blocks) {
  if (x_blocks == 3) return blocks == 2 ? multiply_share<kNumbers, 3, 2> : multiply_share<kNumbers, 3, 1>;
  if (x_blocks == 2) return blocks == 2 ? multiply_share<kNumbers, 2, 2> : multiply_share<kNumbers, 2, 1>;
  if (blocks == 4) return multiply_share<kNumbers, 1, 4>;
  return blocks == 2 ? multiply_share<kNumbers, 1, 2> : multiply_share<kNumbers, 1, 1>;
}
#endif

}  // namespace
}  // namespace qt::QT_ISA
