// Text for messages. Only the runtime includes this: parsing <string> takes g++ as long as most
// kernels.

#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "block.h"

#pragma GCC visibility push(hidden)

namespace attention::emulator {

// "v07.cu:31"
std::string place(const char* file, int line);

// "byte 256 of 256 bytes of dynamic shared memory"
std::string describe(const SharedMemory& shared, uintptr_t address);

inline std::string to_string(const Site& site) { return site.text().text; }

[[noreturn]] inline void fail(const Site& site, const std::string& what,
                              cudaError_t code = cudaErrorLaunchFailure) {
  fail(code, (to_string(site) + ": " + what).c_str());
}

template <typename T, typename Predicate>
void erase_if(std::vector<T>& all, Predicate is_due) {
  all.erase(std::remove_if(all.begin(), all.end(), is_due), all.end());
}

// Says where the threads of a block wait that cannot run: "; 128 of 256 threads have arrived in ...".
std::string waiting_threads(const Block& block);

// Returns a complaint if a thread ends before what it has begun, or "".
std::string left_by(const InFlight& in_flight, unsigned thread, bool is_last);

}  // namespace attention::emulator

#pragma GCC visibility pop
