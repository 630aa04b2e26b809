// Which instruction set this process computes with: the best one that the library was built for and the processor has.
#pragma once

namespace qt {

enum class Isa : int { baseline = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3 };

// Chosen once. QUINTET_ISA in the environment (baseline, avx2, avx512, avx512_bf16) asks for a lesser one.
Isa isa();

// Declares a table of kernels that every instruction set defines, and the function that returns the chosen one.
//
//   struct LinearKernels { ... };                  // function pointers
//   QT_DECLARE_KERNELS(LinearKernels, linear)      // in the header: namespace qt::avx2 { extern const LinearKernels linear; } ...
//   const LinearKernels linear = {...};            // in the kernel source, inside namespace qt::QT_ISA
//   QT_CHOOSE(linear)                              // in the source that is compiled once: a reference to the chosen table
#if defined(__x86_64__)
#define QT_DECLARE_KERNELS(Type, name)                  \
  namespace baseline { extern const Type name; }        \
  namespace avx2 { extern const Type name; }            \
  namespace avx512 { extern const Type name; }          \
  namespace avx512_bf16 { extern const Type name; }
#define QT_CHOOSE(name)                                       \
  (::qt::isa() == ::qt::Isa::avx512_bf16 ? ::qt::avx512_bf16::name \
   : ::qt::isa() == ::qt::Isa::avx512    ? ::qt::avx512::name      \
   : ::qt::isa() == ::qt::Isa::avx2      ? ::qt::avx2::name        \
                                         : ::qt::baseline::name)
#else
#define QT_DECLARE_KERNELS(Type, name) \
  namespace baseline { extern const Type name; }
#define QT_CHOOSE(name) (::qt::baseline::name)
#endif

}  // namespace qt
