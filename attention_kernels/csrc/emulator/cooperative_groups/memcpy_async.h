// A kernel's `#include <cooperative_groups/memcpy_async.h>` finds this.

#pragma once

#include "../cooperative_groups.h"
