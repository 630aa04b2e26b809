// What kernels rely on without looking is checked where an operation is recorded, once, not where it runs.
//
// Arguments come from Python that has checked a model's configuration: a failed check is a mistake of ours, and the
// process ends with a line that says which, instead of with another request's numbers.
#pragma once

#include <cstdio>
#include <cstdlib>

// Ends the process unless `condition` holds; what follows says, as printf does, what was found.
#define QT_REQUIRE(condition, ...)                                                     \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "csrc/cpu: %s: %s does not hold: ", __func__, #condition);  \
      std::fprintf(stderr, __VA_ARGS__);                                               \
      std::fputc('\n', stderr);                                                        \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)
