// A kernel's `#include <vector_types.h>` finds this.

#pragma once

#include "cuda_emulator.h"
