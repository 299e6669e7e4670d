"""Which rows re-enact the kinds of each corpus in corpora.toml; the rest are our own kinds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.attention_kernels.judge import cuda_cheats  # noqa: F401 - adds its rows
from tests.attention_kernels.judge.cheats import CHEATS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_text = Path(__file__).with_suffix(".toml").read_text("utf-8")
CORPORA: list[dict[str, Any]] = tomllib.loads(_text)["corpus"]
_taken = {row for corpus in CORPORA for rows in corpus["kinds"].values() for row in rows}
_own = [x for x in CHEATS if x.name not in _taken and "honest" not in x.name]
CORPORA.append({"name": "our own", "items": 0, "kinds": {x.name: [x.name] for x in _own}})
