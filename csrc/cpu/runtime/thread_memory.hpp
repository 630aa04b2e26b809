// Memory that each thread keeps for what it computes with.
//
// A thread's stack may be small (512 KB or less with musl, or where a host program made the thread), so a kernel that needs
// more than some tens of KB takes it from here. Asking the system for it at every step would cost more than a pass over it.
#pragma once

#include "work.hpp"

namespace qt {

// At least so many bytes of the calling thread's, 64-byte aligned, with whatever was there: valid until its next call.
void* thread_memory(index_t bytes);

}  // namespace qt
