"""A fixture for all tests of the application."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def undisturbed(busy_machine: None) -> None:
    """Let no load from other tests fail a backend's timing; the judge has tests of its own."""
