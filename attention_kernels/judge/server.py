"""The server that workers are forked from imports this: torch, and what a worker needs.

Nobody may trace the server, or the workers, which inherit that. So it hides before it lets a
compiler run, which may do what the author of a version file likes.
"""

from attention_kernels.child import hide
from attention_kernels.ladder import ahead

hide()
ahead.start()
ahead.import_to_stay("attention_kernels.judge.worker")
