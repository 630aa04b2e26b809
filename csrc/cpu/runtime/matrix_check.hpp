// Self-test of the matrix unit, run once before kernels use it. A hypervisor that emulates the unit wrongly, or a defective
// processor, would otherwise corrupt results without an error.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace qt {

struct MatrixCheck {
  std::uint64_t (*digest)();  // hash of the products of known numbers
};

// The hash if every bit is right.
inline constexpr std::uint64_t kRightProducts = 0xA3C4505B7B60CC8A;

QT_DECLARE_KERNELS(MatrixCheck, matrix_check)

}  // namespace qt
