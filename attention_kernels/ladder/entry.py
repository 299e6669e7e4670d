"""Make a version of somebody else's kernel: its header's Entry calls what the file defines.

The file is included as it is. What is generated around it defines scratch_floats() and launch();
csrc/adapter.cuh has the names that the Entry may use, and copies tensors of another layout.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from attention_kernels.ladder.compilers import BuildError
from attention_kernels.ladder.header import CSRC, FIELDS, VersionHeader, calls_of

NAMES = (
    "B N H D q k v o qkv scale default_scale causal stream params zeros filled floats ints "
    "o_float cu_seqlens"
)
SCRATCH = re.compile(r"\b(?:zeros|filled|floats|ints)\s*\(")


def check(version: VersionHeader, files: Iterable[str]) -> None:
    """Raise BuildError if a file defines no launch() and says of no function to call it instead.

    files: it and what it includes.
    """
    if not version.entry and not any(Path(file).name == "common.cuh" for file in files):
        raise BuildError(
            f"{version.path.name} is no version file, which includes common.cuh and defines "
            "launch(): say what to call, as in --entry 'attn(q, k, v, o, B, N, H, D, scale)'"
        )


def adapter(file: Path, text: str, cache: Path) -> Path:
    """Return a version file in the cache folder that includes a file and has an Entry.

    text: the Entry, and other fields of a header behind `|`. Raises OSError.
    """
    entry, *fields = re.split(rf"\|\s*(?=(?:{'|'.join(FIELDS)}):)", text)
    header = "\n".join(f"// {' '.join(line.split())}" for line in (f"Entry: {entry}", *fields))
    return including([file], cache, f"// {file.name}\n{header}\n")


def slot_kernel(version: VersionHeader, cache: Path) -> VersionHeader:
    """Return the decode kernel that calls a slot's file, *.cuh. Raises HeaderError, OSError."""
    for head_dim in version.head_dims:
        version.shared_bytes(head_dim)
    dims = ", ".join(map(str, version.head_dims))
    files = [version.path, CSRC / "slot" / "decode_kernel.cuh"]
    path = including(files, cache, f"#define SLOT_HEAD_DIMS {dims}\n")
    return replace(version, path=path, slot=version.path, role="decode", layout="strided")


def including(files: Sequence[Path], cache: Path, made: str = "") -> Path:
    """Return a file in the cache folder that includes files after a text. Raises OSError."""
    made += "".join(f"#include {json.dumps(str(file.absolute()))}\n" for file in files)
    folder = cache / "entries" / hashlib.sha256(made.encode()).hexdigest()[:16]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as output:
        output.write(made)
    return Path(output.name).replace(folder / files[0].with_suffix(".cu").name)


def written(version: VersionHeader, folder: Path) -> Path:
    """Return the source to compile: the version's file or, for an Entry, one made in the folder."""
    if not version.entry:
        return version.path
    source = folder / f"{version.path.stem}.entry.cu"
    source.write_text(_source(version), "utf-8")
    return source


def _source(version: VersionHeader) -> str:
    path, counted, calls = json.dumps(str(version.path)), [], []
    lines = version.path.read_text("utf-8", "replace").splitlines()
    line = next(n for n, text in enumerate(lines, 1) if re.match(r"//\s*Entry:", text))
    for name, settings, arguments in calls_of(version.entry):
        if SCRATCH.search(arguments):
            counted.append(f"ignore_({arguments});")
        if settings:
            words = [name, *settings, *("0", "stream")[len(settings) - 2 :], arguments]
            calls.append(f"launch_({', '.join(filter(None, words))});")
        else:
            calls.append(f"call_([&] {{ return {name}({arguments}); }});")
    has = (json.dumps(bool(re.search(rf"\b{x}\b", version.entry))) for x in NAMES.split()[-2:])
    prepare = f"prepare_({json.dumps(version.tensors)}, {', '.join(has)});"
    refusal = json.dumps(f"it takes only calls with `{version.only}`")
    refuse = f"if (!({version.only or 'true'})) throw std::invalid_argument({refusal});"
    dims, undefined = ", ".join(map(str, version.head_dims)), "\n#undef ".join(NAMES.split())
    return f"""#include "adapter.cuh"
#ifdef ATTENTION_EMULATOR  // their names may be that of our namespace: see ptx.py
#pragma attention
#else
#define attention attention_
#endif
#include {path}
#undef {undefined}
namespace attention_entry {{
struct Entry : Names {{
  using Names::Names;
  template <int D>
  void count() {{
    {prepare}
#line {line} {path}
    {" ".join(counted)}
  }}
  template <int D>
  void call() {{
#line {line} {path}
    {refuse} {prepare} {" ".join(calls)} finish_();
  }}
}};
}}
#undef attention
#ifdef ATTENTION_EMULATOR
#pragma attention end
#endif
namespace attention::ATTENTION_VERSION {{
int64_t scratch_floats(const Params& params) {{
  return attention_entry::scratch_floats<attention_entry::Entry, {dims}>(params);
}}
cudaError_t launch(const Params& params, cudaStream_t stream) {{
  return attention_entry::launch<attention_entry::Entry, {dims}>(params, stream);
}}
}}
"""
