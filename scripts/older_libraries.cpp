// Defines what torch's headers would take from newer libraries than manylinux_2_28 has. It is linked
// to each library in the wheel.

#include <sstream>

// In libstdc++ since GCC 9.
template std::stringstream::basic_stringstream();

// In glibc since 2.32: whether the process has a single thread. Zero means that it may have more.
extern "C" {
__attribute__((visibility("hidden"))) char __libc_single_threaded = 0;
}
