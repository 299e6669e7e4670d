// A kernel's `#include <cuda_pipeline_primitives.h>` finds this.

#pragma once

#include "cuda_pipeline.h"
