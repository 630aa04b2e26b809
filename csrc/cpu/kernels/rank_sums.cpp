// y = all ranks' sums (+ bias), rounded; then (+ residual), rounded again: what a linear layer does with its sums, where several
// processes have made parts of them.
//
// A thread owns up to 512 numbers of a row. Bytes: four of each rank's sums, written by another core just before, two or four of y
// and of the residual. Limiter: what other cores wrote has to come here. Every output's sums are added as a tree, those of
// adjacent ranks first: (0 + 1) + (2 + 3); for counts that are no power of two, followed by a smaller tree.
#include "rank_sums.hpp"

#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

constexpr int kHeight = 7;  // of a tree of kMostRanks

// The numbers from `sums` on of all ranks.
QT_INLINE f32v sum_of_ranks(const RankSumCall& c, const float* sums, index_t count) {
  f32v places[kHeight];  // of what is not added yet: as many as the binary number of ranks so far has ones
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
      const f32v added = bias ? load(bias + column, count) : f32v{};  // zero is added too, as by a linear layer: it has a sign
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
