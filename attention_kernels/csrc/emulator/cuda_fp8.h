// A kernel's `#include <cuda_fp8.h>` finds this. Many files include it and use none of its types, which
// the emulator does not have.

#pragma once

#include "cuda_fp16.h"
