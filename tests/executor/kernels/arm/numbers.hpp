// Numbers in the formats of models, one at a time, in fp64 and with nothing of the kernels' own; and what is found wrong.
//
// Formats are written out here once more, by their definition (a sign, so many bits, an exponent), since a fault in the
// kernels' conversions is among what the checks are for. Half a unit in the last place of a result rounded to nearest is what
// every bound of a stored number begins with.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "work.hpp"

namespace check {

using qt::Dtype;

inline constexpr Dtype kFloats[] = {Dtype::bf16, Dtype::fp16, Dtype::fp32};
inline constexpr const char* kNames[] = {"bf16", "fp16", "fp32", "int8", "int4"};

inline index_t size_of(Dtype dtype) { return dtype == Dtype::fp32 ? 4 : 2; }

// Half a unit in the last place, relative to the number.
inline double half_unit(Dtype dtype) { return dtype == Dtype::bf16 ? 0x1p-8 : dtype == Dtype::fp16 ? 0x1p-11 : 0x1p-24; }

// To nearest, ties to even, with so many bits, none of them below 2^least.
inline double rounded(double value, int bits, int least) {
  if (value == 0) return value;
  const int last = std::max(std::ilogb(value) - (bits - 1), least);
  return std::ldexp(std::nearbyint(std::ldexp(value, -last)), last);
}

inline double rounded(double value, Dtype dtype) {
  return dtype == Dtype::bf16 ? rounded(value, 8, -133) : dtype == Dtype::fp16 ? rounded(value, 11, -24) : double(float(value));
}

// Finite numbers beyond what fp16 can hold are not asked for.
inline void write(void* to, Dtype dtype, double value) {
  const float wide = std::isfinite(value) ? float(rounded(value, dtype)) : float(value);
  std::uint32_t bits;
  std::memcpy(&bits, &wide, 4);
  if (dtype == Dtype::fp32) {
    std::memcpy(to, &bits, 4);
    return;
  }
  std::uint16_t half = std::uint16_t(bits >> 16);
  if (dtype == Dtype::fp16 && !std::isfinite(value)) {
    half = std::uint16_t(half & 0x8000) | (std::isnan(value) ? 0x7E00 : 0x7C00);
  } else if (dtype == Dtype::fp16) {
    const double magnitude = std::fabs(wide);
    const int exponent = magnitude < 0x1p-14 ? -14 : std::ilogb(magnitude);
    const int digits = int(std::ldexp(magnitude, 10 - exponent));
    half = std::uint16_t((bits >> 31) << 15 | (digits < 1024 ? digits : (exponent + 14) * 1024 + digits));
  }
  std::memcpy(to, &half, 2);
}

inline double read(const void* from, Dtype dtype) {
  std::uint32_t bits = 0;
  std::memcpy(&bits, from, size_of(dtype));
  if (dtype == Dtype::fp16) {
    const int exponent = bits >> 10 & 31, digits = bits & 1023;
    if (exponent == 31) return digits ? NAN : bits >> 15 ? -INFINITY : INFINITY;
    const double magnitude = exponent ? std::ldexp(1024 + digits, exponent - 25) : std::ldexp(digits, -24);
    return bits >> 15 ? -magnitude : magnitude;
  }
  if (dtype == Dtype::bf16) bits <<= 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// A number and how far off it may be.
struct About {
  double value, slack;
};

// Rows of numbers, as kernels take them.
struct Matrix {
  Dtype dtype;
  index_t rows, width;
  std::vector<char> bytes;

  Matrix(Dtype format, index_t count, index_t numbers)
      : dtype(format), rows(count), width(numbers), bytes(count * numbers * size_of(format)) {}
  index_t row_bytes() const { return width * size_of(dtype); }
  char* row(index_t i) { return bytes.data() + i * row_bytes(); }
  const char* row(index_t i) const { return bytes.data() + i * row_bytes(); }
  double at(index_t i, index_t j) const { return read(row(i) + j * size_of(dtype), dtype); }
  void set(index_t i, index_t j, double value) { write(row(i) + j * size_of(dtype), dtype, value); }
};

// Numbers that are nearly normal: sums of four uniform ones (splitmix64), scaled to a variance of 1.
class Noise {
 public:
  explicit Noise(std::uint64_t seed) : state_(seed) {}
  std::uint64_t bits() {
    std::uint64_t z = state_ += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
  }
  double operator()() {
    const std::uint64_t four = bits();
    double sum = 0;
    for (int i = 0; i < 64; i += 16) sum += double(four >> i & 0xFFFF) - 32767.5;
    return sum * (0.8660254037844386 / 32768);
  }
  Matrix matrix(Dtype dtype, index_t rows, index_t width, double scale = 1, double mean = 0) {
    Matrix made(dtype, rows, width);
    for (index_t i = 0; i < rows; ++i)
      for (index_t j = 0; j < width; ++j) made.set(i, j, mean + scale * (*this)());
    return made;
  }

 private:
  std::uint64_t state_;
};

// Counts what was compared and says what differs, the first few times.
class Findings {
 public:
  void begin(const std::string& what) { what_ = what; }
  // Infinities and NaN are never near.
  void near(double got, double exact, double bound, index_t row, index_t column) {
    ++compared_;
    if (std::fabs(got - exact) <= bound) return;
    if (++wrong_ < kMostSaid)
      std::printf("%s [%ld, %ld]: %.9g instead of %.9g, bound %.3g\n", what_.c_str(), long(row), long(column), got, exact, bound);
  }
  void same(const void* got, const void* expected, index_t bytes, index_t row) {
    ++compared_;
    if (std::memcmp(got, expected, bytes) == 0) return;
    if (++wrong_ < kMostSaid) std::printf("%s [%ld]: other bits\n", what_.c_str(), long(row));
  }
  void is(bool right, index_t row) {
    ++compared_;
    if (!right && ++wrong_ < kMostSaid) std::printf("%s [%ld]: wrong\n", what_.c_str(), long(row));
  }
  // Results that are to be the same wherever a product and a sum are rounded once (`fma` of csrc/cpu/runtime/simd.hpp): their FNV-1a.
  void everywhere(const Matrix& results) {
    for (char byte : results.bytes) digest_ = (digest_ ^ (unsigned char)byte) * 0x100000001B3u;
  }
  std::uint64_t digest() const { return digest_; }
  index_t compared() const { return compared_; }
  index_t wrong() const { return wrong_; }

 private:
  static constexpr index_t kMostSaid = 40;
  std::string what_;
  index_t compared_ = 0, wrong_ = 0;
  std::uint64_t digest_ = 0xCBF29CE484222325u;
};

// What main.cpp runs; each file says what it checks and why its bounds are what they are.
void check_linear(Findings& findings);
void check_attention(Findings& findings);
void check_rows(Findings& findings);
void check_sampling(Findings& findings);

}  // namespace check

extern "C" {
int qt_set_threads(int threads, int pin);
const char* qt_isa();
}
