// Call the kernels of csrc/cpu through their C functions, without Python and torch. For emulated processors
// (tests/executor/kernels/test_arm.py), where both would take minutes to start or may be missing.
//
// Each result is compared with a sum in fp64 under an explained bound, and each row's bits between batches and thread counts.
// An argument selects the part to run, none means all; `isa` prints only the instruction set. The exit status is 1 on an error.
#include "numbers.hpp"

int main(int count, char** arguments) {
  using namespace check;
  if (count > 1 && std::strcmp(arguments[1], "isa") == 0) return std::puts(qt_isa()) < 0;
  Findings findings;
  struct {
    const char* name;
    void (*run)(Findings&);
  } const parts[] = {
      {"linear", check_linear}, {"attention", check_attention}, {"rows", check_rows}, {"sampling", check_sampling}};
  for (const auto& part : parts) {
    if (count > 1 && std::strcmp(arguments[1], part.name) != 0) continue;
    const index_t compared = findings.compared(), wrong = findings.wrong();
    part.run(findings);
    std::printf("%s: %s: %ld compared, %ld wrong, digest %016lx\n", qt_isa(), part.name,
                long(findings.compared() - compared), long(findings.wrong() - wrong), (unsigned long)findings.digest());
    std::fflush(stdout);
  }
  return findings.wrong() != 0 || findings.compared() == 0;
}
