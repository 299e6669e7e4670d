// A kernel's `#include <device_launch_parameters.h>` finds this.

#pragma once

#include "cuda_emulator.h"
