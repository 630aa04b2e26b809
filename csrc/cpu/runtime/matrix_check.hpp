// Whether a matrix unit multiplies as its manual says, asked once, before kernels rely on it: a hypervisor that emulates it, or a
// processor with a defect, would make wrong text without a word.
#pragma once

#include <cstdint>

#include "dispatch.hpp"

namespace qt {

struct MatrixCheck {
  std::uint64_t (*digest)();  // of the products of known numbers
};

// What it is where every bit is right.
inline constexpr std::uint64_t kRightProducts = 0xA3C4505B7B60CC8A;

QT_DECLARE_KERNELS(MatrixCheck, matrix_check)

}  // namespace qt
