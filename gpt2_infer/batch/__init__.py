"""Complete files of prompts in any number of processes; no row is lost or repeated."""

from gpt2_infer.batch.folder import BatchError
from gpt2_infer.batch.job import Entry, Job, Settings, entries
from gpt2_infer.batch.workers import find_devices, run

__all__ = ["BatchError", "Entry", "Job", "Settings", "entries", "find_devices", "run"]
