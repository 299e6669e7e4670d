from __future__ import annotations

import subprocess

import pytest

from attention_kernels.ladder import compilers
from scripts import make_wheel

NEEDS = """
int later(), own(), aoti_torch_later();
int needs() { return later() + own() + aoti_torch_later(); }
"""


@pytest.mark.skipif(not compilers.find_gxx(), reason="needs a C++ compiler")
def test_a_library_that_would_not_load_everywhere_is_found_out(tmp_path):
    def link(name, code, *flags):
        (tmp_path / "code.c").write_text(code)
        command = [compilers.find_gxx(), "-x", "c", "code.c", "-shared", "-fPIC", "-o", name]
        subprocess.run([*command, "-x", "none", *flags], cwd=tmp_path, check=True)
        return tmp_path / name

    allowed = "int aoti_torch_later(); int needs() { return aoti_torch_later(); }"
    assert make_wheel.problems(link("fine.so", allowed)) == []
    (tmp_path / "versions").write_text("GLIBC_2.29 { later; };")
    link("libnew.so", "int later() { return 1; }", "-Wl,--version-script=versions")
    library = link("bad.so", NEEDS, "libnew.so", "-Wl,-rpath,/opt/torch")
    assert sorted(make_wheel.problems(library)) == [
        "looks for libraries in /opt/torch",
        "needs later of GLIBC_2.29, which manylinux_2_28_x86_64 lacks",
        "needs libnew.so",
        "needs own, which is not in torch's stable ABI",
    ]
