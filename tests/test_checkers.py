"""Checkers: silent on good runs, however troubled, and each fires on what it is there for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from simpy.events import Event

from refimpl.identity import Identity
from refimpl.messages import AskAccount, AskWork, Assignment, Blob, Message, Ok, Submission, Verdict, wire
from refimpl.world import TaskFailure
from sim.checkers import EVERY, check
from sim.faults import FaultPart
from sim.kernel import LATE, to_ns
from sim.kinds.swarm_checks import SWARM, Bounds, SwarmView
from sim.kinds.swarm_facts import SwarmFacts
from sim.leaks import LAST, all_released, at_rest
from sim.oversight import Oversight
from sim.run import run_scenario
from sim.watch import Watch
from sim.world import Call
from tests.swarms import troubled
from tests.worlds import sim_fabric

SECOND_NS = 1_000_000_000


@wire
@dataclass(frozen=True)
class Crate(Message):
    blob: Blob


def quiet(line: str) -> None:
    """Say nothing."""


class Enough(Exception):
    """Raised when the run is over: what comes after it is not looked at here."""


def ran(folder: Path, duration_s: float, each_s: float | None = None) -> tuple[Oversight, list[Any]]:
    """The troubled swarm after `duration_s`, and what was found on demand every `each_s`."""
    kept: list[Oversight] = []
    found: list[Any] = []
    instants = [] if each_s is None else [float(instant_s) for instant_s in np.arange(each_s, duration_s, each_s)]
    looks: list[float] = []

    class Kept(Oversight):
        def over(self, run: Callable[[], bool]) -> None:
            def look(_: Event) -> None:
                looks.append(self.fabric.now_s())
                found.extend(check(self.view))

            for instant_s in instants:
                self.fabric.kernel.at(0, to_ns(instant_s), look, LATE)
            super().over(run)
            kept.append(self)
            raise Enough

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sim.run.Oversight", Kept)
        scenario = troubled().model_copy(update={"duration_s": duration_s})
        with pytest.raises(Enough):
            run_scenario(scenario, name="t", seed=3, model_path="calibrated", runs=folder, say=quiet, trace=False)
    assert looks == instants[: len(looks)]  # at every instant until the run came to its end
    assert len(looks) == len(instants) or looks[-1] + cast(float, each_s) > kept[0].fabric.now_s()
    return kept[0], found


@pytest.fixture
def view(tmp_path: Path) -> Iterator[SwarmView]:
    over, _ = ran(tmp_path, 240.0)
    assert check(over.view) == []
    assert over.view.accounts() and over.view.facts.ejected_ns and over.view.facts.judged
    yield over.view


def test_they_are_silent_on_a_good_run_in_trouble_during_it_and_at_its_end(tmp_path: Path) -> None:
    over, found = ran(tmp_path, 1800.0, each_s=7.0)
    assert found == [] and over.violations() == []
    facts = over.view.facts
    assert len(facts.judged) > 100 and len(facts.ejected_ns) == 3 and facts.struck["steady-1"] == 1


def test_every_checker_says_what_it_promises_and_is_planted_below() -> None:
    for category, checker in EVERY + SWARM:
        assert category in ("crash", "liveness", "correctness")
        assert checker.__doc__ and checker.__doc__.endswith(".")
    special = {"something_was_judged", "workers_get_on", "problems_follow_the_rule", "links_carry_nothing_of_the_dead"}
    assert {checker.__name__ for _, checker in EVERY + SWARM} == {name for name, _ in PLANTS} | special


# ------------------------------------------------------------------------------------------- planted in a good run
def judged(view: SwarmView, **changes: Any) -> dict[str, Any]:
    submission, said = next(iter(view.facts.judged.items()))
    event = {"t_ns": view.facts.last_ns, "kind": "judged", "node": "validator", "public_key": said.public_key}
    return {
        **event,
        "submission": submission,
        "counter": 1,
        "index": 0,
        "accepted": said.accepted,
        "decided": True,
        "tokens": said.tokens,
        **changes,
    }


def honest_account(view: SwarmView) -> Any:
    return next(account for account in view.accounts().values() if account.earned > 0)


def ejected_account(view: SwarmView) -> Any:
    return next(account for account in view.accounts().values() if account.ejected)


def assigned(view: SwarmView, *after_s: float) -> None:
    key, ejected_ns = next(iter(view.facts.ejected_ns.items()))
    for seconds in after_s:
        event = {"kind": "assigned", "node": "orchestrator", "worker": view.facts.worker_of[key], "step": 0}
        view.facts._assigned({"t_ns": ejected_ns + round(seconds * SECOND_NS), **event, "counter": 9})


def task_fails(view: SwarmView) -> None:
    view.fabric.report(TaskFailure("steady-0", "worker", ValueError("broken")))


def call_without_end(view: SwarmView) -> None:
    worker, validator = view.fabric.nodes["steady-0"], view.fabric.nodes["validator"]
    call = Call(worker, validator, AskAccount("key"), 1.0, None)
    call.since_ns, call.until_ns = 0, SECOND_NS
    worker.calls[call] = None


def judged_again(view: SwarmView) -> None:
    said = next(iter(view.facts.judged.values()))  # by the validator's present life: no crash came between
    said.life = view.facts._life
    view.facts.event(judged(view))


def credited_after_ejection(view: SwarmView) -> None:
    ejected_account(view).earned += 5.0


def ejection_forgotten(view: SwarmView) -> None:
    ejected_account(view).ejected = False


def pays_too_much(view: SwarmView) -> None:
    honest_account(view).earned += 0.01


def pays_too_little(view: SwarmView) -> None:
    honest_account(view).earned -= 0.01


def stake_vanishes(view: SwarmView) -> None:
    honest_account(view).stake -= 1.0


def verdict_from_nowhere(view: SwarmView) -> None:
    account = honest_account(view)
    account.judged.add("f" * 64)
    account.accepted += 1


def work_for_the_ejected(view: SwarmView) -> None:
    assigned(view, 61.0)


def work_for_the_ejected_twice(view: SwarmView) -> None:
    assigned(view, 0.01, 0.5)


def dead_with_tasks(view: SwarmView) -> None:
    view.fabric.nodes["steady-0"].alive = False  # and nothing of it was released


def clock_goes_back(view: SwarmView) -> None:
    view.facts.event({"t_ns": view.facts.last_ns - 1, "kind": "up", "node": "steady-0"})


PLANTS: list[tuple[str, Callable[[SwarmView], None]]] = [
    ("no_task_failed", task_fails),
    ("calls_end_in_time", call_without_end),
    ("judged_once", judged_again),
    ("ejected_earn_nothing", credited_after_ejection),
    ("ejected_earn_nothing", ejection_forgotten),
    ("ledger_conserves", pays_too_much),
    ("ledger_conserves", pays_too_little),
    ("ledger_conserves", stake_vanishes),
    ("ledger_conserves", verdict_from_nowhere),
    ("no_work_after_ejection", work_for_the_ejected),
    ("no_work_after_ejection", work_for_the_ejected_twice),
    ("dead_hold_nothing", dead_with_tasks),
    ("clock_never_goes_back", clock_goes_back),
]


@pytest.mark.parametrize(("checker", "plant"), PLANTS, ids=[plant.__name__ for _, plant in PLANTS])
def test_each_fires_on_its_planted_violation(view: SwarmView, checker: str, plant: Callable[[SwarmView], None]) -> None:
    plant(view)
    found = check(view)
    also = {"ledger_conserves"} if plant is credited_after_ejection else set()  # nobody had earned that either
    assert {violation.checker for violation in found} == {checker} | also, "the others are silent"


def test_one_assignment_that_crossed_the_ejection_is_no_violation(view: SwarmView) -> None:
    assigned(view, 0.01)
    assert check(view) == []


def test_a_validator_that_crashed_may_judge_again(view: SwarmView) -> None:
    view.facts.event({"t_ns": view.facts.last_ns, "kind": "down", "node": "validator", "why": "crash"})
    view.facts.event(judged(view))
    assert check(view) == []


# ---------------------------------------------------------------------------------------------- planted in a fabric
def bare(**facts: Any) -> tuple[Any, SwarmView]:
    fabric = sim_fabric(5)
    fabric.watch = Watch()
    view = SwarmView(fabric=fabric, facts=SwarmFacts(**facts), bounds=Bounds(progress_s=100.0))
    view.facts.tap(fabric.watch)
    return fabric, view


def idle_worker() -> tuple[Any, SwarmView]:
    fabric, view = bare(workers={"w"}, services={"ledger"})
    node = fabric.node("w")

    async def nothing() -> None:
        await node.signal().wait()

    async def main() -> None:
        node.spawn(nothing(), "worker")
        await fabric.nodes["desk"].sleep(101.0)

    fabric.node("desk")
    fabric.run(main(), node="desk")
    return fabric, view


def test_a_worker_that_does_not_get_on_is_found_when_its_bound_is_over() -> None:
    _, view = idle_worker()
    assert [violation.sentence for violation in check(view)] == [
        "w is up and has not got on for 101.000 s; bound 100 s"
    ]
    assert check(dataclasses.replace(view, bounds=Bounds(progress_s=101.0))) == []


@pytest.mark.parametrize(
    "event",
    [
        {"t_ns": 50 * SECOND_NS, "kind": "assigned", "node": "orchestrator", "worker": "w"},
        {"t_ns": 0, "kind": "compute", "node": "w", "start_ns": 0, "end_ns": 60 * SECOND_NS},
        {"t_ns": 0, "kind": "fault", "node": "", "fault": "hang", "on": ["w"], "begins": True},
        {"t_ns": 0, "kind": "fault", "node": "", "fault": "crash", "on": ["ledger"], "begins": True},
        {"t_ns": 0, "kind": "fault", "node": "", "fault": "partition", "on": ["japan"], "begins": True},
        {"t_ns": 9 * SECOND_NS, "kind": "up", "node": "ledger"},
    ],
    ids=["got on", "computed", "hung itself", "service down", "partition", "service returned"],
)
def test_a_worker_that_got_on_or_has_an_excuse_is_not_blamed(event: dict[str, Any]) -> None:
    _, view = idle_worker()
    view.facts.event(event)
    assert check(view) == []


def test_a_fault_on_another_worker_is_no_excuse() -> None:
    _, view = idle_worker()
    view.facts.event({"t_ns": 0, "kind": "fault", "node": "", "fault": "hang", "on": ["x"], "begins": True})
    assert len(check(view)) == 1


def test_problems_beside_the_rule_are_seen_on_the_wire() -> None:
    fabric, view = bare(dataset_length=1000, batch=2)
    key = Identity.from_seed(5, "w").public_key
    right = view.facts._rule(key, 0, 1)
    given = [right.problem_ids, np.array([right.problem_ids[0] + 1, right.problem_ids[1]])]

    async def assign(source: str, message: AskWork) -> Message:
        return Assignment(0, 1, given.pop(0), right.sampling_seed)

    async def judge(source: str, message: Submission) -> Message:
        return Verdict("id", True, "ok", "accepted")

    def submission(index: int) -> Submission:
        tokens = np.zeros(3, np.int32)
        problem = int(right.problem_ids[0])
        return Submission(key, 0, 1, index, problem, "checkpoint", tokens, np.zeros(3, np.float32), (b"proof",))

    async def main() -> None:
        worker = fabric.nodes["w"]
        await worker.call("o", AskWork(key, 0), 9.0)
        await worker.call("o", submission(0), 9.0)
        assert check(view) == []
        await worker.call("o", AskWork(key, 0), 9.0)
        await worker.call("o", submission(1), 9.0)

    fabric.node("w")
    fabric.node("o").serve({AskWork: assign, Submission: judge})
    fabric.run(main(), node="w")
    sentences = [violation.sentence for violation in check(view)]
    assert len(sentences) == 2
    assert sentences[0].startswith("w was given problems") and "the rule gives" in sentences[0]
    assert sentences[1].startswith("w was paid for problem") and "index 1" in sentences[1]


def test_a_flow_whose_sender_died_unreleased_is_found() -> None:
    fabric, view = bare()
    sender, _ = fabric.node("a"), fabric.node("b")

    async def main() -> None:
        await sender.call("b", Crate(Blob(125_000_000, "x")), 900.0)

    sender.spawn(main(), "sends")
    fabric.kernel.run_through(to_ns(0.5))
    assert check(view) == []
    sender.alive = False
    assert "a is dead and a flow of it to b is left" in [violation.sentence for violation in check(view)]
    sender.alive = True
    fabric.kill("a")
    assert check(view) == []


def test_all_is_released_when_a_quiet_fabric_has_run_out() -> None:
    fabric, view = bare()

    async def serve(source: str, message: Crate) -> Message:
        await fabric.nodes["b"].sleep(0.3)
        return Ok()

    async def send(name: str) -> None:
        await fabric.nodes[name].call("b", Crate(Blob(10_000_000, name)), 60.0)

    for name in ("b", "a", "c", "d"):
        fabric.node(name)
    fabric.nodes["b"].serve({Crate: serve})
    for name in ("a", "c", "d"):
        fabric.nodes[name].spawn(send(name), "sends")
    fabric.kernel.run_through(to_ns(0.1))
    fabric.kill("c")
    fabric.kernel.run_through(to_ns(1000.0))
    carrier = fabric.carrier
    assert list(carrier.under_way()) == [] and carrier.engine.active_flows() == []
    assert not any(world.tasks or world.calls for world in fabric.by_index)
    assert not any(fabric.serving.values()) and not fabric.watch.open
    assert check(view) == []


# -------------------------------------------------------------------------------------------- at the end of a run
def test_a_run_in_which_all_workers_crash_at_once_is_no_good_run(tmp_path: Path) -> None:
    crash = FaultPart(kind="crash", nodes=("steady", "fleeting", "cheat"), start_s=0.0)
    scenario = troubled().model_copy(update={"duration_s": 300.0, "faults": (crash,)})
    result = run_scenario(scenario, name="t", seed=3, model_path="calibrated", runs=tmp_path, say=quiet, trace=False)
    assert not result.ok and result.ended == "nothing ever happened: no answer was judged in 300.000 s"
    assert [violation.checker for violation in result.violations] == ["something_was_judged"]


def resting(facts: SwarmFacts, answers: int = 2) -> None:
    """w has generated, and its answers are judged."""
    facts.event({"t_ns": 0, "kind": "registered", "node": "ledger", "worker": "w", "public_key": "k", "stake": 1.0})
    facts.event({"t_ns": 0, "kind": "assigned", "node": "o", "worker": "w", "step": 0, "counter": 1})
    facts.event({"t_ns": 0, "kind": "generated", "node": "w", "counter": 1, "answers": answers, "tokens": 9})
    for index in range(2):
        said = {"accepted": True, "decided": True, "tokens": 3, "counter": 1, "index": index}
        facts.event({"t_ns": 0, "kind": "judged", "node": "v", "public_key": "k", "submission": str(index), **said})


def test_only_a_worker_that_rests_is_given_the_time_of_a_rest() -> None:
    _, view = idle_worker()
    long = dataclasses.replace(view, bounds=Bounds(progress_s=100.0, rest_s=1000.0))
    assert [v.sentence for v in check(long)] == ["w is up and has not got on for 101.000 s; bound 100 s"]
    resting(view.facts, answers=3)  # one is open
    assert [v.sentence for v in check(long)] == ["w is up and has not got on for 101.000 s; bound 100 s"]
    view.facts.event({"t_ns": 0, "kind": "unjudged", "node": "w", "counter": 1, "index": 2, "reason": "r"})
    assert check(long) == []
    short = dataclasses.replace(view, bounds=Bounds(progress_s=100.0, rest_s=0.5))
    assert [v.sentence for v in check(short)] == ["w rests and has not got on for 101.000 s; bound 100.5 s"]
    view.facts.event({"t_ns": 0, "kind": "assigned", "node": "o", "worker": "w", "step": 0, "counter": 2})
    assert len(check(long)) == 1, "it has work again"


def test_what_others_see_of_a_worker_is_no_progress() -> None:
    _, view = idle_worker()
    event = {"t_ns": 50 * SECOND_NS, "kind": "node_state", "node": "o", "worker": "w", "before": "up", "after": "dead"}
    view.facts.event(event)
    assert len(check(view)) == 1


def at_the_end(facts: dict[str, Any] | None = None) -> tuple[Any, SwarmView]:
    """Two nodes that have nothing to do, at the end of their run."""
    fabric, view = bare(**(facts or {}))
    fabric.node("a")
    fabric.node("b")
    fabric.kernel.run_through(to_ns(1.0))
    return fabric, dataclasses.replace(view, over=True, all_done=True)


def test_a_run_that_comes_to_rest_leaks_nothing() -> None:
    fabric, view = at_the_end()

    async def ends_soon() -> None:
        await fabric.nodes["a"].sleep(30.0)

    fabric.nodes["a"].spawn(ends_soon(), "ends soon")
    assert check(view, LAST) == []


def test_a_living_node_that_does_not_come_to_rest_leaks() -> None:
    fabric, view = at_the_end()

    async def never() -> None:
        await fabric.nodes["a"].signal().wait()

    fabric.nodes["a"].spawn(never(), "waits for ever")
    assert list(at_rest(view)) == ["a: the task waits for ever"]
    assert list(at_rest(dataclasses.replace(view, all_done=False))) == [], "the time was up: it was in the middle"
    view.facts.event({"t_ns": 0, "kind": "fault", "node": "", "fault": "hang", "on": ["b"], "begins": True})
    assert list(at_rest(view)) == [], "a fault is in force"
    assert list(all_released(view)) == [], "a node that is taken down lets go"


def test_a_flow_slot_call_or_timer_that_outlives_its_node_leaks() -> None:
    fabric, view = at_the_end()
    carrier = fabric.carrier
    carrier.engine.start(0.0, carrier.network.path(0, 1).links, 1e15)
    assert list(all_released(view)) == ["1 flows that are nobody's"]

    fabric, view = at_the_end()
    fabric.serving[1] = {Event(fabric.kernel): fabric.nodes["a"]}
    fabric.nodes["b"].alive = False  # and nothing of it was released
    assert list(all_released(view)) == ["b: 1 slots of calls that it serves"]

    fabric, view = at_the_end()

    async def sleeps() -> None:
        await fabric.nodes["a"].sleep(500.0)

    fabric.nodes["a"].spawn(sleeps(), "sleeps")
    fabric.kernel.run_through(to_ns(2.0))
    for task in list(fabric.nodes["a"].tasks):
        task.awaited = None  # its timer is not called off when it is killed
    assert list(all_released(view)) == ["1 timers of tasks that have ended"]
