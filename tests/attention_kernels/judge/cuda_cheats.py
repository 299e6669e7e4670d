"""The table's rows in CUDA; see cheats.py.

v01_cheats.cu is an honest kernel, with the changes that a cheat makes under its name. Rows by
verify() whose header lies have another header.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.attention_kernels.judge.cheats import CHEATS, Cheat

# It sums in double, so that no verdict depends on rounding.
SOURCE = Path(__file__).with_name("v01_cheats.cu").read_text("utf-8")
ERROR = r"error \d|not finite"  # over the budget
ENDED = "ended with exit status 0"
FLAGS = "// Flags:  (none)"


def cuda(name: str, cause: str, caught: str, **options: Any) -> None:
    """Add a row that is tried on a GPU, and nowhere else unless `on` says so."""
    header = options.pop("header", {})
    source = SOURCE
    for before, after in {"#define IS_HONEST": f"#define {name.upper()}", **header}.items():
        assert source.count(before) == 1, before
        source = source.replace(before, after)
    CHEATS.append(Cheat(name, cause, caught, source=source, **{"on": ("cuda",), **options}))


BOTH: dict[str, Any] = {"on": ("cpu", "cuda")}
SLOW: dict[str, Any] = BOTH | {"slow": True}
CLOCK: dict[str, Any] = {"by": "clock"}
RACES = f"{ERROR}|two runs|change earlier rows"
CLOCKS = "the clocks disagree|beneath what the device can do"

# The verdict
cuda(
    "ends_with_status_0", "It ends its process as if all were well.", f"calls _exit|{ENDED}", **BOTH
)
cuda(
    "prints_a_verdict_when_it_is_loaded",
    "It prints a verdict before anything runs, and ends its process.",
    ENDED,
    **BOTH,
)
cuda(
    "answers_that_it_is_loaded",
    "It answers in the worker's place when it is loaded, and ends its process.",
    ENDED,
    **SLOW,
)
cuda(
    "answers_in_the_workers_place",
    "It answers in the worker's place when it is called.",
    f"{ERROR}|changed its input|ended|broke off",
    **SLOW,
)
cuda("stops_itself", "It does not end.", "did not end within", timeout_s=1.0)
cuda(
    "breaks_its_context",
    "It breaks its CUDA context.",
    "traps|__trap|launch failure|CUDA error|cudaError|was killed",
)

# The oracle
cuda(
    "is_right_if_it_can_read_the_judges_memory",
    "It opens the judge's memory.",
    ERROR,
    **CLOCK,
    **SLOW,
)
cuda(
    "is_right_if_it_can_write_to_the_server",
    "It opens the memory of the server that workers are forked from.",
    ERROR,
    **CLOCK,
    **SLOW,
)

# The clock, streams and graphs
cuda("leaves_the_work_to_a_thread", "It works late.", f"{ERROR}|two runs|was killed", **BOTH)
cuda("slows_the_clock", "It replaces the system's clock.", CLOCKS, on=("cpu",), **CLOCK)
cuda("patches_cudas_clock", "It replaces CUDA's clock.", CLOCKS, **CLOCK)
cuda("works_on_a_stream_of_its_own", "It works on a stream that nobody waits for.", f"{RACES}|call")
cuda(
    "works_on_a_stream_of_its_own_while_captured",
    "It works on a stream that the graph does not hold.",
    "the timed outputs are wrong|CUDA error|cudaError",
    **CLOCK,
)
cuda(
    "forks_and_never_joins",
    "It works on a stream of the graph that nobody waits for.",
    f"unjoined|CUDA error|cudaError|{ERROR}",
    **CLOCK,
)
cuda(
    "overlaps_calls_while_captured",
    "It runs the calls of a graph at the same time.",
    "the timed outputs are wrong",
    **CLOCK,
)
cuda(
    "launches_nothing_while_captured", "Its graph is empty.", "the timed outputs are wrong", **CLOCK
)
cuda(
    "keeps_its_inputs_in_l2",
    "It asks for a part of L2 in which its inputs persist; test_clock.py counts what comes of it.",
    "passed",
    **CLOCK,
)

# Results
cuda("writes_nothing", "It returns what was in memory.", ERROR, **BOTH)
cuda("reads_one_key_past_the_end", "It reads past its inputs.", f"{ERROR}|illegal")
cuda(
    "writes_a_row_too_many",
    "It writes over the first row of the next sequence.",
    rf"batch ([2-9]|\d\d).*({ERROR})",
)
cuda(
    "divides_by_a_reciprocal",
    "It is wrong for some numbers of heads: 1 / 41 * 41 is less than 1.",
    rf"(41|47|55|61) heads.*({ERROR})",
    wrong=lambda case: case.num_heads in (41, 47, 55, 61),
    **SLOW,
)
cuda(
    "scales_q_and_back",
    "It changes an input and restores it, except for rounding.",
    "it changed its input q",
    **SLOW,
)
cuda(
    "takes_scratch_to_hold_a_small_maximum",
    "It takes unwritten global memory for a small number; fmaxf() drops a NaN.",
    RACES,
    **SLOW,
)
cuda(
    "takes_shared_memory_to_hold_a_small_maximum",
    "It takes unwritten shared memory for a small number.",
    RACES,
    **BOTH,
)

cuda(
    "keeps_results_by_address",
    "It works once for each address, in C++ where no search in Python looks.",
    f"{ERROR}|two runs|call|change earlier rows",
    **BOTH,
)
cuda("forgets_a_barrier", "It reads a tile before all of it is there.", ERROR, on=("cpu",))
cuda(
    "hides_its_race",
    "It adds atomically only in the build that looks for races.",
    f"race: |{ERROR}|two runs",
    **SLOW,
)

# Headers that lie
cuda(
    "is_built_with_fast_flags_and_rounds",
    "Its flags make it less precise.",
    ERROR,
    header={FLAGS: "// Flags:  --use_fast_math -DROUND=0xffffe000u"},
)
cuda(
    "says_strided_and_is_not",
    "It does not take the layouts that its header names.",
    f"{ERROR}|change no row",
)
cuda(
    "claims_a_head_dim_that_it_has_not",
    "It does not take the head_dims that its header names.",
    "head_dim 64",
    header={"head_dim 32\n": "head_dim 32 64\n"},
)
cuda(
    "asks_for_nine_times_the_budget",
    "Its header asks for a larger budget.",
    "at most 4x",
    header={FLAGS: f"// Error:  9x: it is worth it.\n{FLAGS}"},
    **BOTH,
)

# Honest kernels, by the same rules
cuda("is_honest_when_timed", "It does nothing wrong.", "passed", **CLOCK, **BOTH)
cuda("is_honest_in_the_suite", "It does nothing wrong.", "passed", **SLOW)
