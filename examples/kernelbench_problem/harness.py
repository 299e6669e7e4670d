"""A harness of one problem: is the submission right, and how fast is it?"""

import sys
from pathlib import Path

from attention_kernels.judge import Case, time_kernel, verify

# Only the process that the judge starts imports what is there.
sys.path.insert(0, str(Path(__file__).with_name("problem")))
report = verify("SUBMISSION", quick=True)
failures = [f"{failure.what}: {failure.why}" for failure in report.failures]
print("PASSED" if report.passed else "FAILED", *failures, sep="\n")
if report.passed:
    time = time_kernel("SUBMISSION", Case(512, 64, num_heads=12, layout="transposed"))
    print(f"{time.median_us:.0f} us, from {time.spread_us[0]:.0f} to {time.spread_us[1]:.0f}")
