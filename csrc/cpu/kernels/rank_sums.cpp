// All-reduce of a row-parallel linear layer: y = sum over ranks (+ bias), rounded; then (+ residual), rounded again.
//
// A thread owns up to 512 numbers of a row. Bytes per number: 4 of each rank's sums, written by another core just before; 2 or 4
// of y and of the residual. Limiter: cache-line transfers between cores. Reduction order: a tree that adds adjacent ranks first,
// (0 + 1) + (2 + 3). A rank count that is not a power of two adds a smaller tree at the end. Independent of batch size.
#include "rank_sums.hpp"

#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

constexpr int kHeight = 7;  // height of a tree of kMostRanks

// Sum over all ranks of `count` numbers, the first rank's at `sums`.
QT_INLINE f32v sum_of_ranks(const RankSumCall& c, const float* sums, index_t count) {
  f32v places[kHeight];  // pending partial sums: one for each set bit of the number of ranks so far
  int used = 0;
  for (index_t rank = 0; rank < c.ranks; ++rank) {
    places[used++] = load(sums + rank * c.stride, count);
    for (index_t done = rank; done & 1; done >>= 1, --used) places[used - 2] += places[used - 1];
  }
  for (; used > 1; --used) places[used - 2] += places[used - 1];
  return places[0];
}

template <class Element>
void add_sums(const void* call, index_t begin, index_t end) {
  const RankSumCall& c = *static_cast<const RankSumCall*>(call);
  const Element* const bias = static_cast<const Element*>(c.bias);
  const Element* const residual = static_cast<const Element*>(c.residual);
  Element* const y = static_cast<Element*>(c.y);
  for (index_t piece = begin; piece < end; ++piece) {
    const index_t row = piece / c.pieces_of_row, first = piece % c.pieces_of_row * kSumColumns;
    const index_t last = first + kSumColumns < c.width ? first + kSumColumns : c.width;
    const float* const sums = c.first + row * c.width;
    for (index_t column = first; column < last; column += kLanes) {
      const index_t count = last - column, at = row * c.y_stride + column;
      // Without a bias it adds 0, like a linear layer: this affects the sign of zero.
      const f32v added = bias ? load(bias + column, count) : f32v{};
      f32v value = sum_of_ranks(c, sums + column, count) + added;
      if (residual) value = rounded_to<Element>(value) + load(residual + at, count);
      store(y + at, value, count);
    }
  }
}

}  // namespace

extern const RankKernels rank_sums;
const RankKernels rank_sums = {{add_sums<bf16>, add_sums<fp16>, add_sums<float>}};

}  // namespace qt::QT_ISA
