"""What Nsight Compute counts in each version of a ladder: bank conflicts, occupancy, issue.

    python scripts/profile_kernels.py --out results/<date>_<gpu>_profile.json

Needs a GPU, and `ncu` on PATH.
"""

from gpt2_infer.bench import program
from gpt2_infer.bench.studies import ProfileStudy

if __name__ == "__main__":
    program.run(__doc__, ProfileStudy, "profile", program.add_shape)
