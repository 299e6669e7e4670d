"""Write the variants: one file per line of VARIANTS, with macros defined."""
import re
from pathlib import Path
HERE = Path(__file__).parent
SOURCE = (HERE / "base.cu").read_text()
VARIANTS = {
    "v01_plain2": "OVERLAP=0",
    "v02_turns2": "OVERLAP=1 TURNS=1",
    "v03_plain3": "OVERLAP=0 CONSUMERS=3",
    "v04_plain3_q": "OVERLAP=0 CONSUMERS=3 QLO_SHARED=2",
    "v05_turns2_q": "OVERLAP=1 TURNS=1 QLO_SHARED=2",
    "v06_halves_overlap": "OVERLAP=1",
    "v07_halves_plain": "OVERLAP=0",
    "v08_late_halves_overlap": "OVERLAP=1 EARLY=0",
    "v09_turns3_q": "OVERLAP=1 TURNS=1 CONSUMERS=3 QLO_SHARED=2",
    "v10_overlap3_q": "OVERLAP=1 TURNS=0 CONSUMERS=3 QLO_SHARED=2",
    "v11_fused_turns3_q": "OVERLAP=1 TURNS=1 CONSUMERS=3 QLO_SHARED=2 FUSED_SCALE=1",
    "v12_turns2_qlo": "OVERLAP=1 TURNS=1 QLO_SHARED=1",
    "v13_ablate_diagonal": "OVERLAP=1 TURNS=1 ABLATE_DIAGONAL=1",
    "v14_ablate_attention": "ABLATE_ATTENTION=1",
    "v15_ablate_softmax3_q": "OVERLAP=1 CONSUMERS=3 QLO_SHARED=2 ABLATE_SOFTMAX=1",
    "v16_halves_q": "OVERLAP=1 QLO_SHARED=2",
    "v17_fused_plain3": "OVERLAP=0 CONSUMERS=3 FUSED_SCALE=1",
}
for old in (HERE / "variants").glob("*.cu"):
    old.unlink()
for name, macros in VARIANTS.items():
    number = name.split("_")[0]
    source = (HERE / "halves.cu").read_text() if "halves" in name else SOURCE
    text = re.sub(r"// From: .*\n", "", source.replace("// v28 - ", f"// {number} - ", 1), count=1)
    defines = "".join("#define " + m.replace("=", " ") + "\n" for m in macros.split())
    text = text.replace("#include <cuda_fp16.h>", defines + "#include <cuda_fp16.h>", 1)
    (HERE / "variants" / f"{name}.cu").write_text(text)
