"""Fixtures for tests of the application."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undisturbed(busy_machine: None) -> None:
    """Let no load from other tests fail a backend's timing; the judge has tests of its own."""


@pytest.fixture
def unwritten_memory_is_nan():
    """Fill new tensors with NaN, so that it shows which elements nothing has written."""
    import torch

    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
