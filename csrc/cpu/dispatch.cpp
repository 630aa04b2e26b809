#include "dispatch.hpp"

#include <cstdlib>
#include <cstring>

#include "work.hpp"

namespace qt {
namespace {

constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512_bf16"};

Isa best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) return Isa::avx512_bf16;
  if (avx512) return Isa::avx512;
  if (avx2) return Isa::avx2;
#endif
  return Isa::baseline;
}

Isa choose() {
  const Isa most = best();
  const char* asked = std::getenv("QUINTET_ISA");
  if (!asked) return most;
  for (int i = 0; i <= int(most); ++i)
    if (std::strcmp(asked, kNames[i]) == 0) return Isa(i);
  return most;
}

}  // namespace

Isa isa() {
  static const Isa chosen = choose();
  return chosen;
}

}  // namespace qt

// The name of the instruction set in use.
QT_EXPORT const char* qt_isa() { return qt::kNames[int(qt::isa())]; }
