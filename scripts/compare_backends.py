"""Compare attention backends: text generation end to end, or the kernel alone.

    python scripts/compare_backends.py --out results/<date>_<machine>_generation.json
    python scripts/compare_backends.py --task kernel --seqlens 1024 4096 --out FILE

The same as `gpt2-infer compare`. After Ctrl-C the same command goes on where it was.
"""

import sys

from gpt2_infer.cli import main

if __name__ == "__main__":
    raise SystemExit(main(["compare", *sys.argv[1:]]))
