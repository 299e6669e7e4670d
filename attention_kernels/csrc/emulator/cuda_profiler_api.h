// A kernel's `#include <cuda_profiler_api.h>` finds this; nothing is profiled.

#pragma once

#include "cuda_emulator.h"

inline cudaError_t cudaProfilerStart() { return cudaSuccess; }
inline cudaError_t cudaProfilerStop() { return cudaSuccess; }
