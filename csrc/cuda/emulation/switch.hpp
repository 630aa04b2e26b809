// Stack switching, the only assembly of the emulator. Saves only the callee-saved registers of the calling convention. A system
// call per switch (ucontext) would be a hundred times slower.
#pragma once

#include <cstdint>

// Saves the state of this stack in *from and resumes the stack `to`.
extern "C" void qt_switch(void** from, void* to);

#if defined(__x86_64__)
asm(R"(
.text
.type qt_switch, @function
qt_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size qt_switch, .-qt_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.type qt_switch, %function
qt_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size qt_switch, .-qt_switch
)");
#else
#error "the emulator switches stacks on x86-64 and aarch64 only"
#endif

namespace quintet::emulation {

// Prepares a new stack so that the first switch to it enters `start`, which never returns.
inline void* prepare_stack(char* top, void (*start)()) {
  auto* words = reinterpret_cast<std::uintptr_t*>(reinterpret_cast<std::uintptr_t>(top) & ~std::uintptr_t(15));
#if defined(__x86_64__)
  words -= 8;  // six registers, the return address, and 8 bytes for the stack alignment after a call
  for (int i = 0; i < 8; ++i) words[i] = 0;
  words[6] = reinterpret_cast<std::uintptr_t>(start);
#else
  words -= 20;
  for (int i = 0; i < 20; ++i) words[i] = 0;
  words[11] = reinterpret_cast<std::uintptr_t>(start);
#endif
  return words;
}

}  // namespace quintet::emulation
