// The operations between multiplications, over rows of activations: norms, activations, gates, sums, gathers.
//
// Knows a row and nothing around it: an operation's rows are its work items, and what it writes for one depends on that
// row alone. Rows are `width` elements, `stride` elements apart; x, y and weights are of one format (bf16, fp16, fp32)
// unless said. y may be x where both have the same stride.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

// The kernels' arguments; each reads the fields it needs.
struct PointwiseCall {
  index_t width = 0;  // of y; of norms, of a group
  const void* x = nullptr;
  index_t x_stride = 0;
  const void* second = nullptr;  // the other summand of `add`, the other factor of `multiply`, the numbers of `xielu`
  index_t second_stride = 0;
  index_t second_width = 0;      // of `multiply`: that of y, or 1
  const void* weight = nullptr;  // [width], or null for ones; of norms one for each group, or the same for all
  const void* bias = nullptr;    // likewise, or null for zeros
  index_t groups = 1;            // of norms: adjacent parts of a row, each normed by itself
  index_t weight_step = 0;       // from a group's weights to the next's: 0, or width
  float eps = 0;
  float offset = 0;                         // see rms_norm
  bool rounds_once = false;                 // likewise
  float factor = 1;                         // of `scale`; the bound of `clip` and `softcap`
  const std::int32_t* ids = nullptr;        // rows of `x` that `embedding` takes
  const std::int64_t* positions = nullptr;  // rows of `second`, less `first_position`, that `add_positions` takes
  index_t first_position = 0;
  void* y = nullptr;
  index_t y_stride = 0;
};

// Indexed by Dtype (bf16, fp16, fp32). Each takes a PointwiseCall and a range of rows.
struct PointwiseKernels {
  using Run = void (*)(const void* call, index_t begin, index_t end);
  Run rms_norm[3];
  Run layer_norm[3];
  Run add[3];
  Run add_positions[3];
  Run multiply[3];
  Run scale[3];
  Run clip[3];
  Run softcap[3];
  Run xielu[3];
  Run embedding[3][3];                      // of y, of the table
  Run activation[kActivations][3];          // y = f(x)
  Run activation_and_mul[kActivations][3];  // y = f(x[0, width)) * x[width, 2 width)
};

QT_DECLARE_KERNELS(PointwiseKernels, pointwise)

}  // namespace qt
