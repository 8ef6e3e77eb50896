"""Rings under any order of events: whatever overtakes what, is lost, hangs or dies, a ring answers and comes to rest.

Virtual time, so that a seed is a whole history and a failure can be run again. The arithmetic is a stand-in (a running
checksum in place of a model) that depends on all that came before, so one pass done twice or skipped shows in the
tokens. Schedule, stages, links, signatures, commitments and mending are the real ones.
"""

import dataclasses
import hashlib
from types import SimpleNamespace

import numpy as np
import pytest

from refimpl.attacks.ring_trial import _rest
from refimpl.identity import Identity
from refimpl.pipeline.formation import Parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.pipeline.watch import Progress
from refimpl.work import Seconds
from refimpl.world import Timeout
from sim.fabric import journal_for
from sim.kernel import to_ns
from sim.world import SimFabric, SimWorld

PRIME, VOCABULARY, HIDDEN = 65521, 61, 2
STEP_S = 1.0
"""Of the patience of everything: time-outs are one or two of it."""


class Checksums:
    """In place of layers: the state of a token is a checksum of all states up to it."""

    dtype, memory_bytes = "float32", 1

    def __init__(self, member, last, micro_batches):
        self.layers, self.last = range(member.first, member.end), last
        self.held = [{} for _ in range(micro_batches)]

    def reset(self):
        self.held = [{} for _ in self.held]

    def work(self, made):
        return Seconds(duration_s=0.001)

    def run(self, made, drawing, states):
        held, out, at = self.held[made.micro_batch], [], 0
        for source, target in made.moves:
            held[target] = held[source]
        for place, row in enumerate(made.rows, start=made.first_row):
            inputs = row.tokens if states is None else [int(s) for s in states[at : at + row.new, 0]]
            at += row.new
            here = [0] * len(self.layers) if row.past == 0 else held[place]
            for value in inputs:
                value, here = through(value, here)
                out.append(value)
            held[place] = here
        made_states = np.zeros((len(out), HIDDEN), np.float32)
        made_states[:, 0] = out
        self.tokens, self.logprobs, self.states = None, None, made_states
        if self.last:
            ends = np.cumsum([row.new for row in made.rows]) - 1
            lasts = [out[end] for end, row in zip(ends, made.rows, strict=True) if row.draws]
            drawn = [drawn_from(s, row.seed, row.answered) for s, row in zip(lasts, drawing, strict=True)]
            self.tokens, self.logprobs = np.array(drawn, np.int32), np.zeros(len(drawn), np.float32)
        return Result(self.states, self.tokens, self.logprobs)


class Result:
    def __init__(self, states, tokens, logprobs):
        self.states, self.tokens, self.logprobs = states, tokens, logprobs


def through(value, sums):
    """One token through layers with these sums of the tokens before; its state, and the sums with it."""
    new = []
    for total in sums:
        value = (total * 31 + value + 1) % PRIME
        new.append(value)
    return value, new


def drawn_from(state, seed, answered):
    return (state * 7 + seed * 13 + answered) % VOCABULARY


def truth(prompt, new, seed, layers):
    """One process, one sequence."""
    sums, answer, text = [0] * layers, [], list(prompt)
    for token in text[:-1]:
        _, sums = through(token, sums)
    last = text[-1]
    for answered in range(new):
        state, sums = through(last, sums)
        last = drawn_from(state, seed, answered)
        answer.append(last)
    return answer


class Disorder:
    """A network without manners: any delay, any order, and `loss` of the messages never arrive."""

    def __init__(self, kernel, rng, loss):
        self.kernel, self.rng, self.loss = kernel, rng, loss
        self.scale_s = float(rng.choice([0.0, 0.001, 0.02, 0.1]))
        self.gone = set()

    def _later(self, node, delay_s, arrived):
        self.kernel.at(node, self.kernel._now + to_ns(delay_s), lambda _: arrived())

    def send(self, source, target, size_bytes, arrived, kind, *, reply=False):
        if self.rng.random() >= self.loss and source not in self.gone:
            delay_s = float(self.rng.exponential(self.scale_s * (1 if self.rng.random() < 0.8 else 20)))
            self._later(target, min(delay_s, STEP_S / 4), arrived)

    def reset(self, source, target, arrived):
        self._later(target, 0.001, arrived)

    def drop(self, node):
        self.gone.add(node)

    def unreachable(self, source, target, *, reply=False):
        return None


class FuzzRing:
    """A ring of so many stages and two spares; all chance is the seed's."""

    def __init__(self, seed, loss=0.0):
        self.rng = rng = np.random.default_rng(seed)
        self.fabric = SimFabric(run_seed=seed, carrier=lambda kernel: Disorder(kernel, rng, loss))
        stages, batches, rows = int(rng.integers(1, 6)), int(rng.integers(1, 4)), int(rng.integers(1, 4))
        self.layers = stages + int(rng.integers(0, 3))
        cuts = sorted(rng.choice(np.arange(1, self.layers), stages - 1, replace=False).tolist()) if stages > 1 else []
        self.config = RingConfig(
            ring=f"fuzz-{seed}",
            layers=self.layers,
            hidden=HIDDEN,
            dtype="float32",
            cuts=(*cuts, self.layers),
            micro_batches=batches,
            rows=rows,
            capacity_tokens=64,
            prefill_tokens=int(rng.integers(1, 9)),
            signed=bool(rng.integers(2)),
            chunk_tokens=4,
            overdue_s_min=2 * STEP_S,
            probe_timeout_s=STEP_S,
            join_timeout_s=4 * STEP_S,
        )
        self.names = [f"s{i}" for i in range(stages + 2)]
        self.keys = {name: Identity.from_seed(seed, name) for name in self.names}
        self.public = {name: key.public_key for name, key in self.keys.items()}
        self.stages = {name: self.start(name) for name in self.names}
        self.head = Head(self.stages["s0"].world, self.config, self.stages["s0"], self.public)
        count = int(rng.integers(1, 7))
        self.prompts = [rng.integers(0, VOCABULARY, int(n)).tolist() for n in rng.integers(1, 20, count)]
        self.new = [int(n) for n in rng.integers(1, 25, count)]

    def start(self, name):
        world = self.fabric.node(name)
        slow_s = float(self.rng.choice([0.0, 0.001, 0.02]))
        world.price = lambda work: slow_s * float(self.rng.random())

        def load(plan, member):
            return Checksums(member, member.end == plan.layers, plan.micro_batches)

        parts = Parts(checkpoint="sums", load=load, commit=lambda plan: lambda data: hashlib.sha256(data).digest())
        patience = StageConfig(hop_timeout_s=STEP_S, attempts=8)
        return Stage(world, patience, self.keys[name], parts)

    def serve(self, name):
        stage = self.stages[name]
        stage.serve()
        stage.world.spawn(stage.run(), "stage")

    def run(self, fault=None, patience_s=600 * STEP_S):
        """Answers; raises when the ring neither answers nor rests within `patience_s` of virtual time."""

        async def main():
            world = self.stages["s0"].world
            self.head.serve()
            world.spawn(self.head.run(), "head")
            for name in self.names[1:]:
                self.serve(name)
            if fault is not None:
                self.fabric.node("fault").spawn(fault(self), "fault")
            ids = [f"r{i}" for i in range(len(self.prompts))]
            kept = await self.head.complete(ids, self.prompts, self.new, range(len(ids)))
            ended_s = world.now()
            while not self.head.schedule.idle:
                assert world.now() < ended_s + patience_s, "it does not come to rest"
                await world.sleep(STEP_S / 10)
            self.head.stop()
            return [request.answer for request in kept]

        return self.fabric.run(main(), until_s=patience_s * 4)

    def expected(self):
        return [truth(p, n, i, self.layers) for i, (p, n) in enumerate(zip(self.prompts, self.new, strict=True))]


async def kill_some(ring):
    """Up to two stages, but not the head's, die at any time."""
    for name in ring.rng.permutation(ring.names[1:-2])[: int(ring.rng.integers(1, 3))]:
        world = ring.fabric.nodes["fault"]
        await world.sleep(float(ring.rng.exponential(0.3)))
        ring.fabric.kill(str(name))


async def hang_some(ring):
    """A stage stands still with its connections open, for shorter or longer than anybody's patience."""
    world = ring.fabric.nodes["fault"]
    for name in ring.rng.permutation(ring.names[1:-1])[:2]:
        await world.sleep(float(ring.rng.exponential(0.3)))
        ring.fabric.nodes[str(name)].hang()
        await world.sleep(float(ring.rng.exponential(3 * STEP_S)))
        ring.fabric.nodes[str(name)].wake()


FAULTS = {"none": None, "kill": kill_some, "hang": hang_some}


HISTORIES = [(seed, fault, loss) for seed in range(6) for fault in FAULTS for loss in (0.0, 0.03)]
MET_BEFORE = [
    (67, "hang", 0.0),
    (196, "kill", 0.0),
]  # a pass of the old epoch was computed on caches emptied for the new


@pytest.mark.parametrize(("seed", "fault", "loss"), HISTORIES + MET_BEFORE)
def test_every_history_ends_in_the_same_tokens_and_at_rest(seed, fault, loss):
    ring = FuzzRing(seed, loss)
    assert ring.run(FAULTS[fault]) == ring.expected()
    assert not ring.head.verdicts


@pytest.mark.slow
def test_a_thousand_more_histories():
    for seed in range(100, 270):
        for fault in FAULTS:
            for loss in (0.0, 0.03):
                ring = FuzzRing(seed, loss)
                assert ring.run(FAULTS[fault]) == ring.expected(), (seed, fault, loss)


def test_commitments_are_compiled_before_the_first_hop(monkeypatch):
    """The first commitment is made while the ring forms, off the event loop: compiling in the middle of a hop would
    hold up all that this node has to answer, and cost it its seat."""
    ring = FuzzRing(3)
    computing, first, honest = [], {}, SimWorld.compute

    async def compute(self, work, fn):
        computing.append(True)
        try:
            return await honest(self, work, fn)
        finally:
            computing.pop()

    monkeypatch.setattr(SimWorld, "compute", compute)
    for name, stage in ring.stages.items():
        made = stage.parts.commit

        def commit(plan, name=name, made=made):
            inner = made(plan)
            return lambda data: first.setdefault(name, (bool(computing), ring.head.ring.up)) and inner(data)

        stage.parts = dataclasses.replace(stage.parts, commit=commit)
    ring.config = ring.head.ring.config = dataclasses.replace(ring.config, signed=True)
    assert ring.run() == ring.expected()
    assert first and set(first.values()) == {(True, False)}


def test_a_record_of_an_unfit_node_fits_the_simulators_log():
    """Journals of simulated nodes add the time, the kind and the node's name: no field may be called so."""
    ring, log = FuzzRing(10), []

    class Log:
        def event(self, time_ns, kind, node, **fields):
            log.append((kind, node, fields))

    ring.fabric.recorder = Log()
    for part in (ring.head, ring.head.ring, *ring.stages.values()):
        part.journal = journal_for(part.world)
    ring.fabric.kill("s2")
    assert ring.run() == ring.expected()
    assert ("unfit", "s0", {"stage": "s2", "epoch": 1, "reason": "node 's2' is down"}) in log


def test_a_clock_that_runs_while_the_machine_stands_still_is_no_ring_that_hangs():
    """Each look finds the clock an hour on; what counts is that nothing moves in many looks."""
    looks = []

    async def sleep(duration_s):
        looks.append(duration_s)

    async def counters(moves):
        return [Progress("s0", 1, len(looks) if moves else 3, 3, 3)]

    def head(looks_needed, moves):
        ring = SimpleNamespace(counters=lambda: counters(moves), up=True, seats=["s0"], epoch=1)
        world = SimpleNamespace(sleep=sleep, now=lambda: 3600.0 * len(looks))
        schedule = IdleAfter(looks, looks_needed)
        return SimpleNamespace(world=world, ring=ring, schedule=schedule)

    drive(_rest(head(50, moves=True), 60.0))
    assert len(looks) == 50
    with pytest.raises(Timeout, match="does not come to rest.*'s0'"):
        drive(_rest(head(10**9, moves=False), 60.0))
    assert sum(looks[50:]) == pytest.approx(60.0, rel=0.01)


class IdleAfter:
    number = 4

    def __init__(self, looks, needed):
        self.looks, self.needed = looks, needed

    @property
    def idle(self):
        return len(self.looks) >= self.needed


def drive(coroutine):
    """Run what never really waits."""
    with pytest.raises(StopIteration):
        coroutine.send(None)
