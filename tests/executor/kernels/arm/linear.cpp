// Linear layers on packed weights of every format, and the packing itself.
//
// All rows are multiplied in one batch on one thread, and again on three threads in batches of every size with a separate path: the
// bits must be the same. Every kEvery-th row is compared with its sums, which covers all positions in a unit of rows. Columns
// straddle tiles; depths straddle pieces and groups and are odd.
//
// Integer products are exact, and later operations and sums of table numbers have a fixed order: results of these formats are part
// of the digest.
//
// Bounds. A sum of K products in fp32 is off by at most K 2^-24 of the sum of the products' magnitudes. Each rounding of the
// layer adds half a unit of the result's format. Integer weights are compared with their dequantized numbers (qt_weight_read).
// Their x is off by half a quantization step, 1 / 32639 (16 bits) or 1 / 127 (8 bits) of the largest magnitude of its group,
// times the weights. An activation has a slope of at most 1.13; its exponential, division and argument round within 2^-20 of it.
#include <memory>

#include "numbers.hpp"

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

namespace qt {
struct Weight;
}

extern "C" {
index_t qt_weight_bytes(int format, index_t columns, index_t depth, index_t group, int paired);
qt::Weight* qt_weight_new(int format, index_t columns, index_t depth, index_t group, int paired, index_t leaves,
                          index_t cut_columns, void* memory);
void qt_weight_delete(qt::Weight* weight);
void qt_weight_fill(qt::Weight* weight, const void* source, int dtype, index_t stride, index_t first, index_t count);
int qt_weight_fill_tables(qt::Weight* weight, const void* codes, index_t stride, const float* tables, index_t first,
                          index_t count);
index_t qt_weight_outlier_bytes(index_t columns, index_t depth, int paired, index_t most);
void qt_weight_set_outliers(qt::Weight* weight, void* memory, index_t most);
int qt_weight_fill_outliers(qt::Weight* weight, index_t first, index_t count, const std::int64_t* begins,
                            const std::int64_t* inputs, const float* numbers);
void qt_weight_read(const qt::Weight* weight, index_t first, index_t count, float* out);
void qt_weight_linear(const qt::Weight* weight, const void* x, index_t x_stride, index_t rows, int dtype, const void* bias,
                      const void* residual, void* y, index_t y_stride, int activation, int inputs, int y_dtype);
}

namespace check {
namespace {

constexpr index_t kEvery = 7;  // shares no factor with the rows of a unit: 4, 6 or 12
constexpr int kTables = 26;  // 4 bits that choose from a table of each column, and outliers
constexpr index_t kOutlierEvery = 37;
constexpr index_t kRows[] = {1, 2, 3, 12, 13, 37, 193};

constexpr int kSixteenBits = 0, kEightBits = 1, kEightBitsInGroups = 2;

struct Format {
  const char* name;
  int code;  // 5: int4 with zero points
  index_t group;
  int inputs;  // what x becomes: 16 bits, 8 by row, 8 by group
  bool is_integer() const { return code >= 3 && code != kTables; }
};

// Tables: column c uses the first 16 of its numbers, and some outliers.
index_t code_at(index_t c, index_t k) { return (k * 7 + c) % 16; }
bool is_outlier(index_t c, index_t k) { return (c + k) % kOutlierEvery == 0; }
float number_at(const Matrix& source, index_t c, index_t k) {
  return float(source.at(c, code_at(c, k))) + (is_outlier(c, k) ? float(source.at(c, k)) : 0.0f);
}

struct Shape {
  index_t columns, depth, rows;
};

enum Activation { kNone = 0, kSilu = 1, kGelu = 2 };

struct Variant {
  const char* name;
  Activation activation;
  bool bias, residual;
};

class Packed {
 public:
  // Filled in two parts, like consecutive matrices of a layer. Gates and ups are separate parts.
  Packed(Format format, const Matrix& source, bool paired) : columns_(source.rows), depth_(source.width) {
    const index_t bytes = qt_weight_bytes(format.code, columns_, depth_, format.group, paired);
    const index_t most = columns_ * (depth_ / kOutlierEvery + 1);
    const index_t all_bytes = bytes + (format.code == kTables ? qt_weight_outlier_bytes(columns_, depth_, paired, most) : 0);
    memory_.reset(std::aligned_alloc(64, (all_bytes + 63) / 64 * 64));
    std::memset(memory_.get(), 0, all_bytes);
    weight_ = qt_weight_new(format.code, columns_, depth_, format.group, paired, 1, columns_, memory_.get());
    if (format.code == kTables) qt_weight_set_outliers(weight_, (char*)memory_.get() + bytes, most);
    const index_t cut = paired ? columns_ / 2 : columns_ / 3;
    for (auto [first, count] : {std::pair(index_t(0), cut), std::pair(cut, columns_ - cut)})
      if (count && format.code == kTables)
        fill_tables(source, first, count);
      else if (count)
        qt_weight_fill(weight_, source.row(first), int(source.dtype), depth_, first, count);
  }
  ~Packed() { qt_weight_delete(weight_); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  const qt::Weight* get() const { return weight_; }
  std::vector<float> numbers() const {  // [columns][depth]
    std::vector<float> out(columns_ * depth_);
    qt_weight_read(weight_, 0, columns_, out.data());
    return out;
  }

 private:
  void fill_tables(const Matrix& source, index_t first, index_t count) {
    std::vector<unsigned char> codes;
    std::vector<std::int64_t> begins{0}, inputs;
    std::vector<float> tables, numbers;
    for (index_t c = first; c < first + count; ++c) {
      for (index_t i = 0; i < 16; ++i) tables.push_back(float(source.at(c, i)));
      for (index_t k = 0; k < depth_; ++k) {
        codes.push_back((unsigned char)code_at(c, k));
        if (is_outlier(c, k)) inputs.push_back(k), numbers.push_back(float(source.at(c, k)));
      }
      begins.push_back(std::int64_t(inputs.size()));
    }
    qt_weight_fill_tables(weight_, codes.data(), depth_, tables.data(), first, count);
    qt_weight_fill_outliers(weight_, first, count, begins.data(), inputs.data(), numbers.data());
  }

  index_t columns_, depth_;
  std::unique_ptr<void, Free> memory_;
  qt::Weight* weight_;
};

// Floating-point weights are stored exactly. Integers: see the bounds of each.
void check_packing(Findings& findings, Format format, const Matrix& source, const std::vector<float>& numbers) {
  const index_t depth = source.width, group = format.group ? format.group : depth;
  if (format.code == kTables) {
    for (index_t c = 0; c < source.rows; ++c)
      for (index_t k = 0; k < depth; ++k) findings.near(numbers[c * depth + k], number_at(source, c, k), 0, c, k);
    return;
  }
  for (index_t c = 0; c < source.rows; ++c)
    for (index_t begin = 0; begin < depth; begin += group) {
      const index_t end = std::min(depth, begin + group);
      double least = 0, most = 0, squares = 0, all = 0;
      for (index_t k = begin; k < end; ++k) {
        const double w = source.at(c, k), error = numbers[c * depth + k] - w;
        least = std::min(least, w), most = std::max(most, w);
        squares += error * error, all += w * w;
      }
      const double largest = std::max(most, -least);
      if (format.code >= 4) {
        // The scale is the best of some by least squares, among them the one that divides the range into 15 steps (14
        // without zero points): the root of the sum of squares is no worse than with errors of half a step, and half a step
        // more where the zero point was rounded. Scales are then rounded to fp16.
        const double step = format.code == 5 ? (most - least) / 15 : largest / 14;
        findings.near(std::sqrt(squares), 0, std::sqrt(double(end - begin)) * step + 0x1p-11 * std::sqrt(all), c, begin);
        continue;
      }
      for (index_t k = begin; k < end; ++k) {
        // int8: half of a step of 127; a group's scale is rounded to fp16, which moves the largest by 2^-11 of it.
        const double bound = format.code < 3 ? 0 : largest * (0.5 / 127 + (format.group ? 0x1p-11 : 0) + 0x1p-20);
        findings.near(numbers[c * depth + k], source.at(c, k), bound, c, k);
      }
    }
}

// Quantization error of x for each number of a row.
std::vector<double> errors_of_x(const Format& format, const Matrix& x, index_t row) {
  const index_t group = format.inputs == kEightBits ? x.width : format.group ? format.group : format.inputs ? x.width : 256;
  std::vector<double> errors(x.width);
  if (!format.is_integer()) return errors;
  for (index_t begin = 0; begin < x.width; begin += group) {
    const index_t end = std::min(x.width, begin + group);
    double largest = 0;
    for (index_t k = begin; k < end; ++k) largest = std::max(largest, std::fabs(x.at(row, k)));
    for (index_t k = begin; k < end; ++k) errors[k] = largest * (0.5 / (format.inputs ? 127 : 32639) + 0x1p-22);
  }
  return errors;
}

About stored(About number, Dtype dtype) {
  return {number.value, number.slack + half_unit(dtype) * (std::fabs(number.value) + number.slack) + 0x1p-25};
}

About activated(Activation kind, About gate) {
  const double g = gate.value, t = kind == kSilu ? g : 1.5957691216057308 * (g + 0.044715 * g * g * g);
  const double value = g / (1 + std::exp(-t));
  return {value, 1.13 * gate.slack + 0x1p-20 * std::fabs(value)};
}

About product(About a, About b) {
  return {a.value * b.value, std::fabs(a.value) * b.slack + std::fabs(b.value) * a.slack + a.slack * b.slack};
}

void check_multiplying(Findings& findings, const std::string& name, Format format, Shape shape, Dtype dtype, bool paired) {
  const index_t columns = shape.columns, depth = shape.depth, rows = shape.rows;
  Noise noise(columns * 31 + format.code);
  const Matrix source = noise.matrix(dtype, columns, depth, 1 / std::sqrt(double(depth)), 0.01);
  const Matrix x = noise.matrix(dtype, rows, depth), bias = noise.matrix(dtype, 1, columns);
  const index_t width = paired ? columns / 2 : columns;
  const Matrix residual = noise.matrix(dtype, rows, width);
  const Packed packed(format, source, paired);
  const std::vector<float> numbers = packed.numbers();
  findings.begin(name + ", packing");
  check_packing(findings, format, source, numbers);

  std::vector<About> sums(rows * columns);
  std::vector<double> wide(depth);
  for (index_t r = 0; r < rows; r += kEvery) {
    std::vector<double> errors = errors_of_x(format, x, r);
    for (index_t k = 0; k < depth; ++k) {
      wide[k] = x.at(r, k);
      errors[k] += std::fabs(wide[k]) * double(depth) * 0x1p-24;
    }
    for (index_t c = 0; c < columns; ++c) {
      double sum = 0, slack = 0;
      for (index_t k = 0; k < depth; ++k) {
        const double w = numbers[c * depth + k];
        sum += wide[k] * w;
        slack += errors[k] * std::fabs(w);
      }
      sums[r * columns + c] = {sum, slack};
    }
  }

  const Variant plain[] = {{"bare", kNone, false, false}, {"bias, residual", kNone, true, true}};
  const Variant gated[] = {{"silu, bias", kSilu, true, false}, {"gelu", kGelu, false, false}};
  for (const Variant& variant : paired ? gated : plain) {
    const auto run = [&](index_t first, index_t count, Matrix& y) {
      qt_weight_linear(packed.get(), x.row(first), depth, count, int(dtype), variant.bias ? bias.row(0) : nullptr,
                       variant.residual ? residual.row(first) : nullptr, y.row(0), width, variant.activation,
                       format.inputs, int(dtype));
    };
    findings.begin(name + ", " + variant.name);
    Matrix whole(dtype, rows, width);
    qt_set_threads(1, 0);
    run(0, rows, whole);
    if (format.code >= 3) findings.everywhere(whole);
    for (index_t r = 0; r < rows; r += kEvery)
      for (index_t c = 0; c < width; ++c) {
        const auto sum = [&](index_t column) {
          About result = sums[r * columns + column];
          if (variant.bias) {
            result.value += bias.at(0, column);
            result.slack += 0x1p-23 * (std::fabs(result.value) + 1);
          }
          return stored(result, dtype);
        };
        About result = sum(c);
        if (variant.residual) {
          result.value += residual.at(r, c);
          result = stored(result, dtype);
        }
        if (paired) result = stored(product(stored(activated(variant.activation, result), dtype), sum(width + c)), dtype);
        findings.near(whole.at(r, c), result.value, result.slack, r, c);
      }
    qt_set_threads(3, 0);
    findings.begin(name + ", " + variant.name + ", batches");
    for (index_t count : kRows) {
      if (count > rows) continue;
      const index_t first = (rows - count) / 2;
      Matrix some(dtype, count, width);
      run(first, count, some);
      for (index_t r = 0; r < count; ++r) findings.same(some.row(r), whole.row(first + r), whole.row_bytes(), first + r);
    }
    Matrix again(dtype, rows, width);
    run(0, rows, again);
    findings.same(again.row(0), whole.row(0), rows * whole.row_bytes(), 0);
    if (!format.is_integer() || paired || variant.bias) continue;
    findings.begin(name + ", " + variant.name + ", a row with an infinity");
    Matrix poisoned = x;
    const index_t bad = 7, few = 13;
    poisoned.set(bad, depth / 2, INFINITY);
    qt_weight_linear(packed.get(), poisoned.row(0), depth, few, int(dtype), nullptr, nullptr, again.row(0), width, kNone,
                     format.inputs, int(dtype));
    for (index_t r = 0; r < few; ++r) {
      if (r != bad) findings.same(again.row(r), whole.row(r), whole.row_bytes(), r);
      for (index_t c = 0; c < width; ++c) findings.is(std::isnan(again.at(r, c)) == (r == bad), r);
    }
  }
}

}  // namespace

void check_linear(Findings& findings) {
  const Format formats[] = {
      {"bf16", 0, 0, kSixteenBits},
      {"fp16", 1, 0, kSixteenBits},
      {"fp32", 2, 0, kSixteenBits},
      {"int8", 3, 0, kSixteenBits},
      {"int8 by 32", 3, 32, kSixteenBits},
      {"int4 by 32", 4, 32, kSixteenBits},
      {"int4+0 by 128", 5, 128, kSixteenBits},
      {"w8a8", 3, 0, kEightBits},
      {"w8a8 by 128", 3, 128, kEightBits},
      {"w4a8 by 64", 4, 64, kEightBits},
      {"w4a8 by 32, groups of x", 4, 32, kEightBitsInGroups},
      {"w4a8+0 by 128, groups of x", 5, 128, kEightBitsInGroups},
      {"tables", kTables, 0, kSixteenBits},
  };
  // Many rows over two tiles; few rows with a large depth, with one tile that is split among threads.
  const Shape shapes[] = {{98, 281, 388}, {34, 2103, 40}};
  index_t turn = 0;
  for (const Format& format : formats)
    for (const Shape& shape : shapes)
      for (bool paired : {false, true}) {
        const Dtype dtype = format.code < 3 ? Dtype(format.code) : kFloats[turn++ % 3];
        Shape of_kind = shape;
        if (paired) of_kind.rows = std::min(shape.rows, index_t(200));  // what is paired differs in the end alone
        const std::string name = std::string(format.name) + ", x " + kNames[int(dtype)] + ", " +
                                 std::to_string(of_kind.rows) + " rows" + (paired ? ", paired" : "");
        check_multiplying(findings, name, format, of_kind, dtype, paired);
      }
}

}  // namespace check
