"""Why: who asks for a model where none runs, or for real processes that cannot be, is told so at once."""

from __future__ import annotations

from sim.scenario import CALIBRATED, Scenario, ScenarioError


def require_use_of(model: str | None, scenario: Scenario) -> None:
    """`model`, a folder or hub id, is to run instead of the scenario's own; None: its own. Raises ScenarioError where
    the scenario has none."""
    if model is not None and scenario.model_path is None:
        raise ScenarioError(f"--model {model}: no real model runs in this scenario; {_what_it_is(scenario)}")


def require_processes(scenario: Scenario) -> None:
    """Raises ScenarioError for a scenario that cannot run as real processes."""
    if scenario.kind != "swarm" or scenario.model_path is None:
        raise ScenarioError(
            f"only a swarm with a real model (model.path) runs as real processes; {_what_it_is(scenario)}"
        )


def _what_it_is(scenario: Scenario) -> str:
    return f"it is a {scenario.kind}" + (" with a calibrated model" if scenario.model is not None else "")


def model_folder(scenario: Scenario, model: str | None, at_once: int = 1) -> str:
    """The folder of the model that is to run, made when it is missing: `model` or the scenario's own; CALIBRATED where
    none runs. `at_once`: how many runs share the cores. Raises ScenarioError."""
    require_use_of(model, scenario)
    wanted = model or scenario.model_path
    if wanted is None:
        return CALIBRATED
    # imported here: only what runs a model needs its library
    from refimpl.model.prepare import PrepareError, prepare
    from refimpl.threads import set_threads

    set_threads(at_once)
    try:
        return str(prepare(wanted))
    except PrepareError as error:
        raise ScenarioError(str(error)) from None
