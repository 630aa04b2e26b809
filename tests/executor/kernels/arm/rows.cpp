// Norms, activations, gates, sums and gathers over rows, and a small program of them with a linear layer.
//
// All rows on one thread, then each alone: the same bits. A program has the bits of its operations in separate calls. Widths end
// within a vector.
//
// Bounds: half a unit of the format wherever the operation rounds, and 2^-20 of the result for fp32 arithmetic with an
// exponential, a root or a sum of a hundred squares in it. An activation by erf is off by 1.5e-7 of x.
#include <functional>

#include "numbers.hpp"
#include "program.hpp"

namespace qt {
struct Weight;
}

extern "C" {
void qt_op_embedding(const void* table, const std::int32_t* ids, index_t rows, index_t width, void* y, index_t y_stride,
                     int dtype, int table_dtype);
void qt_op_add_positions(const void* x, index_t x_stride, const void* table, const std::int64_t* positions, index_t first,
                         index_t rows, index_t width, void* y, index_t y_stride, int dtype);
void qt_op_rms_norm(const void* x, index_t x_stride, index_t rows, index_t groups, index_t width, const void* weight,
                    int per_group, float eps, float offset, int rounds_once, void* y, index_t y_stride, int dtype);
void qt_op_layer_norm(const void* x, index_t x_stride, index_t rows, index_t groups, index_t width, const void* weight,
                      const void* bias, int per_group, float eps, void* y, index_t y_stride, int dtype);
void qt_op_take_rows(const void* x, index_t x_stride, index_t width, const std::int64_t* rows, index_t count, void* y,
                     index_t y_stride, int dtype);
void qt_op_add(const void* x, index_t x_stride, const void* second, index_t second_stride, index_t rows, index_t width, void* y,
               index_t y_stride, int dtype);
void qt_op_scale(const void* x, index_t x_stride, index_t rows, index_t width, float factor, void* y, index_t y_stride,
                 int dtype);
void qt_op_softcap(const void* x, index_t x_stride, index_t rows, index_t width, float bound, void* y, index_t y_stride,
                   int dtype);
void qt_op_activation(int kind, const void* x, index_t x_stride, index_t rows, index_t width, void* y, index_t y_stride,
                      int dtype);
void qt_op_activation_and_mul(int kind, const void* x, index_t x_stride, index_t rows, index_t width, void* y, index_t y_stride,
                              int dtype);
index_t qt_weight_bytes(int format, index_t columns, index_t depth, index_t group, int paired);
qt::Weight* qt_weight_new(int format, index_t columns, index_t depth, index_t group, int paired, index_t leaves,
                          index_t cut_columns, void* memory);
void qt_weight_delete(qt::Weight* weight);
void qt_weight_fill(qt::Weight* weight, const void* source, int dtype, index_t stride, index_t first, index_t count);
void qt_weight_read(const qt::Weight* weight, index_t first, index_t count, float* out);
void qt_weight_linear(const qt::Weight* weight, const void* x, index_t x_stride, index_t rows, int dtype, const void* bias,
                      const void* residual, void* y, index_t y_stride, int activation, int inputs, int y_dtype);
qt::Program* qt_program_new();
void qt_program_delete(qt::Program* program);
index_t qt_program_size(const qt::Program* program);
void qt_program_run(qt::Program* program, const qt::Step* step, index_t begin, index_t end);
void qt_program_embedding_packed(qt::Program* program, const qt::Weight* weight, void* y, index_t y_stride, int dtype);
void qt_program_rms_norm(qt::Program* program, const void* x, index_t x_stride, index_t groups, index_t width,
                         const void* weight, int per_group, float eps, float offset, int rounds_once, void* y,
                         index_t y_stride, int dtype, int extent);
void qt_program_take_outputs(qt::Program* program, const void* x, index_t x_stride, index_t width, void* y, index_t y_stride,
                             int dtype);
void qt_program_linear(qt::Program* program, const qt::Weight* weight, const void* x, index_t x_stride, index_t max_rows,
                       int dtype, const void* bias, const void* residual, void* y, index_t y_stride, int activation,
                       int inputs, int y_dtype, int extent);
}

namespace check {
namespace {

constexpr index_t kRows = 21, kWidth = 103;
constexpr float kEps = 1e-6f;

// y [rows, kWidth] of rows [first, first + rows) of the inputs.
using Run = std::function<void(index_t first, index_t rows, void* y)>;
using Exact = std::function<About(index_t row, index_t column)>;

void check_operation(Findings& findings, const std::string& name, Dtype dtype, const Run& run, const Exact& exact) {
  findings.begin(name + ", " + kNames[int(dtype)]);
  Matrix whole(dtype, kRows, kWidth), alone(dtype, 1, kWidth);
  qt_set_threads(1, 0);
  run(0, kRows, whole.row(0));
  for (index_t row = 0; row < kRows; ++row)
    for (index_t column = 0; column < kWidth; ++column) {
      const About about = exact(row, column);
      const double slack = about.slack + half_unit(dtype) * (std::fabs(about.value) + about.slack) + 0x1p-25;
      findings.near(whole.at(row, column), about.value, slack, row, column);
    }
  qt_set_threads(2, 0);
  for (index_t row = 0; row < kRows; ++row) {
    run(row, 1, alone.row(0));
    findings.same(alone.row(0), whole.row(row), whole.row_bytes(), row);
  }
}

About with_slack(double value, double relative, double absolute = 0) { return {value, relative * std::fabs(value) + absolute}; }

double activation_of(int kind, double x) {
  if (kind == 1) return x / (1 + std::exp(-x));
  if (kind == 2) return x * 0.5 * (1 + std::tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)));
  if (kind == 3) return x * 0.5 * std::erfc(-x * 0.7071067811865476);
  if (kind == 5) return x > 0 ? x * x : 0;
  if (kind == 6) return x / (1 + std::exp(-1.702 * x));
  if (kind == 7) return 1 / (1 + std::exp(-x));
  return x > 0 ? x : 0;
}

void check_norms(Findings& findings, Dtype dtype) {
  const int code = int(dtype);
  const double unit = half_unit(dtype);
  Noise noise(7);
  const Matrix x = noise.matrix(dtype, kRows, kWidth, 3, 0.5), weight = noise.matrix(dtype, 1, kWidth, 0.3, 1),
               bias = noise.matrix(dtype, 1, kWidth);
  struct Moments {
    double root, mean, deviation;
  };
  std::vector<Moments> of(kRows);
  for (index_t r = 0; r < kRows; ++r) {
    double sum = 0, squares = 0, centred = 0;
    for (index_t c = 0; c < kWidth; ++c) sum += x.at(r, c), squares += x.at(r, c) * x.at(r, c);
    for (index_t c = 0; c < kWidth; ++c) centred += std::pow(x.at(r, c) - sum / kWidth, 2);
    of[r] = {std::sqrt(squares / kWidth + double(kEps)), sum / kWidth, std::sqrt(centred / kWidth + double(kEps))};
  }
  for (float offset : {0.0f, 1.0f})
    check_operation(
        findings, offset == 0 ? "rms norm" : "rms norm with offset", dtype,
        [&](index_t first, index_t rows, void* y) {
          qt_op_rms_norm(x.row(first), kWidth, rows, 1, kWidth, weight.row(0), 0, kEps, offset, 1, y, kWidth, code);
        },
        [&](index_t r, index_t c) {
          return with_slack(x.at(r, c) / of[r].root * (double(offset) + weight.at(0, c)), 0x1p-20 + (offset == 0 ? unit : 0));
        });
  check_operation(
      findings, "layer norm", dtype,
      [&](index_t first, index_t rows, void* y) {
        qt_op_layer_norm(x.row(first), kWidth, rows, 1, kWidth, weight.row(0), bias.row(0), 0, kEps, y, kWidth, code);
      },
      [&](index_t r, index_t c) {
        return with_slack((x.at(r, c) - of[r].mean) / of[r].deviation * weight.at(0, c) + bias.at(0, c), 0, 0x1p-18);
      });
}

void check_pointwise(Findings& findings, Dtype dtype) {
  const int code = int(dtype);
  const double unit = half_unit(dtype);
  Noise noise(11);
  const Matrix x = noise.matrix(dtype, kRows, 2 * kWidth, 3), second = noise.matrix(dtype, kRows, kWidth);
  std::vector<std::int32_t> ids(kRows);
  std::vector<std::int64_t> places(kRows);
  for (index_t r = 0; r < kRows; ++r) ids[r] = std::int32_t(r * 8 % kRows), places[r] = r * 5 % kRows;
  const index_t stride = x.width;

  check_operation(
      findings, "add", dtype,
      [&](index_t first, index_t rows, void* y) {
        qt_op_add(x.row(first), stride, second.row(first), kWidth, rows, kWidth, y, kWidth, code);
      },
      [&](index_t r, index_t c) { return About{x.at(r, c) + second.at(r, c), 0}; });
  check_operation(
      findings, "positions", dtype,
      [&](index_t first, index_t rows, void* y) {
        qt_op_add_positions(x.row(first), stride, second.row(0), places.data() + first, 0, rows, kWidth, y, kWidth, code);
      },
      [&](index_t r, index_t c) { return About{x.at(r, c) + second.at(places[r], c), 0}; });
  check_operation(
      findings, "scale", dtype,
      [&](index_t first, index_t rows, void* y) { qt_op_scale(x.row(first), stride, rows, kWidth, 0.3f, y, kWidth, code); },
      [&](index_t r, index_t c) { return About{x.at(r, c) * double(0.3f), 0}; });
  check_operation(
      findings, "soft cap", dtype,
      [&](index_t first, index_t rows, void* y) { qt_op_softcap(x.row(first), stride, rows, kWidth, 5, y, kWidth, code); },
      // The quotient is rounded before the tangent, which has a slope of at most 1, and the tangent before the product.
      [&](index_t r, index_t c) {
        return with_slack(5 * std::tanh(x.at(r, c) / 5), unit + 0x1p-20, unit * std::fabs(x.at(r, c)));
      });
  check_operation(
      findings, "take rows", dtype,
      [&](index_t first, index_t rows, void* y) {
        qt_op_take_rows(x.row(0), stride, kWidth, places.data() + first, rows, y, kWidth, code);
      },
      [&](index_t r, index_t c) { return About{x.at(places[r], c), 0}; });
  for (Dtype of_table : kFloats) {
    const Matrix table = noise.matrix(of_table, kRows, kWidth);
    check_operation(
        findings, std::string("embedding of ") + kNames[int(of_table)], dtype,
        [&](index_t first, index_t rows, void* y) {
          qt_op_embedding(table.row(0), ids.data() + first, rows, kWidth, y, kWidth, code, int(of_table));
        },
        [&](index_t r, index_t c) { return About{table.at(ids[r], c), 0}; });
  }
  for (int kind = 1; kind < qt::kActivations; ++kind) {
    const std::string name = "activation " + std::to_string(kind);
    const auto activated = [&](index_t r, index_t c) {
      return with_slack(activation_of(kind, x.at(r, c)), 0x1p-20, kind == 3 ? 1.6e-7 * std::fabs(x.at(r, c)) : 0);
    };
    check_operation(
        findings, name, dtype,
        [&](index_t first, index_t rows, void* y) {
          qt_op_activation(kind, x.row(first), stride, rows, kWidth, y, kWidth, code);
        },
        activated);
    check_operation(
        findings, name + " and mul", dtype,
        [&](index_t first, index_t rows, void* y) {
          qt_op_activation_and_mul(kind, x.row(first), stride, rows, kWidth, y, kWidth, code);
        },
        [&](index_t r, index_t c) {
          const About gate = activated(r, c);
          const double up = x.at(r, kWidth + c);
          return About{gate.value * up, (gate.slack + 1.01 * unit * std::fabs(gate.value) + 0x1p-25) * std::fabs(up)};
        });
  }
}

// Embedding from the packed output layer, norm, the outputs' rows, the output layer.
void check_program(Findings& findings, int format, index_t group) {
  constexpr index_t kTokens = 17, kVocab = 90, kDepth = 96, kOutputs = 9;
  constexpr Dtype kDtype = Dtype::bf16;
  constexpr int kCode = int(kDtype);
  findings.begin("program, weights " + std::to_string(format));
  Noise noise(13);
  const Matrix source = noise.matrix(kDtype, kVocab, kDepth), norm = noise.matrix(kDtype, 1, kDepth, 0.3, 1);
  const index_t bytes = qt_weight_bytes(format, kVocab, kDepth, group, 0);
  void* memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
  std::memset(memory, 0, bytes);
  qt::Weight* weight = qt_weight_new(format, kVocab, kDepth, group, 0, 1, kVocab, memory);
  qt_weight_fill(weight, source.row(0), kCode, kDepth, 0, kVocab);

  Matrix hidden(kDtype, kTokens, kDepth), outputs(kDtype, kOutputs, kDepth), logits(kDtype, kOutputs, kVocab);
  qt::Program* program = qt_program_new();
  qt_program_embedding_packed(program, weight, hidden.row(0), kDepth, kCode);
  qt_program_rms_norm(program, hidden.row(0), kDepth, 1, kDepth, norm.row(0), 0, kEps, 0, 1, hidden.row(0), kDepth, kCode, 0);
  qt_program_take_outputs(program, hidden.row(0), kDepth, kDepth, outputs.row(0), kDepth, kCode);
  qt_program_linear(program, weight, outputs.row(0), kDepth, kOutputs, kCode, nullptr, nullptr, logits.row(0), kVocab, 0, 0, kCode,
                    1);
  std::int32_t ids[kTokens];
  std::int64_t taken[kOutputs];
  for (index_t i = 0; i < kTokens; ++i) ids[i] = std::int32_t(i * 31 % kVocab);
  for (index_t i = 0; i < kOutputs; ++i) taken[i] = i * 5 % kTokens;
  qt::Step step{};
  step.num_tokens = kTokens, step.num_outputs = kOutputs, step.token_ids = ids, step.output_tokens = taken;

  for (int threads : {3, 1}) {
    qt_set_threads(threads, 0);
    qt_program_run(program, &step, 0, qt_program_size(program));
    for (index_t i = 0; i < kOutputs; ++i) {
      Matrix one(kDtype, 1, kDepth), expected(kDtype, 1, kVocab);
      for (index_t d = 0; format == 0 && d < kDepth; ++d) one.set(0, d, source.at(ids[taken[i]], d));
      if (format != 0) {  // the embedding of integers is what they stand for, rounded
        qt_program_run(program, &step, 0, 1);
        std::memcpy(one.row(0), hidden.row(taken[i]), one.row_bytes());
        float numbers[kDepth];
        qt_weight_read(weight, ids[taken[i]], 1, numbers);
        for (index_t d = 0; d < kDepth; ++d) findings.near(one.at(0, d), rounded(numbers[d], kDtype), 0, i, d);
      }
      qt_op_rms_norm(one.row(0), kDepth, 1, 1, kDepth, norm.row(0), 0, kEps, 0, 1, one.row(0), kDepth, kCode);
      qt_weight_linear(weight, one.row(0), kDepth, 1, kCode, nullptr, nullptr, expected.row(0), kVocab, 0, 0, kCode);
      findings.same(logits.row(i), expected.row(0), expected.row_bytes(), i);
    }
  }
  qt_program_delete(program);
  qt_weight_delete(weight);
  std::free(memory);
}

}  // namespace

void check_rows(Findings& findings) {
  for (Dtype dtype : kFloats) {
    check_norms(findings, dtype);
    check_pointwise(findings, dtype);
  }
  check_program(findings, 0, 0);
  check_program(findings, 4, 32);
}

}  // namespace check
