"""What predictions know of each GPU; gpus.toml gives the sources of the numbers."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

SCHEDULERS = 4
"""Schedulers of a multiprocessor, and tensor cores."""
SECTOR = 32
"""Bytes of global memory that are moved together."""


@dataclass(frozen=True)
class GpuModel:
    """One GPU of gpus.toml."""

    name: str
    arch: str
    multiprocessors: int
    clock_ghz: float
    fp32_lanes: int
    integer_lanes: int
    special_lanes: int
    tensor_cycles: float
    """Cycles of one tensor core per mma.sync."""
    warpgroup_flop: int
    """FLOP per cycle of a multiprocessor in products of warpgroups (wgmma)."""
    warpgroup_clocks_ghz: list[tuple[float, float]]
    """The clock at the power limit, by the share of the time in which tensor cores execute them."""
    shared_latency: int
    l1_latency: int
    l2_latency: int
    memory_latency: int
    l2_bytes_per_cycle: float
    l2_kept_mb: float
    """How many million bytes that all multiprocessors read are still there when read again."""
    memory_gb_s: float
    launch_us: float
    early_launch_us: float
    """For a kernel whose blocks start before the previous one has ended, and wait for it."""
    early_start_us: float
    """From when the previous kernel allows it until such a kernel's blocks start."""

    def clock_at(self, busy: float, uses_mma: bool) -> float:
        """Return the clock in GHz, given the share of the time with products of warpgroups.

        uses_mma: warps have products, too, which lower the clock like few of those.
        """
        shares, clocks = zip((0.0, self.clock_ghz), *self.warpgroup_clocks_ghz, strict=True)
        return float(np.interp(max(busy, uses_mma * shares[1]), shares, clocks))


@functools.cache
def gpus() -> dict[str, GpuModel]:
    """Return the known GPUs by the names that `--gpu` takes."""
    text = Path(__file__).with_name("gpus.toml").read_bytes()
    return {
        key: GpuModel(**{name: v[0] if isinstance(v, list) else v for name, v in numbers.items()})
        for key, numbers in msgspec.toml.decode(text).items()
    }
