// The part of the emulator that does not depend on the kernel. It is compiled
// once and linked to each library and program of emulated kernels.

#include "runtime.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <ucontext.h>
#include <unistd.h>

#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdarg>
#include <cstdlib>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>

// Hides what these files define, but not what the headers above declare, from other libraries.
#pragma GCC visibility push(hidden)

// clang-format off: the others call races.cpp
#include "races.cpp"
// clang-format on
#include "barrier.cpp"
#include "block.cpp"
#include "cluster.cpp"
#include "faults.cpp"
#include "grid.cpp"
#include "pipeline.cpp"
#include "tensor_core.cpp"
#include "tma.cpp"
#include "wgmma.cpp"

#pragma GCC visibility pop

#include "thread_sanitizer.cpp"
