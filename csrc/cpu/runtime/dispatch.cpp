#include "dispatch.hpp"

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "matrix_check.hpp"
#include "work.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace qt {
namespace {

#define QT_NAME(isa, a, b) #isa,
constexpr const char* kNames[] = {QT_ISAS(QT_NAME, , )};
constexpr int kCount = int(sizeof kNames / sizeof kNames[0]);

// Instruction sets for which this library has all kernels, each between spaces (setup.py). The other sets may have some
// kernels.
#ifdef QT_BUILT
constexpr const char* kBuilt = " " QT_BUILT " ";
#else
constexpr const char* kBuilt = nullptr;
#endif

bool is_built(const char* name) {
  if (kBuilt == nullptr) return true;
  char word[32];
  std::snprintf(word, sizeof word, " %s ", name);
  return std::strstr(kBuilt, word) != nullptr;
}

char refusal[256];  // reason why the requested or the best set is not used; empty: no refusal

#if defined(__x86_64__)
// AMX for bf16 and bytes (CPUID, leaf 7: edx bits 22, 24, 25).
bool has_tiles() {
  unsigned a, b, c, d;
  constexpr unsigned kTiles = 1u << 22 | 1u << 24 | 1u << 25;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kTiles) == kTiles;
}

// AVX-VNNI: byte dot products in AVX2 registers (CPUID, leaf 7, subleaf 1: eax bit 4).
bool has_avx_vnni() {
  unsigned a, b, c, d;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4) != 0;
}

// Requests permission for the AMX register state from the kernel. The permission covers all threads of the process, existing
// ones included, and its forked children (Linux 5.16, Documentation/arch/x86/xstate.rst). The kernel refuses (ENOSPC) if a
// thread's alternate signal stack is too small for the state.
bool tiles_granted() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0) return true;
  std::snprintf(refusal, sizeof refusal,
                "amx: the processor has it, the operating system does not grant it: arch_prctl(ARCH_REQ_XCOMP_PERM, "
                "XFEATURE_XTILEDATA): %s (Linux before 5.16, a sandbox that filters system calls, or a hypervisor)",
                std::strerror(errno));
#endif
  return false;
}

// True if the products of the matrix unit have the bits of its manual. Null: this library has no kernels for the unit.
bool multiplies(const char* name, const MatrixCheck* unit) {
  const std::uint64_t digest = unit == nullptr ? kRightProducts : unit->digest();
  if (digest == kRightProducts) return true;
  std::snprintf(refusal, sizeof refusal,
                "%s: products of known numbers have not the bits that the processor's manual says (%016llx instead of %016llx): a "
                "hypervisor that emulates the unit otherwise, or a defect",
                name, static_cast<unsigned long long>(digest), static_cast<unsigned long long>(kRightProducts));
  return false;
}
#elif defined(__aarch64__) && defined(__linux__)
// Processor features reported by the kernel (Linux, Documentation/arch/arm64/elf_hwcaps.rst).
bool has_dot_products() { return (getauxval(AT_HWCAP) & 1ul << 20) != 0; }  // HWCAP_ASIMDDP
bool has_i8mm() { return (getauxval(AT_HWCAP2) & 1ul << 13) != 0; }         // HWCAP2_I8MM
bool has_fp16() { return (getauxval(AT_HWCAP) & 1ul << 10) != 0; }          // HWCAP_ASIMDHP
bool has_bf16() { return (getauxval(AT_HWCAP2) & 1ul << 14) != 0; }         // HWCAP2_BF16
#endif

bool has(Isa one) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  switch (one) {
    case Isa::baseline: return true;
    case Isa::avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    case Isa::avx2_vnni: return has(Isa::avx2) && has_avx_vnni();
    case Isa::avx512:
      return has(Isa::avx2) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    case Isa::avx512_vnni: return has(Isa::avx512) && __builtin_cpu_supports("avx512vnni");
    case Isa::avx512_bf16: return has(Isa::avx512_vnni) && __builtin_cpu_supports("avx512bf16");
    case Isa::amx_emulated: return has(Isa::avx512_bf16) && multiplies("amx_emulated", &amx_emulated::matrix_check);
    case Isa::amx:
      return has(Isa::avx512_bf16) && has_tiles() && tiles_granted() && multiplies("amx", &amx::matrix_check);
  }
#elif defined(__aarch64__) && defined(__linux__)
  switch (one) {
    case Isa::baseline: return true;
    case Isa::neon_dot: return has_dot_products();
    case Isa::neon_i8mm: return has(Isa::neon_dot) && has_i8mm();
    case Isa::neon_bf16: return has(Isa::neon_i8mm) && has_fp16() && has_bf16();
  }
#endif
  return one == Isa::baseline;
}

// If the library has no usable set, qt_isa_at reports none and the caller must not use the library.
Isa best() {
  for (int i = kCount - 1; i > 0; --i)
    if (std::strcmp(kNames[i], "amx_emulated") != 0 && is_built(kNames[i]) && has(Isa(i))) return Isa(i);
  return Isa::baseline;
}

Isa choose() {
  const char* asked = std::getenv("QUINTET_ISA");
  if (!asked || !*asked) return best();
  for (int i = 0; i < kCount; ++i)
    if (std::strcmp(asked, kNames[i]) == 0) {
      if (!is_built(asked)) {
        std::snprintf(refusal, sizeof refusal, "QUINTET_ISA=%s: this build has kernels of%sonly: `make kernels` builds all", asked,
                      kBuilt);
        return best();
      }
      if (has(Isa(i))) return Isa(i);
      if (!refusal[0]) std::snprintf(refusal, sizeof refusal, "QUINTET_ISA=%s: this processor does not have it", asked);
      return best();
    }
  int length = std::snprintf(refusal, sizeof refusal, "QUINTET_ISA=%.60s: no such instruction set; there are", asked);
  for (const char* name : kNames)
    if (length < int(sizeof refusal)) length += std::snprintf(refusal + length, sizeof refusal - length, " %s", name);
  return best();
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

Isa parent_of(Isa one) {
#if defined(__x86_64__)
  if (one == Isa::amx) return Isa::avx512_bf16;
  if (one == Isa::avx512) return Isa::avx2;
#endif
  return one == Isa::baseline ? one : Isa(int(one) - 1);
}

}  // namespace qt

// Returns the name of the instruction set in use.
QT_EXPORT const char* qt_isa() { return qt::kNames[int(qt::isa())]; }

// Returns why a better set, or the requested set, is not in use; empty if none was refused.
QT_EXPORT const char* qt_isa_refusal() {
  qt::isa();
  return qt::refusal;
}

// Returns the name of the i-th usable instruction set of this processor, in ascending order; null after the last one.
QT_EXPORT const char* qt_isa_at(int i) {
  for (int one = 0; one < qt::kCount; ++one)
    if (qt::is_built(qt::kNames[one]) && qt::has(qt::Isa(one)) && i-- == 0) return qt::kNames[one];
  return nullptr;
}
