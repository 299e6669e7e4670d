// A kernel's `#include <cudaTypedefs.h>` finds this.

#pragma once

#include "cuda.h"
