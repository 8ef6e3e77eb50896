"""Hypothesis looks for new examples on a developer's machine, and repeats the same ones in CI: a red run there is about
the change it runs on."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")
