"""Ladders: folders of version files, each of which is a backend.

header reads a version file, compilers finds nvcc and g++, build makes the shared library, and op
loads it as a backend.
"""

from attention_kernels.ladder.op import (
    architectures,
    backend,
    build_all,
    define_op,
    families,
    race_checked,
    register_ladder,
    resolve,
    resolve_all,
    versions,
)

__all__ = [
    "architectures",
    "backend",
    "build_all",
    "define_op",
    "families",
    "race_checked",
    "register_ladder",
    "resolve",
    "resolve_all",
    "versions",
]
