// A kernel's `#include <vector_functions.h>` finds this.

#pragma once

#include "cuda_emulator.h"
