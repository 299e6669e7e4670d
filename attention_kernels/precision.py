"""Precision classes: how exactly a kernel computes, which sets its error budget."""

from __future__ import annotations

# The precision classes of each dtype. Only float32 has products that are coarser than itself: the
# budgets of tf32 would let a 16-bit kernel return zeros.
PRECISIONS = {
    "float32": ("ieee-fp32", "3xtf32", "3xfp16", "tf32"),
    "float16": ("fp16",),
    "bfloat16": ("bf16",),
    "float64": ("fp64",),
}
# The class of a kernel that computes in the dtype itself; 16-bit products are summed in float32.
PLAIN_PRECISIONS = {dtype: classes[0] for dtype, classes in PRECISIONS.items()}
# The largest multiple of its precision class's budget that a backend may ask for. The classes' own
# factors differ by at most 2, so a backend that needs more than 4 belongs to a coarser class.
MOST_ERROR_SLACK = 4.0
