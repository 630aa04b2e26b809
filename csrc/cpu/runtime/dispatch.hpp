// Choice of the instruction set: the best one that the library was built for and the processor supports.
//
// setup.py compiles a kernel source for some instruction sets; the other sets use the kernels of their parent. `amx` differs
// from avx512_bf16 in matrix products only. Sets with byte dot products differ from their parents in integer products only.
// avx512_bf16 differs from avx512_vnni in all other kernels.
//
//   avx2_vnni    AVX-VNNI: Alder Lake and later without AVX-512
//   avx512_vnni  Cascade Lake, Ice Lake
//   neon_dot     FEAT_DotProd: Neoverse N1, Cortex-A76, Apple M1
//   neon_i8mm    and FEAT_I8MM: products of signed and unsigned bytes
//   neon_bf16    and FEAT_BF16: Neoverse N2 and V1, Apple M2
#pragma once

#include <initializer_list>

// X(instruction set, a, b) for each set, in ascending order.
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

// Returns the instruction set, chosen once per process. The environment variable QUINTET_ISA requests a set other than the best
// one. `amx_emulated` computes the bits of amx slowly on any processor with avx512_bf16; it is used only on request.
Isa isa();

// Returns the parent: `isa` uses its kernels where it has none. The parent of baseline is baseline.
Isa parent_of(Isa isa);

// Returns the table of the chosen set, or of its nearest ancestor with a table. `tables` has one entry per instruction set;
// null: no table.
template <class Kernels>
const Kernels& choose(std::initializer_list<const Kernels*> tables) {
  Isa one = isa();
  while (tables.begin()[int(one)] == nullptr) one = parent_of(one);
  return *tables.begin()[int(one)];
}

// Returns one kernel, from the nearest table that has it: `of` selects the kernel in a table.
template <class Kernels, class Of>
const auto& choose_one(std::initializer_list<const Kernels*> tables, Of of) {
  Isa one = isa();
  while (tables.begin()[int(one)] == nullptr || of(*tables.begin()[int(one)]).run == nullptr) one = parent_of(one);
  return of(*tables.begin()[int(one)]);
}

// Macros that declare a kernel table for each instruction set and choose one of them.
//
//   struct LinearKernels { ... };                  // function pointers
//   QT_DECLARE_KERNELS(LinearKernels, linear)      // in the header: namespace qt::avx2 { extern const LinearKernels linear; }
//   const LinearKernels linear = {...};            // in the kernel source, inside namespace qt::QT_ISA
//   QT_CHOOSE(linear)                              // in a source that is compiled once: a reference to the chosen table
//   QT_CHOOSE_ONE(linear, of)                      // a reference to one kernel: from the nearest table that has it
//
// The declarations are weak: the address of an undefined table is null.
#define QT_DECLARE_TABLE(isa, Type, name) \
  namespace isa { extern const Type name __attribute__((weak, visibility("hidden"))); }
#define QT_DECLARE_KERNELS(Type, name) QT_ISAS(QT_DECLARE_TABLE, Type, name)
#define QT_TABLE_OF(isa, name, b) &::qt::isa::name,
#define QT_CHOOSE(name) (::qt::choose({QT_ISAS(QT_TABLE_OF, name, )}))
#define QT_CHOOSE_ONE(name, of) (::qt::choose_one({QT_ISAS(QT_TABLE_OF, name, )}, of))

}  // namespace qt
