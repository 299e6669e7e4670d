// A kernel's `#include <math_constants.h>` finds this; infinities and NaNs are in cuda_emulator.h.

#pragma once

#include "cuda_emulator.h"

#define CUDART_MAX_NORMAL_F std::numeric_limits<float>::max()
#define CUDART_PI_F 3.141592654f
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f
#define CUDART_SQRT_HALF_F 0.707106781f
