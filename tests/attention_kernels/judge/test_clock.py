"""No trick of a table passes as right or is timed as right, in a worker; an honest kernel is."""

from __future__ import annotations

import contextlib
import ctypes
import re
from types import SimpleNamespace

import pytest

from attention_kernels.judge.calls import CallError
from attention_kernels.judge.clock import Clock, Numbers, RejectedTimeError
from attention_kernels.judge.inputs import Case, DecodeCase
from attention_kernels.judge.suite import KERNEL_ERRORS, describe_error, judged, run_check
from attention_kernels.judge.worker import Timing, Worker
from tests.conftest import DEVICES

CASE = Case(64, 32, num_heads=2)
LONG = Case(384, 64, num_heads=4)  # of a few milliseconds
REGISTERED = """
@register(name="STRANGE", family="plug-in", summary="A cheat.", device_types=("cpu", "cuda"),
          precisions={"float32": "ieee-fp32"}, cuda_graphs=GRAPHS)
def load():
    return Kernels(attention)
"""
# What the cheat does, how, and what catches it: (name, source, words).
CHEATS = {
    "patches_the_judge": (
        """
def attention(q, k, v, scale, causal):
    return torch.zeros(q.shape, device=q.device)
from attention_kernels.judge import suite, truth
suite._judge = lambda *_: reference.Verdict(0.0, 1.0, 0.0)
reference.truth = reference.judge = None
""",
        "error",
    ),
    "leaves_a_head_out_while_timed": (
        """
def attention(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    if any("one_pass" in frame.function for frame in inspect.stack()):
        o[:, :, -1] = 0
    return o
""",
        "the timed outputs are wrong",
    ),
    "has_one_buffer_while_timed": (
        """
@functools.cache
def buffer(shape, device):
    return torch.empty(shape, device=device)
def attention(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    if any("one_pass" in frame.function for frame in inspect.stack()):
        return buffer(q.shape, q.device).copy_(o)
    return o
""",
        "the timed outputs are wrong",
    ),
    "claims_a_time_below_0": (
        """
def attention(q, k, v, scale, causal):
    return right(q, k, v, scale, causal)
from attention_kernels.judge import caller
run = caller._Timed.run
caller._Timed.run = lambda self, passes=1: run(self, passes) - 1e3
""",
        "beneath what the device can do",
    ),
    "ends_while_timed": (
        """
def attention(q, k, v, scale, causal):
    if any("one_pass" in frame.function for frame in inspect.stack()):
        print("PASSED", flush=True)
        os._exit(0)
    return right(q, k, v, scale, causal)
""",
        "it ended with exit status 0",
    ),
    "answers_in_words": (
        """
def attention(q, k, v, scale, causal):
    from multiprocessing.connection import Connection
    for x in gc.get_objects():
        if type(x) is Connection:
            x.send_bytes(b"PASSED")
    return right(q, k, v, scale, causal)
""",
        "it was killed|it broke off the connection",
    ),
    "ends_the_server": (
        """
server = os.getppid()
def attention(q, k, v, scale, causal):
    with contextlib.suppress(ProcessLookupError):
        os.kill(server, 9)
    return torch.zeros(q.shape, device=q.device)
""",
        "error",
    ),
    "is_lazy": (
        """
class Lazy(torch.Tensor):
    pass
def attention(q, k, v, scale, causal):
    return right(q, k, v, scale, causal).as_subclass(Lazy)
""",
        "it returned Lazy instead of",
    ),
    "keeps_results_by_pointer": (
        """
memo = {}
def attention(q, k, v, scale, causal):
    key = q.data_ptr(), k.data_ptr(), q.shape
    if key not in memo:
        memo[key] = right(q, k, v, scale, causal)
    return memo[key].clone()
""",
        "the timed outputs are wrong",
    ),
    "stops_the_events": (
        """
torch.cuda.Event.elapsed_time = lambda *_: 1e-3
time.perf_counter = lambda: 0.0
def attention(q, k, v, scale, causal):
    return right(q, k, v, scale, causal)
""",
        "the clocks disagree|beneath what the device can do",
    ),
    "looks_for_the_answer": (
        """
def attention(q, k, v, scale, causal):
    right_ones = [
        x for x in gc.get_objects()
        if isinstance(x, torch.Tensor) and x.shape == q.shape and x.dtype == torch.float64
    ]
    return right_ones[0].float() if right_ones else torch.zeros(q.shape, device=q.device)
""",
        "error",
    ),
    "writes_to_the_inputs_from_behind": (
        """
def attention(q, k, v, scale, causal):
    o = right(q, k, v, scale, causal)
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:attention" in os.readlink(f"/proc/self/fd/{fd}"):
                os.pwrite(int(fd), bytes(4096), 0)
    return o
""",
        "it wrote outside its input q",
    ),
    "makes_the_shared_memory_too_large_to_map": (
        """
def attention(q, k, v, scale, causal):
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if "memfd:attention" in os.readlink(f"/proc/self/fd/{fd}"):
                os.ftruncate(int(fd), 2**62)
    return right(q, k, v, scale, causal)
""",
        "passed",  # it does no harm
    ),
    "says_that_it_ran_elsewhere": (
        """
def attention(q, k, v, scale, causal):
    return right(q, k, v, scale, causal)
from attention_kernels.judge import worker
Facts = worker.Facts
worker.Facts = lambda *its: {
    **worker.msgspec.structs.asdict(Facts(*its[-3:])),
    "device": "cpu" if torch.cuda.is_available() else "cuda",
}
""",
        "passed",  # by the rules of the device that the judge chose
    ),
    "clears_the_screen_and_prints_a_verdict": (
        """
def attention(q, k, v, scale, causal):
    raise RuntimeError(chr(27) + "[2J" + chr(27) + "[HPASSED" + chr(27) + "[8m")
""",
        r"RuntimeError: \ufffd\[2J\ufffd\[HPASSED\ufffd\[8m",
    ),
    "takes_more_threads": (
        """
def attention(q, k, v, scale, causal):
    torch.set_num_threads(torch.get_num_threads() + 1)
    return right(q, k, v, scale, causal)
""",
        "it changed torch's number of threads",
    ),
    "replays_a_copy_of_earlier_results": (
        """
memo = {}
def attention(q, k, v, scale, causal):
    key = q.data_ptr(), q.shape
    if key not in memo and not torch.cuda.is_current_stream_capturing():
        memo[key] = right(q, k, v, scale, causal)
    return memo[key].clone() if key in memo else torch.zeros(q.shape, device=q.device)
""",
        "the timed outputs are wrong",
    ),
}


def fate(case, device, sets=8, rounds=3, what="STRANGE"):
    """What the judge finds of a backend: checked once, timed, and its clocks compared."""
    with contextlib.closing(Worker(what, device)) as worker:
        try:
            verdict = run_check(worker, judged(worker, case))
            if not verdict.passed:
                return str(verdict)
            clock = Clock(worker, Numbers(case, sets), floor_us=0.01)
            for _ in range(rounds):
                clock.sample()
            clock.check()
        except (RejectedTimeError, *KERNEL_ERRORS) as error:
            return describe_error(error)
        return "passed"


@pytest.mark.parametrize("graphs", [True, False], ids=["graph", "eager"])
@pytest.mark.parametrize("name", CHEATS)
@pytest.mark.parametrize("device", DEVICES)
def test_a_cheat_is_neither_passed_nor_timed(name, graphs, device, plugin, request):
    if device == "cpu" and (graphs or name == "replays_a_copy_of_earlier_results"):
        pytest.skip("needs CUDA")
    source, words = CHEATS[name]
    if words == "passed":
        request.getfixturevalue("busy_machine")
    plugin(source + REGISTERED.replace("GRAPHS", str(graphs)))
    found = fate(LONG if device == "cuda" else CASE, device)
    assert re.search(words, found), found


def test_an_honest_kernel_is_timed(plugin):
    """Another program on the machine may make the clocks differ, but not every time."""
    plugin(
        "def attention(q, k, v, scale, causal):\n    return right(q, k, v, scale, causal)\n"
        + REGISTERED.replace("GRAPHS", "True")
    )
    for _ in range(10):
        if not (found := fate(LONG, "cpu")).startswith("the clocks disagree"):
            break
    assert found == "passed"


DECODES = """
def decode(q, k, v, seqlens, scale):
    {body}
@register(name="STRANGE", family="plug-in", summary="It decodes.", device_types=("cpu", "cuda"),
          precisions={{"float32": "ieee-fp32"}})
def load():
    return Kernels(decode=decode)
"""
DECODE_BODIES = {
    "is_honest": ("return right(q, k, v, scale, False, seqlens)", "passed"),
    "forgets_a_row_while_timed": (
        """o = right(q, k, v, scale, False, seqlens)
    if any("one_pass" in frame.function for frame in inspect.stack()):
        o[-1] = 0
    return o""",
        "the timed outputs are wrong",
    ),
    "keeps_the_first_result": (
        """if not hasattr(load, "o"):
        load.o = right(q, k, v, scale, False, seqlens)
    return load.o.clone()""",
        "the timed outputs are wrong",
    ),
}


@pytest.mark.usefixtures("busy_machine")
@pytest.mark.parametrize("name", DECODE_BODIES)
@pytest.mark.parametrize("device", DEVICES)
def test_decode_is_timed_by_the_same_rules(name, device, plugin):
    body, words = DECODE_BODIES[name]
    plugin(DECODES.format(body=body))
    found = fate(DecodeCase(32, lengths=(9, 200), max_seqlen=200), device)
    assert re.search(words, found), found


@pytest.mark.parametrize(("checks_s", "passes"), [(1.5e-3, True), (0.0, False)])
def test_the_time_of_factors_and_checksum_counts_for_nobody(checks_s, passes, monkeypatch):
    """As measured on an H200, with 1 GB of inputs and outputs and a kernel of 1.85 ms."""
    worker = SimpleNamespace(device="cuda")
    clock = Clock(worker, Numbers(CASE, 5))
    inside = {"once": 1.85e-3, "often": 1.85e-3}
    outside = {"once_outside": 4.45e-3, "often_outside": 1.86e-3}
    clock._timings = [Timing(0, 0, [], workspace=0, **inside, **outside, passes=11)] * 5
    monkeypatch.setattr(Numbers, "checks_s", lambda *_: checks_s)
    with contextlib.nullcontext() if passes else pytest.raises(RejectedTimeError, match="clocks"):
        clock.check()


def test_no_other_process_of_the_user_reads_or_traces_the_judge_or_a_worker(plugin):
    """A worker could take its outputs from another's memory, or change the server's."""
    plugin(
        "def attention(*_):\n    raise RuntimeError(f'dumpable: {ctypes.CDLL(None).prctl(3)}')\n"
        + REGISTERED.replace("GRAPHS", "True")
    )
    with contextlib.closing(Worker("STRANGE", "cpu")) as worker:
        assert ctypes.CDLL(None).prctl(3) == 0  # PR_GET_DUMPABLE
        with pytest.raises(CallError, match="dumpable: 0"):
            run_check(worker, judged(worker, CASE))
