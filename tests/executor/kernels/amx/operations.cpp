// Operations of csrc/cpu/runtime/amx.hpp as C functions, for test_amx.py: compiled for the emulated unit and for the real one.
#include "amx.hpp"

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

using namespace qt::QT_ISA;

// `bytes`: bytes instead of bf16. columns: of C and B. depth: pairs or quadruples, rows of B.
extern "C" void multiply(int bytes, int rows, int columns, int depth, const void* a, const void* b, void* c, index_t stride) {
  AmxShapes shapes;
  shapes.set(0, rows, columns * 4);
  shapes.set(1, rows, depth * 4);
  shapes.set(2, depth, columns * 4);
  Amx amx;
  amx.configure(shapes);
  amx.load<0>(c, stride);
  amx.load<1>(a, stride);
  amx.load<2>(b, stride);
  if (bytes)
    amx.multiply_bytes<0, 1, 2>();
  else
    amx.multiply_bf16<0, 1, 2>();
  amx.store<0>(c, stride);
}

// Write the registers after configuration and after `zero` to `out`: 2 x 16 rows of 64 bytes.
extern "C" void clear(const void* numbers, void* out) {
  AmxShapes shapes;
  shapes.set(0, 16, 64);
  shapes.set(7, 16, 64);
  Amx amx;
  amx.configure(shapes);
  amx.load<0>(numbers, 64);
  amx.configure(shapes);
  amx.store<0>(out, 64);
  amx.load<7>(numbers, 64);
  amx.zero<7>();
  amx.store<7>((char*)out + 1024, 64);
}

// Request the registers, like csrc/cpu/runtime/dispatch.cpp.
extern "C" int permitted() {
#if defined(__linux__)
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
  return 0;
#endif
}
