// C ABI of the pointwise operations: single calls, and operations of a program. See pointwise.hpp for rows, formats and strides
// (in elements), and kernels/pointwise.cpp for roundings.
//
// In a program, `extent` is an Extent: the rows of the operation.
#include "pointwise.hpp"

#include <cstring>

#include "program.hpp"
#include "require.hpp"

namespace qt {
namespace {

using Run = PointwiseKernels::Run;

constexpr index_t kElementsAtOnce = 8192;  // one take of a thread: some microseconds of work

Work work_of(const PointwiseCall& call, Run run, index_t rows) {
  const index_t width = call.width * call.groups, grain = kElementsAtOnce / (width < 1 ? 1 : width);
  constexpr index_t kCost = 4;  // per element, in multiplications
  return {.count = rows, .grain = grain < 1 ? 1 : grain, .run = run, .call = &call, .each_cost = kCost * width};
}

void run_once(const PointwiseCall& call, Run run, index_t rows) {
  const Work work = work_of(call, run, rows);
  pool().run(&work, 1);
}

class PointwiseOp final : public Op {
 public:
  PointwiseOp(const PointwiseCall& call, Run run, Extent extent) : call_(call), run_(run), extent_(extent) {}

  Work prepare(const Step& step, index_t) override {
    call_.ids = step.token_ids;
    call_.positions = step.positions;
    return work_of(call_, run_, rows_in(step, extent_));
  }

 private:
  PointwiseCall call_;
  Run run_;
  Extent extent_;
};

bool is_extent(int extent) { return extent == int(Extent::tokens) || extent == int(Extent::outputs); }

void append(Program* program, const PointwiseCall& call, Run run, int extent) {
  QT_REQUIRE(run && call.width > 0 && call.groups > 0 && call.y_stride >= call.width * call.groups && is_extent(extent),
             "rows of %lld, %lld apart, extent %d", (long long)call.width, (long long)call.y_stride, extent);
  program->append(std::make_unique<PointwiseOp>(call, run, Extent(extent)));
}

// Copies rows of x by index, without conversion.
struct TakeCall {
  const char* x;
  index_t x_stride, bytes;  // in bytes
  const std::int64_t* rows;
  char* y;
  index_t y_stride;

  static void run(const void* call, index_t begin, index_t end) {
    const TakeCall& c = *static_cast<const TakeCall*>(call);
    for (index_t row = begin; row < end; ++row)
      std::memcpy(c.y + row * c.y_stride, c.x + c.rows[row] * c.x_stride, c.bytes);
  }

  Work work(index_t count) const { return {.count = count, .grain = 16, .run = run, .call = this}; }
};

class TakeOutputs final : public Op {
 public:
  explicit TakeOutputs(const TakeCall& call) : call_(call) {}

  Work prepare(const Step& step, index_t) override {
    call_.rows = step.output_tokens;
    return call_.work(step.num_outputs);
  }

 private:
  TakeCall call_;
};

TakeCall take_call(const void* x, index_t x_stride, index_t width, void* y, index_t y_stride, int dtype) {
  const index_t size = dtype == int(Dtype::fp32) ? 4 : 2;
  return {static_cast<const char*>(x), x_stride * size, width * size, nullptr, static_cast<char*>(y), y_stride * size};
}

// Permutes columns of x, without conversion: the input of weights with sorted inputs.
template <class Bits>
struct ColumnsCall {
  const Bits* x;
  index_t x_stride, width;
  const std::int32_t* columns;
  Bits* y;
  index_t y_stride;

  static void run(const void* call, index_t begin, index_t end) {
    const ColumnsCall& c = *static_cast<const ColumnsCall*>(call);
    for (index_t row = begin; row < end; ++row) {
      const Bits* const from = c.x + row * c.x_stride;
      Bits* const to = c.y + row * c.y_stride;
      for (index_t k = 0; k < c.width; ++k) to[k] = from[c.columns[k]];
    }
  }

  Work work(index_t count) const {
    const index_t grain = kElementsAtOnce / width;
    return {.count = count, .grain = grain < 1 ? 1 : grain, .run = run, .call = this, .each_cost = 2 * width};
  }
};

template <class Bits>
class TakeColumns final : public Op {
 public:
  TakeColumns(const ColumnsCall<Bits>& call, Extent extent) : call_(call), extent_(extent) {}

  Work prepare(const Step& step, index_t) override { return call_.work(rows_in(step, extent_)); }

 private:
  ColumnsCall<Bits> call_;
  Extent extent_;
};

template <class Bits>
ColumnsCall<Bits> columns_call(const void* x, index_t x_stride, index_t width, const std::int32_t* columns, void* y,
                               index_t y_stride) {
  return {static_cast<const Bits*>(x), x_stride, width, columns, static_cast<Bits*>(y), y_stride};
}

template <class Bits>
void append_columns(Program* program, const ColumnsCall<Bits>& call, int extent) {
  program->append(std::make_unique<TakeColumns<Bits>>(call, Extent(extent)));
}

template <class Bits>
void run_columns(const ColumnsCall<Bits>& call, index_t rows) {
  const Work work = call.work(rows);
  pool().run(&work, 1);
}

const PointwiseKernels& kernels() { return QT_CHOOSE(pointwise); }

PointwiseCall call_of(const void* x, index_t x_stride, index_t width, void* y, index_t y_stride) {
  PointwiseCall call;
  call.x = x;
  call.x_stride = x_stride;
  call.width = width;
  call.y = y;
  call.y_stride = y_stride;
  return call;
}

PointwiseCall norm_call(const void* x, index_t x_stride, index_t groups, index_t width, const void* weight,
                        const void* bias, int per_group, float eps, float offset, int rounds_once, void* y,
                        index_t y_stride) {
  PointwiseCall call = call_of(x, x_stride, width, y, y_stride);
  call.groups = groups;
  call.weight_step = per_group ? width : 0;
  call.weight = weight;
  call.bias = bias;
  call.eps = eps;
  call.offset = offset;
  call.rounds_once = rounds_once || offset != 0;
  return call;
}

PointwiseCall second_call(const void* x, index_t x_stride, const void* second, index_t second_stride, index_t width,
                          void* y, index_t y_stride) {
  PointwiseCall call = call_of(x, x_stride, width, y, y_stride);
  call.second = second;
  call.second_stride = second_stride;
  return call;
}

PointwiseCall factor_call(const void* x, index_t x_stride, index_t width, float factor, void* y, index_t y_stride) {
  PointwiseCall call = call_of(x, x_stride, width, y, y_stride);
  call.factor = factor;
  return call;
}

}  // namespace
}  // namespace qt

using qt::kernels;
using qt::PointwiseCall;
using qt::Program;

// y[row] = table[ids[row]], converted if the formats differ. table: contiguous rows of `width`. Ids are not checked.
QT_EXPORT void qt_op_embedding(const void* table, const std::int32_t* ids, index_t rows, index_t width, void* y,
                               index_t y_stride, int dtype, int table_dtype) {
  PointwiseCall call = qt::call_of(table, width, width, y, y_stride);
  call.ids = ids;
  qt::run_once(call, kernels().embedding[dtype][table_dtype], rows);
}

QT_EXPORT void qt_program_embedding(Program* program, const void* table, index_t width, void* y, index_t y_stride,
                                    int dtype, int table_dtype) {
  qt::append(program, qt::call_of(table, width, width, y, y_stride), kernels().embedding[dtype][table_dtype], 0);
}

// y[token] = x[token] + table[position of token + first]: learned position embeddings. The table has the dtype of x and y.
QT_EXPORT void qt_op_add_positions(const void* x, index_t x_stride, const void* table, const std::int64_t* positions,
                                   index_t first, index_t rows, index_t width, void* y, index_t y_stride, int dtype) {
  PointwiseCall call = qt::second_call(x, x_stride, table, width, width, y, y_stride);
  call.positions = positions;
  call.first_position = first;
  qt::run_once(call, kernels().add_positions[dtype], rows);
}

QT_EXPORT void qt_program_add_positions(Program* program, const void* x, index_t x_stride, const void* table,
                                        index_t first, index_t width, void* y, index_t y_stride, int dtype) {
  PointwiseCall call = qt::second_call(x, x_stride, table, width, width, y, y_stride);
  call.first_position = first;
  qt::append(program, call, kernels().add_positions[dtype], 0);
}

// RMS norm of each group in rows of `groups` times `width` numbers. weight: null for ones; per_group: one number per element of
// a row, else `width` numbers for all groups. With rounds_once or an offset: round(x / rms * (offset + weight)); else
// round(round(x / rms) * weight).
QT_EXPORT void qt_op_rms_norm(const void* x, index_t x_stride, index_t rows, index_t groups, index_t width,
                              const void* weight, int per_group, float eps, float offset, int rounds_once, void* y,
                              index_t y_stride, int dtype) {
  qt::run_once(qt::norm_call(x, x_stride, groups, width, weight, nullptr, per_group, eps, offset, rounds_once, y, y_stride),
               kernels().rms_norm[dtype], rows);
}

QT_EXPORT void qt_program_rms_norm(Program* program, const void* x, index_t x_stride, index_t groups, index_t width,
                                   const void* weight, int per_group, float eps, float offset, int rounds_once,
                                   void* y, index_t y_stride, int dtype, int extent) {
  qt::append(program,
             qt::norm_call(x, x_stride, groups, width, weight, nullptr, per_group, eps, offset, rounds_once, y, y_stride),
             kernels().rms_norm[dtype], extent);
}

// Layer norm of each group; weight and bias may be null. Arguments as in qt_op_rms_norm.
QT_EXPORT void qt_op_layer_norm(const void* x, index_t x_stride, index_t rows, index_t groups, index_t width,
                                const void* weight, const void* bias, int per_group, float eps, void* y,
                                index_t y_stride, int dtype) {
  qt::run_once(qt::norm_call(x, x_stride, groups, width, weight, bias, per_group, eps, 0, 1, y, y_stride),
               kernels().layer_norm[dtype], rows);
}

QT_EXPORT void qt_program_layer_norm(Program* program, const void* x, index_t x_stride, index_t groups, index_t width,
                                     const void* weight, const void* bias, int per_group, float eps, void* y,
                                     index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::norm_call(x, x_stride, groups, width, weight, bias, per_group, eps, 0, 1, y, y_stride),
             kernels().layer_norm[dtype], extent);
}

// y[i] = x[rows[i]]; in a program, rows are the step's output tokens.
QT_EXPORT void qt_op_take_rows(const void* x, index_t x_stride, index_t width, const std::int64_t* rows, index_t count,
                               void* y, index_t y_stride, int dtype) {
  qt::TakeCall call = qt::take_call(x, x_stride, width, y, y_stride, dtype);
  call.rows = rows;
  const qt::Work work = call.work(count);
  qt::pool().run(&work, 1);
}

QT_EXPORT void qt_program_take_outputs(Program* program, const void* x, index_t x_stride, index_t width, void* y,
                                       index_t y_stride, int dtype) {
  program->append(std::make_unique<qt::TakeOutputs>(qt::take_call(x, x_stride, width, y, y_stride, dtype)));
}

// y[i][k] = x[i][columns[k]] for k < width. Column indices are not checked; y must not be x.
QT_EXPORT void qt_op_take_columns(const void* x, index_t x_stride, index_t rows, index_t width, const std::int32_t* columns,
                                  void* y, index_t y_stride, int dtype) {
  if (dtype == int(qt::Dtype::fp32))
    qt::run_columns(qt::columns_call<std::uint32_t>(x, x_stride, width, columns, y, y_stride), rows);
  else
    qt::run_columns(qt::columns_call<std::uint16_t>(x, x_stride, width, columns, y, y_stride), rows);
}

QT_EXPORT void qt_program_take_columns(Program* program, const void* x, index_t x_stride, index_t width,
                                       const std::int32_t* columns, void* y, index_t y_stride, int dtype, int extent) {
  if (dtype == int(qt::Dtype::fp32))
    qt::append_columns(program, qt::columns_call<std::uint32_t>(x, x_stride, width, columns, y, y_stride), extent);
  else
    qt::append_columns(program, qt::columns_call<std::uint16_t>(x, x_stride, width, columns, y, y_stride), extent);
}

QT_EXPORT void qt_op_add(const void* x, index_t x_stride, const void* second, index_t second_stride, index_t rows,
                         index_t width, void* y, index_t y_stride, int dtype) {
  qt::run_once(qt::second_call(x, x_stride, second, second_stride, width, y, y_stride), kernels().add[dtype], rows);
}

QT_EXPORT void qt_program_add(Program* program, const void* x, index_t x_stride, const void* second,
                              index_t second_stride, index_t width, void* y, index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::second_call(x, x_stride, second, second_stride, width, y, y_stride), kernels().add[dtype],
             extent);
}

// y = x * second; second_width: the width of y, or 1.
QT_EXPORT void qt_op_multiply(const void* x, index_t x_stride, const void* second, index_t second_stride,
                              index_t second_width, index_t rows, index_t width, void* y, index_t y_stride, int dtype) {
  PointwiseCall call = qt::second_call(x, x_stride, second, second_stride, width, y, y_stride);
  call.second_width = second_width;
  qt::run_once(call, kernels().multiply[dtype], rows);
}

QT_EXPORT void qt_program_multiply(Program* program, const void* x, index_t x_stride, const void* second,
                                   index_t second_stride, index_t second_width, index_t width, void* y,
                                   index_t y_stride, int dtype, int extent) {
  PointwiseCall call = qt::second_call(x, x_stride, second, second_stride, width, y, y_stride);
  call.second_width = second_width;
  qt::append(program, call, kernels().multiply[dtype], extent);
}

// y = x * factor; the factor is not rounded to the dtype.
QT_EXPORT void qt_op_scale(const void* x, index_t x_stride, index_t rows, index_t width, float factor, void* y,
                           index_t y_stride, int dtype) {
  qt::run_once(qt::factor_call(x, x_stride, width, factor, y, y_stride), kernels().scale[dtype], rows);
}

QT_EXPORT void qt_program_scale(Program* program, const void* x, index_t x_stride, index_t width, float factor, void* y,
                                index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::factor_call(x, x_stride, width, factor, y, y_stride), kernels().scale[dtype], extent);
}

// y = x clamped to [-bound, bound].
QT_EXPORT void qt_op_clip(const void* x, index_t x_stride, index_t rows, index_t width, float bound, void* y,
                          index_t y_stride, int dtype) {
  qt::run_once(qt::factor_call(x, x_stride, width, bound, y, y_stride), kernels().clip[dtype], rows);
}

QT_EXPORT void qt_program_clip(Program* program, const void* x, index_t x_stride, index_t width, float bound, void* y,
                               index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::factor_call(x, x_stride, width, bound, y, y_stride), kernels().clip[dtype], extent);
}

// y = tanh(x / bound) * bound.
QT_EXPORT void qt_op_softcap(const void* x, index_t x_stride, index_t rows, index_t width, float bound, void* y,
                             index_t y_stride, int dtype) {
  qt::run_once(qt::factor_call(x, x_stride, width, bound, y, y_stride), kernels().softcap[dtype], rows);
}

QT_EXPORT void qt_program_softcap(Program* program, const void* x, index_t x_stride, index_t width, float bound,
                                  void* y, index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::factor_call(x, x_stride, width, bound, y, y_stride), kernels().softcap[dtype], extent);
}

// y = xielu(x). numbers: fp32 [4]: a, b, the linear factor, the least magnitude; see the kernel.
QT_EXPORT void qt_op_xielu(const void* x, index_t x_stride, index_t rows, index_t width, const float* numbers, void* y,
                           index_t y_stride, int dtype) {
  qt::run_once(qt::second_call(x, x_stride, numbers, 0, width, y, y_stride), kernels().xielu[dtype], rows);
}

QT_EXPORT void qt_program_xielu(Program* program, const void* x, index_t x_stride, index_t width, const float* numbers,
                                void* y, index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::second_call(x, x_stride, numbers, 0, width, y, y_stride), kernels().xielu[dtype], extent);
}

// y = activation(x). kind: an Activation.
QT_EXPORT void qt_op_activation(int kind, const void* x, index_t x_stride, index_t rows, index_t width, void* y,
                                index_t y_stride, int dtype) {
  qt::run_once(qt::call_of(x, x_stride, width, y, y_stride), kernels().activation[kind][dtype], rows);
}

QT_EXPORT void qt_program_activation(Program* program, int kind, const void* x, index_t x_stride, index_t width,
                                     void* y, index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::call_of(x, x_stride, width, y, y_stride), kernels().activation[kind][dtype], extent);
}

// y = activation(x[0, width)) * x[width, 2 width). kind: an Activation. width: of y.
QT_EXPORT void qt_op_activation_and_mul(int kind, const void* x, index_t x_stride, index_t rows, index_t width, void* y,
                                        index_t y_stride, int dtype) {
  qt::run_once(qt::call_of(x, x_stride, width, y, y_stride), kernels().activation_and_mul[kind][dtype], rows);
}

QT_EXPORT void qt_program_activation_and_mul(Program* program, int kind, const void* x, index_t x_stride, index_t width,
                                             void* y, index_t y_stride, int dtype, int extent) {
  qt::append(program, qt::call_of(x, x_stride, width, y, y_stride), kernels().activation_and_mul[kind][dtype], extent);
}
