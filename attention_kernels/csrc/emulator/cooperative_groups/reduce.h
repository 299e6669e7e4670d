// A kernel's `#include <cooperative_groups/reduce.h>` finds this.

#pragma once

#include "../cooperative_groups.h"
