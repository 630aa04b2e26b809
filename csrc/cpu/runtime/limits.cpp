// Measurement of the machine's limits for bench/kernels and bench/peers. Each call returns when all threads are done.
#include "limits.hpp"
#include "pool.hpp"

namespace {

constexpr index_t kItemsPerThread = 16;

// Runs the items of a kernel; returns the number of items.
index_t run(void (*kernel)(const void*, index_t, index_t)) {
  const index_t items = qt::pool().threads() * kItemsPerThread;
  const qt::Work work{items, 1, kernel, nullptr};
  qt::pool().run(&work, 1);
  return items;
}

// Operations of a vector kernel: one multiplication and one addition for each pair of numbers in a lane.
index_t multiply(void (*kernel)(const void*, index_t, index_t), index_t pairs_in_lane) {
  return run(kernel) * qt::kMultiplyRounds * 24 * QT_CHOOSE(limits).lanes * pairs_in_lane * 2;
}

// Operations of a matrix-unit kernel: 16 x 16 sums of `depth` products each.
index_t multiply_matrices(void (*kernel)(const void*, index_t, index_t), index_t depth) {
  return kernel == nullptr ? 0 : run(kernel) * qt::kMatrixRounds * 4 * 16 * 16 * depth * 2;
}

}  // namespace

// Reads `bytes` of memory once.
QT_EXPORT void qt_limit_read(const void* memory, index_t bytes) {
  const qt::LimitCall call{static_cast<const char*>(memory), bytes};
  const qt::Work work{(bytes + qt::kReadBytes - 1) / qt::kReadBytes, 4, QT_CHOOSE(limits).read, &call};
  qt::pool().run(&work, 1);
}

// Multiply and add in registers for some tens of milliseconds. Return the number of operations; 0 where the instruction set has
// no matrix unit.
QT_EXPORT index_t qt_limit_fma() { return multiply(QT_CHOOSE(limits).floats, 1); }
QT_EXPORT index_t qt_limit_bf16() { return multiply(QT_CHOOSE(limits).pairs, 2); }
QT_EXPORT index_t qt_limit_vnni() { return multiply(QT_CHOOSE(limits).bytes, 4); }
QT_EXPORT index_t qt_limit_matrix_bf16() { return multiply_matrices(QT_CHOOSE(limits).matrix_pairs, 32); }
QT_EXPORT index_t qt_limit_matrix_int8() { return multiply_matrices(QT_CHOOSE(limits).matrix_bytes, 64); }
