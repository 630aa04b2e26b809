// Digest of AMX products of pseudo-random numbers. Exponents are near one, near the smallest normal number, and denormal.
// Registers are full or partly filled, and register shapes change in between.
#pragma once

#include "amx.hpp"

namespace qt::QT_ISA {
namespace {

#if defined(QT_AMX)

// Rows and columns of C; depth: pairs (bf16) or fours (bytes).
struct ProductShape {
  index_t rows, columns, depth;
};
inline constexpr ProductShape kProductShapes[] = {{16, 16, 16}, {5, 7, 3}, {16, 9, 12}};

// Lowest biased exponent and number of exponents, of the factors and of the initial sums.
struct Exponents {
  std::uint32_t factor, factors, sum, sums;
};
inline constexpr Exponents kProductExponents[] = {{120, 13, 120, 13}, {58, 11, 0, 10}, {0, 3, 0, 3}};

// Unit: `Amx`, or a distinct type with the same interface.
template <class Unit>
class Products {
 public:
  std::uint64_t digest() {
    for (const ProductShape& shape : kProductShapes) {
      for (const Exponents& exponents : kProductExponents) {
        for (std::uint32_t& bits : a_) bits = pair(exponents);
        for (std::uint32_t& bits : b_) bits = pair(exponents);
        for (std::uint32_t& bits : c_) bits = number(exponents.sum, exponents.sums) << 16 | draw() >> 16;
        multiply(shape, [](Unit& unit) { unit.template multiply_bf16<5, 3, 7>(); });
      }
      for (std::uint32_t* area : {a_, b_, c_})
        for (index_t i = 0; i < kWords; ++i) area[i] = draw();
      multiply(shape, [](Unit& unit) { unit.template multiply_bytes<5, 3, 7>(); });
    }
    return digest_;
  }

 private:
  static constexpr index_t kWords = kAmxRows * kAmxColumns;

  // Linear congruential generator: Knuth, The Art of Computer Programming, volume 2 (1997), 3.3.4, line 26.
  std::uint32_t draw() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return std::uint32_t(state_ >> 32);
  }
  std::uint32_t number(std::uint32_t least, std::uint32_t count) {
    const std::uint32_t bits = draw();
    return (bits & 0x80000000) >> 16 | (least + (bits >> 8 & 0xFFFF) % count) << 7 | (bits & 0x7F);
  }
  std::uint32_t pair(const Exponents& exponents) {
    const std::uint32_t low = number(exponents.factor, exponents.factors);
    return number(exponents.factor, exponents.factors) << 16 | low;
  }

  // Multiplies twice, to test accumulation onto existing sums.
  template <class Multiply>
  void multiply(const ProductShape& shape, Multiply multiply) {
    AmxShapes shapes;
    shapes.set(5, shape.rows, shape.columns * 4);
    shapes.set(3, shape.rows, shape.depth * 4);
    shapes.set(7, shape.depth, shape.columns * 4);
    unit_.configure(shapes);
    unit_.template load<5>(c_, kAmxRowBytes);
    unit_.template load<3>(a_, kAmxRowBytes);
    unit_.template load<7>(b_, kAmxRowBytes);
    multiply(unit_);
    multiply(unit_);
    unit_.template store<5>(c_, kAmxRowBytes);
    for (const std::uint32_t word : c_) digest_ = (digest_ ^ word) * 0x100000001B3u;  // FNV-1a (Fowler, Noll and Vo), by words
  }

  Unit unit_;
  std::uint64_t state_ = 1, digest_ = 0xCBF29CE484222325u;
  alignas(64) std::uint32_t a_[kWords], b_[kWords], c_[kWords];
};

#endif

}  // namespace
}  // namespace qt::QT_ISA
