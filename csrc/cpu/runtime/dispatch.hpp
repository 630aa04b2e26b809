// Which instruction set this process computes with: the best one that the library was built for and the processor has.
//
// An instruction set has kernels of its own where setup.py compiles their source for it, and its parent's otherwise: `amx` is
// avx512_bf16 but for what multiplies matrices, and those with dot products of bytes differ from their parents in what
// multiplies integers alone; avx512_bf16 differs from avx512_vnni in all else.
//
//   avx2_vnni    AVX-VNNI: Alder Lake and later without AVX-512
//   avx512_vnni  Cascade Lake, Ice Lake
//   neon_dot     FEAT_DotProd: Neoverse N1, Cortex-A76, Apple M1
//   neon_i8mm    FEAT_I8MM besides: bytes of both signs
//   neon_bf16    FEAT_BF16 besides: Neoverse N2 and V1, Apple M2
#pragma once

#include <initializer_list>

// X(instruction set, a, b) for each, lesser ones first.
#if defined(__x86_64__)
#define QT_ISAS(X, a, b)                                                                                           \
  X(baseline, a, b)                                                                                                \
  X(avx2, a, b) X(avx2_vnni, a, b)                                                                                 \
  X(avx512, a, b) X(avx512_vnni, a, b) X(avx512_bf16, a, b)                                                        \
  X(amx_emulated, a, b) X(amx, a, b)
#elif defined(__aarch64__) && defined(__linux__)
#define QT_ISAS(X, a, b) X(baseline, a, b) X(neon_dot, a, b) X(neon_i8mm, a, b) X(neon_bf16, a, b)
#else
#define QT_ISAS(X, a, b) X(baseline, a, b)
#endif

namespace qt {

#define QT_ENUMERATOR(isa, a, b) isa,
enum class Isa : int { QT_ISAS(QT_ENUMERATOR, , ) };
#undef QT_ENUMERATOR

// Chosen once. QUINTET_ISA in the environment asks for another one than the best; `amx_emulated`, which computes the bits of
// amx slowly on any processor with avx512_bf16, is never chosen by itself.
Isa isa();

// The parent: `isa` uses its kernels where it has none of its own. Of baseline: itself.
Isa parent_of(Isa isa);

// The chosen one of a kernel's tables, one for each instruction set; null: it has none.
template <class Kernels>
const Kernels& choose(std::initializer_list<const Kernels*> tables) {
  Isa one = isa();
  while (tables.begin()[int(one)] == nullptr) one = parent_of(one);
  return *tables.begin()[int(one)];
}

// The same of one kernel, where tables may lack some: `of` finds it in a table.
template <class Kernels, class Of>
const auto& choose_one(std::initializer_list<const Kernels*> tables, Of of) {
  Isa one = isa();
  while (tables.begin()[int(one)] == nullptr || of(*tables.begin()[int(one)]).run == nullptr) one = parent_of(one);
  return of(*tables.begin()[int(one)]);
}

// Declares a table of kernels that instruction sets define, and chooses one.
//
//   struct LinearKernels { ... };                  // function pointers
//   QT_DECLARE_KERNELS(LinearKernels, linear)      // in the header: namespace qt::avx2 { extern const LinearKernels linear; } ...
//   const LinearKernels linear = {...};            // in the kernel source, inside namespace qt::QT_ISA
//   QT_CHOOSE(linear)                              // in a source that is compiled once: a reference to the chosen table
//   QT_CHOOSE_ONE(linear, of)                      // likewise, to one kernel: of the first table, from the chosen one on, that has it
//
// Weak: the address of an undefined table is null.
#define QT_DECLARE_TABLE(isa, Type, name) \
  namespace isa { extern const Type name __attribute__((weak, visibility("hidden"))); }
#define QT_DECLARE_KERNELS(Type, name) QT_ISAS(QT_DECLARE_TABLE, Type, name)
#define QT_TABLE_OF(isa, name, b) &::qt::isa::name,
#define QT_CHOOSE(name) (::qt::choose({QT_ISAS(QT_TABLE_OF, name, )}))
#define QT_CHOOSE_ONE(name, of) (::qt::choose_one({QT_ISAS(QT_TABLE_OF, name, )}, of))

}  // namespace qt
