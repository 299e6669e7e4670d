// Where a recorder writes: to standard output as it was. What the version file prints there goes to
// standard error.

#pragma once

#include <unistd.h>

#include <cstdio>

namespace attention {

inline FILE* const channel = [] {
  FILE* const output = fdopen(dup(STDOUT_FILENO), "w");
  dup2(STDERR_FILENO, STDOUT_FILENO);
  return output;
}();

}  // namespace attention
