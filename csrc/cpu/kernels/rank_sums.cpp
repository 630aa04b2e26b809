// y = sums of rank 0 + sums of rank 1 + ... (+ bias), rounded; then (+ residual), rounded again: what a linear layer does with its
// sums, where several processes have made parts of them.
//
// A thread owns up to 512 numbers of a row. Bytes: four of each rank's sums, written by another core just before, two or four of y
// and of the residual. Limiter: what other cores wrote has to come here. Every output's order is that of the ranks.
#include "rank_sums.hpp"

#include "simd.hpp"

namespace qt::QT_ISA {
namespace {

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
      f32v value = load(sums + column, count);
      for (index_t rank = 1; rank < c.ranks; ++rank) value += load(sums + rank * c.stride + column, count);
      if (bias) value += load(bias + column, count);
      if (residual) value = rounded_to<Element>(value) + load(residual + at, count);
      store(y + at, value, count);
    }
  }
}

}  // namespace

extern const RankKernels rank_sums;
const RankKernels rank_sums = {{add_sums<bf16>, add_sums<fp16>, add_sums<float>}};

}  // namespace qt::QT_ISA
