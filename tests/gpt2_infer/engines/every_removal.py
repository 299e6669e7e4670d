"""Remove every wait, fence and barrier of removals.toml in turn; `make removals` runs this file."""

from __future__ import annotations

import pytest

from tests import removal
from tests.conftest import needs_compiler
from tests.gpt2_infer.engines.test_removal import NOTICED, notice  # noqa: F401 - a fixture

pytestmark = needs_compiler


@pytest.mark.parametrize(("file", "name", "message"), NOTICED)
def test_a_removal_is_noticed_by_the_race_check(file, name, message, notice):  # noqa: F811
    assert message in notice(file, name, "races")


@pytest.mark.parametrize(("file", "name", "message"), removal.rows("noticed"))
def test_a_removal_is_noticed_without_the_race_check(file, name, message, notice):  # noqa: F811
    assert notice(file, name, "")


@pytest.mark.parametrize("build", ["", "races"])
@pytest.mark.parametrize(("file", "name", "reason"), removal.rows("needless"))
def test_a_needless_one_may_go(file, name, reason, build, notice):  # noqa: F811
    assert not notice(file, name, build, ("", "reverse", "shuffle:1"))
