// Products in the matrix unit (../amx.hpp): what a thread multiplies while sums stay in its registers. Written for linear
// layers of bf16 (linear_matrix.cpp) and of integers (linear_matrix_integer.cpp).
//
// Eight registers. Of up to 16 rows of x: one register of x, four of sums (all 64 columns of a tile) and the weights in turn
// through three. Of more: two registers of x, two of weights, four of sums. So a step of 64 bytes of k (32 bf16, 64 bytes)
// by 32 rows and 32 columns is four loads and four products. 16-bit activations of integer weights are two planes of bytes:
// the two registers of x are then the planes of the same 16 rows.
//
// Cycles of a step, by Intel's figures (Optimization Reference Manual, 2023, chapter 20) and what was measured
// (docs/performance.md): a product takes as many as x's register has rows, 16; a load 8 from the first-level cache (two
// lines a cycle), 16 to 24 from the second. 32 rows by 32 columns: products 64, loads 32 when x and weights are in the
// first-level cache. So the products are the limit while half of the loads hit there: a piece of weights is kept to 16 KiB
// for 32 columns, which lie in one half of the cache's sets (a line of k is 256 bytes, of which 32 columns are the first or
// the second 128), 8 of its 12 ways; x streams past it, fetched two steps ahead: 32 lines in 64 cycles. Sums of a unit are
// left in memory after each piece and taken up again: 4 stores of 16 cycles and 4 loads of 8 in 8 steps of 64, which other
// ports do, but for some 40 cycles in which the next products wait for the registers.
#pragma once

#include "amx.hpp"
#include "linear_tile.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(QT_AMX)
inline constexpr index_t kUnitRows = 2 * kAmxRows;
inline constexpr index_t kBlocks = kTileColumns / kAmxColumns;
inline constexpr int kAheadSteps = 2;  // in which a line comes from the second-level cache to the first

// The registers of one thread, and the shape that they have. Rows of x: in its first register and in its second, if any. k:
// bytes of x in a step, as many as four times the lines of weights.
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

// Where an item's blocks of 16 columns begin in its tile.
struct Columns {
  index_t count, begin[kBlocks];

  explicit Columns(const LinearItem& item) : count((item.to - item.from) * item.spans / kAmxColumns) {
    for (index_t block = 0; block < count; ++block) begin[block] = column_of(item, block * kAmxColumns);
  }
};

// Lines of weights that come next, to be fetched into the second-level cache, a few after each load of weights: a burst of them
// would fill the buffers that the loads need. Of whole tiles every line; of narrower items those of their blocks, two at most.
struct NextLines {
  const char *at, *end;
  index_t at_once, apart;
  index_t second;  // bytes from a line to the other block's; 0: there is none

  // From `lines` on so many lines of all columns, during so many loads.
  static NextLines of(const char* lines, index_t count, const Columns& columns, index_t loads) {
    if (lines == nullptr || loads == 0) return {};
    const bool whole = columns.count == kBlocks;
    const index_t places = whole ? count * kBlocks : count;
    return {lines + columns.begin[0] * 4, lines + count * kLineBytes, (places + loads - 1) / loads,
            whole ? kAmxRowBytes : kLineBytes, whole ? 0 : (columns.begin[columns.count - 1] - columns.begin[0]) * 4};
  }
};

// What one unit (some rows, some blocks of 16 columns) multiplies of a piece of k.
struct Share {
  const char* x[2];       // of each register of x: its first row, from the piece's first k on
  const char* next_x[2];  // likewise of what is multiplied next
  index_t x_rows[2];
  index_t x_stride;       // bytes from a row to the next
  index_t x_step;         // bytes of a step
  const char* weight;     // the piece's first line
  index_t weight_step;    // bytes of a step
  index_t columns[kBlocks];  // of the tile: where each block begins
  index_t steps;
  bool first;      // sums begin at zero
  char* sums[2];   // of each register of x: [rows][64] fp32 or int32
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

// As many rows as a register has: no branch depends on how many it holds.
QT_INLINE void fetch_rows(const char* row, index_t stride) {
#pragma GCC unroll 16
  for (index_t r = 0; r < kAmxRows; ++r, row += stride) __builtin_prefetch(row, 0, 3);
}

// Keeps an address in a register of its own: the compiler would add several at a time in vectors, and fetch each from memory.
QT_INLINE void keep(const char*& address) { asm("" : "+r"(address)); }

// kX registers of x by kWeights blocks of columns.
template <Numbers kNumbers, int kX, int kWeights>
void multiply_share(Amx& unit, Share& share) {
  static_assert(kX * kWeights <= 4 && (kX == 1 || kWeights <= 2));
  constexpr int kWeight = 4 + kX, kTurns = 4 - kX;  // the first register of weights, and how many there are
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
  const char* ahead[kX];
  const char* weight = share.weight + share.columns[0] * 4;
  repeat<0, kX>([&](auto i) {
    x[i] = share.x[i];
    ahead[i] = steps > kAheadSteps ? share.x[i] + kAheadSteps * x_step : share.next_x[i];
  });
  // Four blocks are all columns of a tile.
  const index_t second_block = kWeights == 2 ? (share.columns[1] - share.columns[0]) * 4 : kAmxRowBytes;
  const NextLines fetch = share.fetch;
  const char* fetching = fetch.at;
  for (index_t s = 0; s < steps; ++s) {
    repeat<0, kX>([&](auto i) {
      if constexpr (kX == 2) fetch_rows(ahead[i], x_stride);  // fewer rows are few lines, and products are not their limit
      unit.load<4 + i>(x[i], x_stride);
      repeat<0, kWeights>([&](auto j) {
        constexpr int kSum = 2 * i + j, kColumns = kWeight + j % kTurns;
        if constexpr (i == 0) {
          unit.load<kColumns>(weight + j * second_block, kLineBytes);
          fetch_weights(fetch, fetching);
        }
        if constexpr (kNumbers == Numbers::bf16)
          unit.multiply_bf16<kSum, 4 + i, kColumns>();
        else
          unit.multiply_bytes<kSum, 4 + i, kColumns>();
      });
    });
    const bool leaves = s + kAheadSteps + 1 == steps;
    repeat<0, kX>([&](auto i) {
      x[i] += x_step;
      ahead[i] = leaves ? share.next_x[i] : ahead[i] + x_step;
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

using MultiplyShare = void (*)(Amx&, Share&);  // moves the share's `fetch` on

// registers: of x. blocks: 1, 2, or 4 of one register of x.
template <Numbers kNumbers>
MultiplyShare multiply_for(index_t registers, index_t blocks) {
  if (registers == 2) return blocks == 2 ? multiply_share<kNumbers, 2, 2> : multiply_share<kNumbers, 2, 1>;
  if (blocks == 4) return multiply_share<kNumbers, 1, 4>;
  return blocks == 2 ? multiply_share<kNumbers, 1, 2> : multiply_share<kNumbers, 1, 1>;
}
#endif

}  // namespace
}  // namespace qt::QT_ISA
