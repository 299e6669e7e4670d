"""Imports point down only: scripts -> gpt2_infer.bench -> gpt2_infer -> attention_kernels."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter

import pytest

from tests.conftest import ROOT

LAYERS = ("attention_kernels", "gpt2_infer", "gpt2_infer.bench", "scripts")
MODULES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for folder in ("attention_kernels", "gpt2_infer", "scripts")
    for file in sorted((ROOT / folder).rglob("*.py"))
}


def layer(module: str) -> int:
    """Return the layer of a module, counted from below; -1 if it is not ours."""
    return max((i for i, x in enumerate(LAYERS) if f"{module}.".startswith(f"{x}.")), default=-1)


@functools.cache
def imports(module: str, *, lazy: bool, typing: bool = False) -> list[str]:
    """The modules of ours that a module imports; lazy: in its functions; typing: for types only."""
    found = []

    def walk(node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, (ast.FunctionDef, ast.Lambda))
            is_typing = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if (typing or not is_typing) and (lazy or not is_function):
                found.append(child)
                walk(child)

    walk(ast.parse(MODULES[module].read_text("utf-8")))
    names = []
    for node in found:
        if isinstance(node, ast.Import):
            names += [name.name for name in node.names if layer(name.name) >= 0]
        elif isinstance(node, ast.ImportFrom) and node.module and layer(node.module) >= 0:
            inner = [f"{node.module}.{name.name}" for name in node.names]
            names += [name if name in MODULES else node.module for name in inner]
    return names


@pytest.mark.parametrize("lazy", [False, True])
def test_imports_point_down(lazy):
    for module in MODULES:
        may_measure = lazy and module.startswith("gpt2_infer.cli.")  # when the command runs
        for imported in imports(module, lazy=lazy):
            if not (may_measure and imported.startswith("gpt2_infer.bench")):
                assert layer(imported) <= layer(module), f"{module} imports {imported}"


def test_no_file_imports_what_imports_it():
    """Circles through several files, in functions and for types count; a package is one file."""
    graph = {module: {*imports(module, lazy=True, typing=True)} for module in MODULES}
    assert {name for imported in graph.values() for name in imported} <= graph.keys()
    TopologicalSorter(graph).prepare()


@pytest.mark.parametrize(
    "house", sorted({module.rpartition(".")[0] for module in MODULES if "." in module})
)
def test_no_room_imports_what_imports_it(house):
    """A package's rooms are its modules and the packages in it, each with all that it contains.

    Types do not count.
    """

    def room(module: str) -> str:
        inside = module.removeprefix(f"{house}.")
        return inside.partition(".")[0] if inside != module else ""

    graph: dict[str, set[str]] = {}
    for module in MODULES:
        if mine := room(module):
            found = map(room, imports(module, lazy=True))
            graph.setdefault(mine, set()).update({*found} - {"", mine})
    TopologicalSorter(graph).prepare()


def test_the_kernels_name_no_command_of_the_application():
    for module, file in MODULES.items():
        assert layer(module) > 0 or "gpt2-infer" not in file.read_text("utf-8"), file
