"""Predict the fused decode step as a whole, as a chain of kernels that are launched early."""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from attention_kernels.inspection import early, launches
from attention_kernels.inspection.early import Chain, Link
from attention_kernels.inspection.gpus import GpuModel
from attention_kernels.inspection.launches import Launch
from attention_kernels.inspection.program import compile_program
from attention_kernels.inspection.resources import LIMITS
from gpt2_infer.bench.prediction import find_gpu
from gpt2_infer.bench.record import DecodeCell, Row
from gpt2_infer.bench.study import Contender, StepPredictionStudy, Subject
from gpt2_infer.config import named_config
from gpt2_infer.engines.base import GRAPH_LENGTH_STEP, padded_length
from gpt2_infer.engines.fused import EARLY, POINTERS, StepParams, StepShape
from gpt2_infer.errors import RequestError


class StepPredictions(Subject[DecodeCell]):
    """Predicts the microseconds of a step in the middle of a text."""

    def __init__(self, study: StepPredictionStudy) -> None:
        self.gpu = find_gpu(study.gpu)
        if int(self.gpu.arch) < 10 * EARLY[0]:
            raise RequestError(f"{self.gpu.name} has no early launches")
        self.cells = [
            DecodeCell(name, dtype, batch, study.prompt_tokens, study.new_tokens)
            for name, dtype, batch in itertools.product(
                study.models, study.dtypes, study.batch_sizes
            )
        ]
        self.facts = {"gpu": self.gpu.name}

    def contenders(self, cell: DecodeCell) -> Iterator[Contender]:
        """Yield the prediction of a step of average length."""
        links, chain = predict_step(cell, self.gpu)
        yield Contender(
            Row(
                contender="fused",
                metric="predicted time",
                unit="us",
                samples=[round(chain.time_us, 3)],
                extra={
                    "kernels": len(links),
                    "work_us": round(chain.work_us, 3),
                    "launch_us": round(chain.launch_us, 3),
                    "reading_us": round(chain.reading_us, 3),
                    "assumed": sorted({name for link in links for name in link.assumed}),
                    "links": {link.kernel: dataclasses.asdict(link) for link in links},
                },
            )
        )


def predict_step(cell: DecodeCell, gpu: GpuModel) -> tuple[list[Link], Chain]:
    """Return the kernels of a step, in order, and their times; raises RequestError or BuildError.

    The cache has half of the new tokens.
    """
    config = named_config(cell.model)
    if config is None:
        raise RequestError(f"no size of GPT-2 is named {cell.model}")
    shared = LIMITS[gpu.arch].shared_kb_per_block * 1024
    dtype = getattr(torch, cell.dtype)
    shape = StepShape(config, dtype, cell.batch, gpu.multiprocessors, shared)
    if shape.is_one_kernel:
        text = "its one kernel's blocks wait for one another, which is not simulated"
        raise RequestError(f"a step of {cell.model} at batch {cell.batch}: {text}")
    names = POINTERS.split()
    place = {name: number for number, name in enumerate(names, 1)}  # terabytes
    capacity = padded_length(cell.prompt_tokens + cell.new_tokens, GRAPH_LENGTH_STEP, config)
    params = StepParams(
        *(number << 40 for number in place.values()),
        capacity,
        config.n_layer,
        capacity,
        1,
        config.softmax_scale(0),
        config.scale_attn_by_inverse_layer_idx,
        config.layer_norm_epsilon,
    )
    length = cell.prompt_tokens + cell.new_tokens // 2
    found: dict[Launch, Link] = {}
    links = []
    with tempfile.TemporaryDirectory() as folder:
        program = compile_program(shape.version(), gpu, Path(folder))
        recorded = launches.record(shape.version(), program.recorder, parameters=bytes(params))
        for launch in recorded:
            alike = dataclasses.replace(launch, parameters=b"")  # layers differ only in these
            if alike not in found:
                words = ((place["seqlens"], length),)
                own = [place[name] for name in ("weights", "head", "kv")]
                found[alike] = early.link_of(program, dataclasses.replace(launch, words=words), own)
            links.append(found[alike])
    return links, early.chain_of(gpu, links)
