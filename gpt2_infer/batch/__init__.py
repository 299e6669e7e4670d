"""Complete files of prompts: in one process, in shards, or on Ray; no row is lost or repeated."""

from gpt2_infer.batch.cluster import run_on_ray
from gpt2_infer.batch.folder import BatchError
from gpt2_infer.batch.job import Entry, Settings, run

__all__ = ["BatchError", "Entry", "Settings", "run", "run_on_ray"]
