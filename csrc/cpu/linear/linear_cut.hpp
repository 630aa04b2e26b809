// How a multiplication is cut into pieces of work: for linear layers (linear_calls.cpp) and experts (experts.cpp).
// Nothing about a result depends on it.
#pragma once

#include "linear.hpp"

namespace qt {

inline constexpr index_t kSlicedRows = 64;  // up to these, slices may be items of their own

// One way: rows of a panel, columns of an item, whether slices of k are items.
struct Cut {
  index_t panel_rows, width;
  bool sliced;
};

const LinearKernels& linear_kernels_of(const Weight& weight);

// The cheapest way for so many threads; of those that cost alike, with the largest items.
Cut best_cut(const Weight& weight, const Preparation& preparation, index_t rows, index_t threads, bool may_slice);

// A multiplication before its rows are known; ends the process where formats or activation do not fit the weight.
LinearCall linear_call(const Weight* weight, const void* x, index_t x_stride, int dtype, const void* bias,
                       const void* residual, void* y, index_t y_stride, int activation, int inputs);

// The call for so many rows, cut so. Where prepared x and slices' sums lie is set by the memory's owner.
void cut_call(LinearCall& call, const Preparation& preparation, index_t rows, index_t threads, const Cut& cut);

// So many bytes of prepared x.
index_t prepared_bytes(const Preparation& preparation, index_t rows);

// Of a call's items: how many a thread takes at a time where a work has so many of its kind, what one costs (Work::cost), and
// what it reads of a weight (Work::region): all of its tile's slice, or the lines of it that have its columns.
index_t grain_of(const LinearCall& call, index_t together, index_t threads, index_t items);
index_t cost_of_item(const void* linear_call, index_t item);
Region region_of_item(const void* linear_call, index_t item);

}  // namespace qt
