"""Everything that measures: studies, their results, and the tables and pictures made of them."""

from gpt2_infer.bench.record import File, KernelCell, ResultsError, Row, read
from gpt2_infer.bench.study import GenerationStudy, KernelStudy, run

__all__ = [
    "File",
    "GenerationStudy",
    "KernelCell",
    "KernelStudy",
    "ResultsError",
    "Row",
    "read",
    "run",
]
