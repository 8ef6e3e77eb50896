"""A broadcast as a run: its figures against the bound, and that every promise of it can be broken and is then seen."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from refimpl.attacks.relays import spoiled
from sim.__main__ import main
from sim.checkers import EVERY, check
from sim.kinds.broadcast_checks import BROADCAST, BroadcastView
from sim.oversight import Oversight
from sim.run import RunResult, run_scenario
from sim.scenario import Scenario, check_raw
from tests.test_run_twice import cut, run
