// A kernel's `#include <math_constants.h>` finds this; infinities and NaNs are in cuda_emulator.h.

#pragma once

#include "cuda_emulator.h"

#define CUDART_ZERO_F 0.0f
#define CUDART_ONE_F 1.0f
#define CUDART_MAX_NORMAL_F std::numeric_limits<float>::max()
#define CUDART_NORM_HUGE_F 3.402823466e38f
#define CUDART_PI_F 3.141592654f
#define CUDART_L2E_F 1.442695041f
#define CUDART_LN2_F 0.693147181f
#define CUDART_SQRT_HALF_F 0.707106781f
#define CUDART_PI 3.1415926535897931
#define CUDART_L2E 1.4426950408889634
#define CUDART_LN2 0.69314718055994531
