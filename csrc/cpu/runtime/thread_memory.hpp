// Scratch memory of each compute thread, kept between calls.
//
// A thread's stack may be small: 512 KB or less with musl, or in a thread of a host program. A kernel that needs more than some
// tens of KB uses this memory. An allocation per step would cost more than a pass over the memory.
#pragma once

#include "work.hpp"

namespace qt {

// Returns at least `bytes` bytes of the calling thread, 64-byte aligned and uninitialized. Valid until its next call.
void* thread_memory(index_t bytes);

}  // namespace qt
