"""The emulation of WMMA fragments, and what is particular to the WMMA ladder.

The ladder's conformance, and more, is in test_cuda.py.
"""

from __future__ import annotations

import ctypes
import itertools
import re
from pathlib import Path

import pytest
import torch

from attention_kernels import BackendSpec, get_backend, list_backends
from attention_kernels.inspection import resources
from attention_kernels.judge.conformance import Case, run_case
from attention_kernels.judge.reference import judge, reference_attention
from attention_kernels.ladder import compilers, header
from tests.attention_kernels.backends.test_cuda import for_each, spec_of
from tests.conftest import DEVICES, usable

FOLDER = header.CSRC / "wmma_fa2"
NAMES = [spec.name for spec in list_backends() if spec.family == "wmma_fa2"]
V02 = header.version_files(FOLDER)[1]
ASKS = 5  # the first version that asks where the elements of its fragments lie
PROBE = Path(__file__).parent / "wmma_probe.cpp"
SHAPES = [(16, 16, 16), (32, 8, 16), (8, 32, 16)]
ARCHS = ["75", "90"]


# The emulated fragments


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """wmma_probe.cpp as a library; each function returns a message, empty for success."""
    gxx = compilers.find_gxx() or pytest.skip("needs g++")
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    csrc, flags = header.CSRC, ["-std=c++17", "-O0", "-fPIC", "-shared", "-DATTENTION_EMULATOR"]
    command = [gxx, *flags, "-Wall", "-Wextra", "-Werror", f"-I{csrc}/emulator", f"-I{csrc}"]
    status, output = compilers.execute(
        [*command, "-x", "c++", str(PROBE), "-o", str(library), "-pthread", "-ldl"]
    )
    assert status == 0, output
    functions = ctypes.CDLL(str(library))

    def call(name, *arguments):
        function = getattr(functions, name)
        function.restype = ctypes.c_char_p
        pointers = [
            ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else int(a)
            for a in arguments
        ]
        return function(*pointers).decode()

    return call


def placed(matrix: torch.Tensor, rows: bool, padding: int) -> tuple[torch.Tensor, int]:
    """The matrix by rows or by columns in memory, each of them `padding` longer: and how long."""
    lines = matrix if rows else matrix.T
    padded = lines.new_full((lines.shape[0], lines.shape[1] + padding), torch.nan)
    padded[:, : lines.shape[1]] = lines
    return padded, padded.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_in_every_layout(probe, m, n, k, dtype, arch, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(m, k, generator=generator).half()
    b = torch.randn(k, n, generator=generator).half()
    c = torch.randn(m, n, generator=generator).to(dtype)
    expected = (a.double() @ b.double() + c.double()).to(dtype)
    for layout in range(8):
        a_rows, b_rows, c_rows = (bool(layout >> bit & 1) for bit in range(3))
        (a_in, lda), (b_in, ldb) = placed(a, a_rows, 8), placed(b, b_rows, 16)
        c_in, ldc = placed(c, c_rows, 24)
        d = torch.zeros_like(c_in)
        is_float = dtype == torch.float32
        message = probe(
            "run_product", m, a_rows, b_rows, is_float, a_in, lda, b_in, ldb, c_in, d, ldc, c_rows
        )
        assert message == ""
        lines = d[:, : n if c_rows else m]
        out = lines if c_rows else lines.T
        # Half: one rounding of a float sum. Float: 16 products, exact, and as many sums.
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps, atol=4e-6)
        assert not d[:, lines.shape[1] :].any()


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_a_fragment_tells_the_rows_of_its_elements(probe, arch, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    rows = torch.arange(16.0)[:, None].expand(16, 16).contiguous()
    scales, c, d = torch.randn(16), torch.randn(16, 16), torch.zeros(16, 16)
    assert probe("run_scale_rows", rows, scales, c, d) == ""
    assert torch.equal(d, scales[:, None] * c)


@pytest.mark.parametrize(("arch", "alike"), [("75", False), ("80", True), ("90", True)])
def test_layouts_differ_between_architectures(probe, arch, alike, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
    index, same = torch.arange(256.0), torch.zeros(32)
    assert probe("run_compare_uses", index.half(), index, same) == ""
    assert bool(same.all()) == alike


def line_of(marker: str) -> str:
    text = PROBE.read_text().splitlines()
    (number,) = (i for i, line in enumerate(text, 1) if line.endswith(f"// {marker}"))
    return f"wmma_probe.cpp:{number}"


@pytest.mark.parametrize(
    ("fault", "threads", "words", "markers"),
    [
        (0, 32, "", []),
        (0, 16, "the warp has fewer than 32 threads", []),
        (1, 32, "waits for lanes that never arrive: thread (16, 0, 0) has returned", ["LOAD"]),
        (2, 32, "divergence: this thread waits in mma_sync() at", ["ONE PLACE", "MMA"]),
        (3, 32, "divergence: this thread waits in ", ["SYNCWARP", "MMA"]),
        (4, 32, "cudaErrorMisalignedAddress: load_matrix_sync() at", ["MISALIGNED"]),
        (5, 32, "leading dimension is not a multiple of 8 halfs", ["LEADING DIMENSION"]),
        (6, 32, "the lanes' arguments differ", ["ARGUMENTS"]),
        (7, 32, "another thread writes to the matrix at the same time", []),
        (8, 32, "another thread writes to the matrix at the same time", ["LOAD"]),
        (10, 32, "an element and its duplicate differ", []),
    ],
)
@pytest.mark.parametrize("order", ["", "reverse"])
def test_wrong_use_is_reported(probe, fault, threads, words, markers, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    a, d = torch.ones(512).half(), torch.zeros(256)
    message = probe("run_fail", fault, threads, a, d)
    assert words in message
    assert bool(message) == bool(words)
    for marker in markers:
        assert line_of(marker) in message


def test_what_is_not_ordered_or_not_loaded_is_not_there(probe):
    a = torch.ones(512).half()
    for fault, missing in ((0, 0), (9, 1), (11, 256)):
        d = torch.full((256,), torch.nan)
        assert probe("run_fail", fault, 32, a, d) == ""
        assert (d.isnan().sum() > 0) == (missing > 0), fault


# The emulated blocks


@pytest.mark.parametrize(
    ("fault", "words", "markers"),
    [
        (0, "", []),
        (1, "divergence: this thread waits in __syncthreads()", ["ONE BARRIER", "BARRIER"]),
        (2, "the mask does not name the caller", ["NOT NAMED"]),
        (3, "divergence: this thread waits in __syncwarp()", ["MASKS"]),
        (4, "illegal access to byte 256 of 256 bytes of dynamic shared memory", []),
        (5, "a thread wrote to byte -4 of 256 bytes of dynamic shared memory", []),
        (6, "cudaErrorIllegalAddress: illegal memory access (address 0x", []),
        (7, "a thread's stack overflowed", []),
    ],
)
@pytest.mark.parametrize("order", ["", "shuffle:1"])
def test_a_wrong_block_is_reported(probe, fault, words, markers, order, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
    d = torch.zeros(2, 64)
    message = probe("run_reverse", fault, 256, d)
    assert words in message
    assert bool(message) == bool(words)
    for marker in markers:
        assert line_of(marker) in message
    if not words:
        assert torch.equal(d, torch.arange(63.0, -1, -1).expand(2, 64))


@pytest.mark.parametrize(
    ("fault", "missing"),
    [(8, [(1, 58)]), (9, [(1, 58)]), (10, [(block, i) for block in (0, 1) for i in range(16)])],
)
def test_what_nobody_wrote_or_sent_is_nan(probe, fault, missing):
    """Of shared memory, in each block anew, and of lanes that take no part in a shuffle."""
    d = torch.zeros(2, 64)
    assert probe("run_reverse", fault, 256, d) == ""
    assert [tuple(place) for place in d.isnan().nonzero().tolist()] == missing


def test_shared_memory_of_both_kinds_counts(probe, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    d = torch.zeros(2, 64)
    assert probe("run_reverse", 0, 65536 - 256, d) == ""
    message = probe("run_reverse", 0, 65536 - 252, d)
    assert "65284 bytes of dynamic and at least 256 of static shared memory are more" in message
    assert "65540 bytes of dynamic shared memory are more" in probe("run_reverse", 0, 65540, d)


# The emulated asynchronous copies


def test_copies_arrive_when_they_are_waited_for(probe):
    data = torch.arange(32.0)
    for fault, early in ((0, 16), (1, 0), (2, 0)):
        to = torch.zeros(48)
        assert probe("run_copy", fault, data, to) == ""
        assert torch.equal(to[:early], data[:early])
        assert to[early:32].isnan().all()
        last = data[16:].view(4, 4)
        last[:, 2:] = 0  # the last 8 bytes of 16 were to be zeros
        assert torch.equal(to[32:], last.flatten())
        data = torch.arange(32.0)


@pytest.mark.parametrize(
    ("fault", "words", "marker"),
    [
        (3, "4, 8 or 16 bytes can be copied", "SIZE"),
        (4, "an address is not a multiple of the size", "ADDRESS"),
        (5, "the destination is not in shared memory", "NOT SHARED"),
    ],
)
def test_a_wrong_copy_is_reported(probe, fault, words, marker):
    message = probe("run_copy", fault, torch.zeros(32), torch.zeros(48))
    assert f"__pipeline_memcpy_async() at {line_of(marker)}: {words}" in message


# The ladder


on_every_device = pytest.mark.parametrize("device", DEVICES)
for_every_version = for_each(NAMES)


def variant(tmp_path: Path, file: Path, **replacements: tuple[str, str]) -> BackendSpec:
    """A copy of a version file with one text replaced, as a backend that is in no ladder."""
    ((name, (old, new)),) = replacements.items()
    text = file.read_text()
    assert text.count(old) == 1
    copy = tmp_path / file.name
    copy.write_text(text.replace(old, new))
    return spec_of(header.parse_header(copy, f"{name}_"))


def test_the_names_are_the_documents():
    files = header.version_files(FOLDER)
    assert [f"WMMA_FLASH_ATTENTION_2_VERSION_{header.version_number(file)}" for file in files] == (
        NAMES
    )
    assert len(files) >= 3
    for name in NAMES:
        assert dict(get_backend(name).precisions) == {"float16": "fp16"}
    for name, head_dims, is_strided in (
        (NAMES[0], (64,), False),
        (NAMES[-1], (32, 64, 128), True),
    ):
        spec = get_backend(name)
        assert (spec.head_dims, spec.needs_contiguous) == (head_dims, not is_strided)


@on_every_device
@for_every_version
def test_scales_that_are_not_positive(name, device):
    spec = usable(name, device)
    for softmax_scale in (-0.3, 0.0):
        case = Case(70, 64, softmax_scale=softmax_scale, dtype=torch.float16)
        assert run_case(spec, case, device).passed, case


def uneven(seqlen: int, head_dim: int, spread: float, device: str = "cpu"):
    """q, k, v and a scale: the scores of odd rows are about `spread` above those of even rows.

    Whole numbers throughout, so that plain fp16, and so the budget, is not far off.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (1, seqlen, 2, head_dim)
    k = torch.ones(shape)
    k[..., 0] += torch.randint(0, 3, shape[:3], generator=generator)
    q = torch.ones(shape) + (torch.arange(seqlen) % 2 * 8)[None, :, None, None]
    v = torch.randn(shape, generator=generator)
    return *(x.half().to(device) for x in (q, k, v)), spread / (8 * head_dim)


def verdict(spec: BackendSpec, seqlen: int, head_dim: int, spread: float, is_causal: bool, device):
    q, k, v, scale = uneven(seqlen, head_dim, spread, device)
    o = spec.attention(q, k, v, softmax_scale=scale, is_causal=is_causal)
    return judge(o, q, k, v, scale, is_causal, precision="fp16")


@on_every_device
@for_every_version
@pytest.mark.parametrize("spread", [4, 8, 24, 512])
def test_rows_whose_scores_differ_by_hundreds(name, device, spread):
    spec = usable(name, device)
    for at, (seqlen, is_causal) in enumerate(itertools.product((16, 150), (True, False))):
        head_dim = spec.head_dims[(at + spread) % len(spec.head_dims)]
        found = verdict(spec, seqlen, head_dim, spread, is_causal, device)
        assert found.passed, (head_dim, seqlen, is_causal, found)


def one_maximum_for_16_rows(q, k, v, scale: float) -> torch.Tensor:
    """The document's softmax: P is at most 1, and half, whatever the row's own maximum."""
    o = torch.zeros(q.shape)
    for m in range(0, q.shape[1], 16):
        rows = q[0, m : m + 16].float()
        largest = torch.full(rows.shape[1:2], -torch.inf)
        row_sum, rows_o = torch.zeros(rows.shape[:2]), torch.zeros(rows.shape)
        for n in range(0, k.shape[1], 32):
            s = scale * torch.einsum("mhd,nhd->mnh", rows, k[0, n : n + 32].float())
            before, largest = largest, torch.maximum(largest, s.amax((0, 1)))
            p, rescale = (s - largest).exp(), (before - largest).exp()
            row_sum = rescale * row_sum + p.sum(1)
            product = torch.einsum("mnh,nhd->mhd", p.half().float(), v[0, n : n + 32].float())
            rows_o = rescale[:, None] * rows_o + product
        o[0, m : m + 16] = rows_o / row_sum[..., None]
    return o.half()


@pytest.mark.parametrize(
    ("spread", "right", "gone"), [(11, True, False), (12, False, False), (18, False, True)]
)
def test_what_the_document_s_maximum_costs(spread, right, gone):
    """exp(-17.4) is 0 as a half: the even rows of these inputs are then 0, too."""
    q, k, v, scale = uneven(150, 64, spread)
    o = one_maximum_for_16_rows(q, k, v, scale)
    assert judge(o, q, k, v, scale, is_causal=False, precision="fp16").passed == right
    assert bool((o[:, ::2] == 0).all()) == gone


@pytest.mark.slow
def test_without_its_guard_one_maximum_for_the_warp_breaks(tmp_path):
    guard = ("constexpr bool kGuarded = true;", "constexpr bool kGuarded = false;")
    unguarded = variant(tmp_path, V02, unguarded=guard)
    assert run_case(unguarded, Case(70, 64, dtype=torch.float16), "cpu").passed
    found = [verdict(unguarded, 150, 64, spread, False, "cpu") for spread in (20, 24, 512)]
    assert [one.passed for one in found] == [True, False, False]
    # At 512 the even rows have lost every P and are 0 / 0; the odd ones, whose maximum it is, none.
    q, k, v, scale = uneven(150, 64, 512)
    o = unguarded.attention(q, k, v, softmax_scale=scale, is_causal=False)
    assert o[:, ::2].isnan().all()
    expected = reference_attention(q, k, v, scale, is_causal=False)[:, 1::2]
    torch.testing.assert_close(o[:, 1::2].double(), expected, rtol=0, atol=2e-3)


@pytest.mark.slow
def test_the_guard_changes_no_bit(tmp_path):
    """A row's reference, its own or the warp's, moves exponents only."""
    per_row = variant(tmp_path, V02, per_row=("bool per_row = false;", "bool per_row = true;"))
    spec = usable(NAMES[1], "cpu")
    for scale in (0.02, 1.0, 8.0):
        q, k, v = Case(150, 64, scale, dtype=torch.float16).inputs("cpu")
        assert torch.equal(per_row.attention(q, k, v), spec.attention(q, k, v))


@on_every_device
@for_every_version
@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_no_later_token_changes_an_earlier_row(name, device, scale):
    """Later queries included: one maximum for 16 rows would let them."""
    spec = usable(name, device)
    q, k, v = Case(70, 64, scale, dtype=torch.float16).inputs(device)
    before = spec.attention(q, k, v)
    for cut in (1, 7, 24, 41, 69):
        others = Case(70, 64, 2 * scale, dtype=torch.float16, seed=cut).inputs(device)
        changed = [
            torch.cat([x[:, :cut], y[:, cut:]], 1) for x, y in zip((q, k, v), others, strict=True)
        ]
        assert torch.equal(spec.attention(*changed)[:, :cut], before[:, :cut]), cut


@for_each(NAMES[ASKS - 1 :])
def test_no_layout_of_fragments_is_assumed(name, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", "75")
    spec = usable(name, "cpu")
    # The last version splits the keys of the first and not those of the second. It is a kernel for
    # each head_dim; in the others the layout is the same affair for all.
    head_dims = spec.head_dims if name == NAMES[-1] else spec.head_dims[:1]
    for seqlen, head_dim in itertools.product((33, 300), head_dims):
        case = Case(seqlen, head_dim, 8.0, dtype=torch.float16)
        assert run_case(spec, case, "cpu").passed, case


@pytest.mark.slow
def test_the_tiles_of_the_last_version_where_blocks_do_not_fill_the_device(tmp_path, monkeypatch):
    monkeypatch.setenv("ATTENTION_EMULATOR_MULTIPROCESSORS", "132")
    spec = usable(NAMES[-1], "cpu")
    recorder = resources.launch_recorder(spec.version, tmp_path)
    for arch, keys in (  # of 64, 99 and 227 KB of shared memory
        ("75", {32: 128, 64: 64, 128: 32}),
        ("86", {32: 128, 64: 128, 128: 32}),
        ("90", {32: 256, 64: 256, 128: 128}),
    ):
        monkeypatch.setenv("ATTENTION_EMULATOR_ARCH", arch)
        # One head of 1,024 tokens is launched: head_dim, warps along M and N, keys of a tile, ...
        launches = resources._recorded(spec.version, recorder, [*keys])
        shapes = [re.findall(r"\d+", launch.kernel) for launch in launches]
        assert {int(head_dim): int(tile) for head_dim, _, _, tile, *_ in shapes} == keys
        assert all(int(warps) > 1 for _, _, warps, *_ in shapes)
        for seqlen, head_dim in itertools.product((127, 300), (32, 64, 128)):
            case = Case(seqlen, head_dim, 8.0, num_heads=1, dtype=torch.float16)
            assert run_case(spec, case, "cpu").passed, (arch, case)


@pytest.mark.slow
def test_two_orders_of_threads_give_the_last_version_the_same_bits(monkeypatch):
    """The suite does so with few keys; here blocks are full, and stages come around."""
    spec = usable(NAMES[-1], "cpu")
    q, k, v = Case(300, 64, dtype=torch.float16).inputs("cpu")
    expected = spec.attention(q, k, v)
    for order in ("reverse", "shuffle:1"):
        monkeypatch.setenv("ATTENTION_EMULATOR_ORDER", order)
        assert torch.equal(spec.attention(q, k, v), expected)
