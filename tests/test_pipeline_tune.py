"""Micro-batches and rows from measured passes: in virtual time, where a pass takes exactly what it is said to take."""

import hashlib

import numpy as np
import pytest

from refimpl.identity import Identity
from refimpl.pipeline.formation import Parts
from refimpl.pipeline.head import Head
from refimpl.pipeline.ring import RingConfig
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.pipeline.tune import rows_to_try, tuned
from refimpl.work import Seconds
from sim.world import SimFabric
from tests.test_pipeline_fuzz import HIDDEN, Checksums, Disorder, truth


class Steady(Disorder):
    """Every message takes as long."""

    def __init__(self, kernel, hop_s):
        super().__init__(kernel, np.random.default_rng(0), 0.0)
        self.hop_s = hop_s

    def send(self, source, target, size_bytes, arrived, kind, *, reply=False):
        self._later(target, self.hop_s, arrived)


def run(taus_s, hop_s, batch_max):
    """(schedule picked, what was measured, are the answers of the ring so made right) for stage times `taus_s`: each a
    function of rows."""
    fabric = SimFabric(run_seed=1, carrier=lambda kernel: Steady(kernel, hop_s))
    names = [f"s{at}" for at in range(len(taus_s))]
    keys = {name: Identity.from_seed(1, name) for name in names}
    stages = []
    for name, tau_s in zip(names, taus_s, strict=True):
        world = fabric.node(name)
        world.price = lambda work: work.duration_s

        def load(plan, member, tau_s=tau_s):
            compute = Checksums(member, member.end == plan.layers, plan.micro_batches)
            compute.work = lambda made: Seconds(duration_s=tau_s(len(made.rows)) if made.rows else 0.0)
            return compute

        parts = Parts(checkpoint="sums", load=load, commit=lambda plan: lambda data: hashlib.sha256(data).digest())
        stages.append(Stage(world, StageConfig(hop_timeout_s=5.0), keys[name], parts))
    config = RingConfig(
        ring="tune", layers=len(names), hidden=HIDDEN, dtype="float32", cuts=tuple(range(1, len(names) + 1)),
        capacity_tokens=64, stop_tokens=frozenset({3}),
    )  # fmt: skip
    nodes = {name: key.public_key for name, key in keys.items()}

    async def main():
        for stage in stages[1:]:
            stage.serve()
            stage.world.spawn(stage.run(), "stage")
        chosen, said = await tuned(stages[0].world, stages[0], config, nodes, batch_max)
        assert chosen.ring == "tune" and chosen.stop_tokens == {3} and chosen.capacity_tokens == 64
        head = Head(stages[0].world, chosen, stages[0], nodes)
        head.serve()
        stages[0].world.spawn(head.run(), "head")
        kept = await head.complete(["a", "b"], [[1, 2], [4]], [5, 5], [0, 1])
        head.stop()
        right = [truth([1, 2], 5, 0, len(names)), truth([4], 5, 1, len(names))]
        cut = [answer[: answer.index(3) + 1] if 3 in answer else answer for answer in right]
        return chosen, said, [request.answer for request in kept] == cut

    return fabric.run(main(), until_s=10_000)


@pytest.mark.parametrize(
    ("taus_s", "hop_s", "picked", "gain"),
    [
        # bound by memory: rows cost nothing, so one micro-batch of all
        ([lambda m: 0.010] * 3, 0.05, (1, 12), 1.0),
        # bound by arithmetic, no hops: three fill three stages, whatever their rows, and two rows have the short cycle
        ([lambda m: 0.01 * m] * 3, 0.0, (3, 2), 3.0),
        # bound by arithmetic, hops of 20 ms: max(6 x 20, 3 x 40) = 120 ms, and one micro-batch of 12 takes 420 ms
        ([lambda m: 0.01 * m] * 3, 0.02, (6, 2), 3.5),
        # one stage has no hops, and nothing to overlap
        ([lambda m: 0.01 + 0.001 * m], 0.05, (1, 12), 1.0),
    ],
)
def test_what_is_picked_is_best_for_what_is_measured(taus_s, hop_s, picked, gain):
    """tau to the digit for every stage and number of rows, hops, the plan, and a ring that then answers right."""
    chosen, said, right = run(taus_s, hop_s, 12)
    assert right
    for rows, times_s in said["tau_s"].items():
        assert times_s == pytest.approx([tau_s(int(rows)) for tau_s in taus_s], rel=1e-3)
    if len(taus_s) > 1:
        assert said["hop_s"] == pytest.approx(hop_s, abs=1e-4)
    assert (chosen.micro_batches, chosen.rows) == (said["micro_batches"], said["rows"]) == picked
    assert said["gain"] == pytest.approx(gain, rel=0.01)


def test_rows_to_try_cover_the_batch():
    assert rows_to_try(12, 3) == [2, 3, 4, 6, 12] and rows_to_try(1, 4) == [1] and rows_to_try(8, 1) == [4, 8]
