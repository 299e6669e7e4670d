// A kernel's `#include <cuda_runtime_api.h>` finds this.

#pragma once

#include "cuda_emulator.h"
