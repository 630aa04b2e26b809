#include "thread_memory.hpp"

#include <cstdlib>

namespace qt {
namespace {

// Buffer of one thread. It grows to the largest request. The system commits only the pages that kernels touch.
struct Kept {
  void* memory = nullptr;
  index_t size = 0;
  ~Kept() { std::free(memory); }
};

}  // namespace

void* thread_memory(index_t bytes) {
  static thread_local Kept kept;
  if (kept.size < bytes) {
    std::free(kept.memory);
    kept.size = (bytes + 63) / 64 * 64;
    kept.memory = std::aligned_alloc(64, kept.size);
  }
  return kept.memory;
}

}  // namespace qt
