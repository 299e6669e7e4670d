// A kernel's `#include <cuda_runtime.h>` finds this.

#pragma once

#include "cuda_emulator.h"
