// Faulty matrix units, for test_amx.py: csrc/cpu must detect and reject them. Compiled with csrc/cpu/runtime/dispatch.cpp, with a faulty
// unit instead of the emulated one.
#include "matrix_check.hpp"

#include "kernels/matrix_products.hpp"

namespace qt::QT_ISA {
namespace {

enum Fault { none, one_chain, unflushed, signs, shape, count };

template <Fault fault>
class Unit : public Amx {
 public:
  template <int C, int A, int B>
  void multiply_bf16() {
    if constexpr (fault == one_chain || fault == unflushed)
      multiply_otherwise<C, A, B>();
    else
      Amx::multiply_bf16<C, A, B>();
  }
  template <int C, int A, int B>
  void multiply_bytes() {
    if constexpr (fault == signs)
      Amx::multiply_bf16<C, A, B>();
    else
      Amx::multiply_bytes<C, A, B>();
  }
  void configure(const AmxShapes& shapes) {
    AmxShapes taken = shapes;
    if (fault == shape && shapes.rows[5] == 5) taken.set(5, 5, 4), taken.set(7, 3, 4);
    Amx::configure(taken);
    shapes_ = shapes;
  }

 private:
  // One chain, as in VDPBF16PS, or two chains that keep denormals.
  template <int C, int A, int B>
  void multiply_otherwise() {
    alignas(64) float sums[16][16];
    alignas(64) std::uint32_t a[16][16], b[16][16];
    store<C>(sums, 64);
    store<A>(a, 64);
    store<B>(b, 64);
    const auto number = [](std::uint32_t bits) {
      if (fault != unflushed && (bits & 0x7F800000) == 0) bits &= 0x80000000;
      float value;
      std::memcpy(&value, &bits, sizeof value);
      return value;
    };
    for (index_t m = 0; m < shapes_.rows[A]; ++m)
      for (index_t n = 0; n < shapes_.row_bytes[B] / 4; ++n) {
        float even = 0, odd = 0;
        for (index_t p = 0; p < shapes_.rows[B]; ++p) {
          even = __builtin_fmaf(number(a[m][p] << 16), number(b[p][n] << 16), even);
          float& high = fault == one_chain ? even : odd;
          high = __builtin_fmaf(number(a[m][p] & 0xFFFF0000), number(b[p][n] & 0xFFFF0000), high);
        }
        sums[m][n] += even + odd;
      }
    load<C>(sums, 64);
  }

  AmxShapes shapes_;
};

template <Fault fault>
std::uint64_t digest_of() {
  Products<Unit<fault>> products;
  return products.digest();
}

constexpr std::uint64_t (*kDigests[count])() = {digest_of<none>, digest_of<one_chain>, digest_of<unflushed>, digest_of<signs>,
                                               digest_of<shape>};

}  // namespace

const MatrixCheck matrix_check = {kDigests[one_chain]};

}  // namespace qt::QT_ISA

extern "C" int num_faults() { return qt::QT_ISA::count; }
extern "C" std::uint64_t digest(int fault) { return qt::QT_ISA::kDigests[fault](); }
extern "C" std::uint64_t right() { return qt::kRightProducts; }
