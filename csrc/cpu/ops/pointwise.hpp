// Pointwise and row operations over activations: norms, activations, gates, sums, gathers.
//
// A work item is a row, and its output depends on that row only, independent of the batch size. Rows are `width` elements,
// `stride` elements apart. x, y and weights have one dtype (bf16, fp16, fp32) unless stated otherwise. y may be x if both have
// the same stride.
#pragma once

#include "dispatch.hpp"
#include "work.hpp"

namespace qt {

// Arguments of the kernels; each kernel reads the fields that it needs.
struct PointwiseCall {
  index_t width = 0;  // of y; for norms: of a group
  const void* x = nullptr;
  index_t x_stride = 0;
  const void* second = nullptr;  // summand of `add`, factor of `multiply`, parameters of `xielu`
  index_t second_stride = 0;
  index_t second_width = 0;      // for `multiply`: width of y, or 1
  const void* weight = nullptr;  // [width], or null for ones; norms: per group, or shared by all groups
  const void* bias = nullptr;    // as weight, or null for zeros
  index_t groups = 1;            // for norms: adjacent parts of a row, normed separately
  index_t weight_step = 0;       // elements from one group's weights to the next: 0, or width
  float eps = 0;
  float offset = 0;                         // see rms_norm
  bool rounds_once = false;                 // see rms_norm
  float factor = 1;                         // of `scale`; bound of `clip` and `softcap`
  const std::int32_t* ids = nullptr;        // for `embedding`: rows of `x`
  const std::int64_t* positions = nullptr;  // for `add_positions`: rows of `second`, minus `first_position`
  index_t first_position = 0;
  void* y = nullptr;
  index_t y_stride = 0;
};

// Indexed by Dtype (bf16, fp16, fp32). Each kernel takes a PointwiseCall and a range of rows.
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
  Run embedding[3][3];                      // dtype of y, dtype of the table
  Run activation[kActivations][3];          // y = f(x)
  Run activation_and_mul[kActivations][3];  // y = f(x[0, width)) * x[width, 2 width)
};

QT_DECLARE_KERNELS(PointwiseKernels, pointwise)

}  // namespace qt
