// Division of a matrix product into pieces of work, for linear layers (linear_calls.cpp) and experts (experts.cpp). The results
// do not depend on the cut.
#pragma once

#include "linear.hpp"

namespace qt {

inline constexpr index_t kSlicedRows = 64;  // up to these, slices may be items

// One cut: rows of a panel, columns of an item, whether slices of k are items.
struct Cut {
  index_t panel_rows, width;
  bool sliced;
};

const LinearKernels& linear_kernels_of(const Weight& weight);

// Returns the cheapest cut for `threads` threads; among equal costs, the one with the largest items.
Cut best_cut(const Weight& weight, const Preparation& preparation, index_t rows, index_t threads, bool may_slice);

// Returns a product without its rows, which are not known yet. Aborts the process if formats or activation do not fit the
// weight.
LinearCall linear_call(const Weight* weight, const void* x, index_t x_stride, int dtype, const void* bias,
                       const void* residual, void* y, index_t y_stride, int activation, int inputs);

// Sets rows and cut of the call. The owner of the memory sets the addresses of prepared x and partial sums.
void cut_call(LinearCall& call, const Preparation& preparation, index_t rows, index_t threads, const Cut& cut);

// Bytes of prepared x.
index_t prepared_bytes(const Preparation& preparation, index_t rows);

// Properties of a call's items. grain_of: items of one take, where a work has `items` of this kind. cost_of_item: see
// Work::cost. region_of_item: the memory read of a weight (Work::region): the whole slice of a tile, or the lines with the
// item's columns.
index_t grain_of(const LinearCall& call, index_t together, index_t threads, index_t items);
index_t cost_of_item(const void* linear_call, index_t item);
Region region_of_item(const void* linear_call, index_t item);

}  // namespace qt
