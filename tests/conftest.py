"""Hypothesis looks for new examples on a developer's machine, and repeats the same ones in CI: a red run there is about
the change it runs on. What takes minutes comes last; in CI only while its budget lasts."""

from __future__ import annotations

import os
import time

import pytest
from hypothesis import settings

CI_BUDGET_S = 660.0
"""In CI no slow test begins later than this: the whole of it stays within twenty minutes on two cores."""
STARTED_S = time.monotonic()

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests last, otherwise in their order."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    spent_s = time.monotonic() - STARTED_S
    if os.environ.get("CI") and item.get_closest_marker("slow") and spent_s > CI_BUDGET_S:
        pytest.skip(f"slow, and CI's {CI_BUDGET_S / 60:.0f} minutes are used up; `make test` runs it")
