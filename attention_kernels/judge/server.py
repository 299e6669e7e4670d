"""The server that workers are forked from imports this module, and with it torch.

Nobody may trace the server, or the workers, which inherit that. Nor do they have the judge's
standard streams, which may be a terminal.
"""

import os

from attention_kernels.child import hide

hide()

import attention_kernels.judge.worker  # noqa: E402, F401

for standard in range(3):
    os.dup2(os.open(os.devnull, os.O_RDWR), standard)
