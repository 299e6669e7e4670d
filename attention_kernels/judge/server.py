"""The server that workers are forked from imports this: torch, and what a worker needs.

Nobody may trace the server, or the workers, which inherit that. So it hides before it lets a
compiler run, which may do what the author of a version file likes.
"""

import gc
import importlib

from attention_kernels.child import hide
from attention_kernels.ladder import ahead

hide()
ahead.start()
gc.disable()  # it would search what an import makes again and again, in vain
importlib.import_module("attention_kernels.judge.worker")
gc.freeze()
gc.enable()
