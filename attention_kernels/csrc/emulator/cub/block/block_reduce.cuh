// A kernel's `#include <cub/block/block_reduce.cuh>` finds this.

#pragma once

#include "../cub.cuh"
