// Preconditions of kernels, checked once when an operation is recorded, not when it runs.
//
// Python has already validated the model's configuration, so a failed check is a bug. The process then aborts with a message,
// because continuing could corrupt the results of other requests.
#pragma once

#include <cstdio>
#include <cstdlib>

// Aborts the process unless `condition` holds. The further arguments are a printf format and the values found.
#define QT_REQUIRE(condition, ...)                                                     \
  do {                                                                                 \
    if (!(condition)) {                                                                \
      std::fprintf(stderr, "csrc/cpu: %s: %s does not hold: ", __func__, #condition);  \
      std::fprintf(stderr, __VA_ARGS__);                                               \
      std::fputc('\n', stderr);                                                        \
      std::abort();                                                                    \
    }                                                                                  \
  } while (false)
