#include "linear_tile.hpp"
namespace qt::QT_ISA {
namespace {
Preparation preparation(const Weight&, Dtype, bool) { return {false, 0, 0}; }
void nothing(const void*, index_t, index_t) {}
}  // namespace
const LinearKernels integer_linear = {preparation, nothing, nothing};
}  // namespace qt::QT_ISA
