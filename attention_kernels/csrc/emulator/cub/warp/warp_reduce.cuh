// A kernel's `#include <cub/warp/warp_reduce.cuh>` finds this.

#pragma once

#include "../cub.cuh"
