// A kernel's `#include <cuda_bf16.h>` finds this.

#pragma once

#include "cuda_fp16.h"
