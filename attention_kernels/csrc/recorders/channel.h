// The output of a recorder: the original standard output. What the version file prints to standard
// output goes to standard error.

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
