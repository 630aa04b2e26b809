// Detection of out-of-bounds accesses. While a grid runs, tensors are copied between inaccessible pages, so an access beyond a
// tensor is an immediate fault. The fault handler ends the launch with a message. Bytes between the end of a tensor and the
// next multiple of 16 are checked after the launch.
#pragma once

#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>

#include "block.hpp"

namespace quintet::emulation {

// A tensor's storage, and the first argument that points into it.
struct Buffer {
  unsigned char* address;
  size_t size;
  int argument;
  unsigned char* copy;
  unsigned char* mapping;
  size_t mapping_size;
};

inline Buffer* buffers = nullptr;
inline int num_buffers = 0;
inline struct sigaction earlier_actions[3];
inline stack_t earlier_stack;
inline constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE};
alignas(16) inline char fault_stack[64 * 1024];

inline unsigned char* past_end(const Buffer& buffer) { return buffer.mapping + buffer.mapping_size - PAGE_BYTES; }

inline void guard(Buffer& buffer) {
  size_t rounded = (buffer.size + 15) / 16 * 16;
  size_t pages = (rounded + PAGE_BYTES - 1) / PAGE_BYTES;
  buffer.mapping_size = (pages + 2) * PAGE_BYTES;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS;
  buffer.mapping = static_cast<unsigned char*>(mmap(nullptr, buffer.mapping_size, PROT_READ | PROT_WRITE, flags, -1, 0));
  mprotect(buffer.mapping, PAGE_BYTES, PROT_NONE);
  mprotect(past_end(buffer), PAGE_BYTES, PROT_NONE);
  memset(buffer.mapping + PAGE_BYTES, CANARY, pages * PAGE_BYTES);
  buffer.copy = past_end(buffer) - rounded;
  memcpy(buffer.copy, buffer.address, buffer.size);
}

inline void check_and_give_back(Buffer& buffer) {
  bool damaged = false;
  for (auto* byte = buffer.mapping + PAGE_BYTES; byte < buffer.copy; ++byte) damaged |= *byte != CANARY;
  if (damaged && !block.failed) report("a thread wrote before argument %d", buffer.argument);
  for (auto* byte = buffer.copy + buffer.size; byte < past_end(buffer); ++byte) damaged |= *byte != CANARY;
  if (damaged && !block.failed) report("a thread wrote past argument %d", buffer.argument);
  // Unmodified memory is not copied back: it may be mapped read-only, such as weights.
  if (memcmp(buffer.address, buffer.copy, buffer.size) != 0) memcpy(buffer.address, buffer.copy, buffer.size);
  munmap(buffer.mapping, buffer.mapping_size);
}

// Address in the guarded copy for `pointer`; the pointer itself if it is not guarded.
inline void* guarded(void* pointer) {
  auto* bytes = static_cast<unsigned char*>(pointer);
  for (int i = 0; i < num_buffers; ++i) {
    const Buffer& buffer = buffers[i];
    if (bytes >= buffer.address && bytes < buffer.address + buffer.size) return buffer.copy + (bytes - buffer.address);
  }
  return pointer;
}

inline void on_fault(int signal, siginfo_t* information, void*) {
  if (signal == SIGFPE) fail("divides an integer by zero");
  auto* address = static_cast<unsigned char*>(information->si_addr);
  for (int i = 0; i < num_buffers; ++i) {
    const Buffer& buffer = buffers[i];
    if (address < buffer.mapping || address >= buffer.mapping + buffer.mapping_size) continue;
    fail("reads or writes %td bytes from the beginning of argument %d; its storage has %zu", address - buffer.copy,
         buffer.argument, buffer.size);
  }
  auto* stacks = reinterpret_cast<unsigned char*>(block.stacks);
  if (address >= stacks && address < stacks + MAX_THREADS * STACK_BYTES)
    fail("needs more than the %zu bytes of stack a thread has here", STACK_BYTES);
  fail("reads or writes %p, which belongs to no argument", information->si_addr);
}

// Handles faults until `leave_guard`. Handlers are per process, so they are off with several ranks: there a fault ends the
// process without a message.
inline void enter_guard(Buffer* given, int num_given, bool handles_faults) {
  buffers = given;
  num_buffers = num_given;
  for (int i = 0; i < num_buffers; ++i) guard(buffers[i]);
  if (!handles_faults) return;
  stack_t stack{};
  stack.ss_sp = fault_stack;
  stack.ss_size = sizeof fault_stack;
  sigaltstack(&stack, &earlier_stack);
  struct sigaction action {};
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;  // the handler does not return: the signal stays deliverable
  for (int i = 0; i < 3; ++i) sigaction(FAULTS[i], &action, &earlier_actions[i]);
}

inline void leave_guard(bool handles_faults) {
  if (handles_faults) {
    for (int i = 0; i < 3; ++i) sigaction(FAULTS[i], &earlier_actions[i], nullptr);
    sigaltstack(&earlier_stack, nullptr);
  }
  for (int i = 0; i < num_buffers; ++i) check_and_give_back(buffers[i]);
}

}  // namespace quintet::emulation
