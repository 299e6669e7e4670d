"""Write the variants: one file per line of VARIANTS, with macros defined."""
import re
from pathlib import Path
HERE = Path(__file__).parent
SOURCE = (HERE.parent / "attention_kernels/csrc/fp32/v28_wgmma.cu").read_text()
VARIANTS = {
    "v01_plain2": "OVERLAP=0 CONSUMERS=2",
    "v02_overlap2": "OVERLAP=1 CONSUMERS=2",
    "v03_turns2": "OVERLAP=1 TURNS=1 CONSUMERS=2",
    "v04_plain1": "OVERLAP=0 CONSUMERS=1",
    "v05_overlap1": "OVERLAP=1 CONSUMERS=1",
    "v06_fused_plain2": "OVERLAP=0 FUSED_SCALE=1 CONSUMERS=2",
    "v07_fused_overlap2": "OVERLAP=1 FUSED_SCALE=1 CONSUMERS=2",
    "v08_fused_overlap1": "OVERLAP=1 FUSED_SCALE=1 CONSUMERS=1",
    "v09_late_overlap1": "OVERLAP=1 CONSUMERS=1 EARLY=0",
    "v10_ablate_diagonal": "OVERLAP=1 CONSUMERS=2 ABLATE_DIAGONAL=1",
    "v11_ablate_softmax": "OVERLAP=1 CONSUMERS=2 ABLATE_SOFTMAX=1",
    "v12_ablate_attention": "OVERLAP=1 CONSUMERS=2 ABLATE_ATTENTION=1",
    "v15_persistent2": "PERSISTENT=1 CONSUMERS=2",
    "v16_persistent1": "PERSISTENT=1 CONSUMERS=1",
    "v17_persistent_fused2": "PERSISTENT=1 CONSUMERS=2 FUSED_SCALE=1",
    "v18_halves": "CONSUMERS=2",
    "v19_halves_fused": "CONSUMERS=2 FUSED_SCALE=1",
    "v13_turns_fused2": "OVERLAP=1 TURNS=1 FUSED_SCALE=1 CONSUMERS=2",
    "v14_ablate_products": "OVERLAP=1 CONSUMERS=2 ABLATE_PRODUCTS=1",
}
for old in (HERE / "variants").glob("*.cu"):
    old.unlink()
for name, macros in VARIANTS.items():
    number = name.split("_")[0]
    source = (HERE / "persistent.cu").read_text() if "persistent" in name else (HERE / "halves.cu").read_text() if "halves" in name else SOURCE
    text = re.sub(r"// From: .*\n", "", source.replace("// v28 - ", f"// {number} - ", 1), count=1)
    defines = "".join("#define " + m.replace("=", " ") + "\n" for m in macros.split())
    text = text.replace("#include <cuda_fp16.h>", defines + "#include <cuda_fp16.h>", 1)
    (HERE / "variants" / f"{name}.cu").write_text(text)
