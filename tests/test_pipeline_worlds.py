"""The same ring in all worlds: real sockets, one process, virtual time. Same tokens, same verdict, same recovery."""

import pytest

from refimpl.identity import Identity
from refimpl.model.sampler import Sampling
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.stage import Stage, StageConfig
from refimpl.work import Forward
from refimpl.worlds.http import HttpFabric
from refimpl.worlds.local import LocalFabric
from tests.small_ring import SmallRing, ask, make_checkpoint, one_process, prompts_of
from tests.worlds import sim_fabric

LENGTHS, NEW = [3, 17, 9, 6], [20, 9, 23, 4]
WORLDS = {
    "local": lambda: LocalFabric(run_seed=1),
    "http": lambda: HttpFabric(run_seed=1),
    "sim": lambda: sim_fabric(1),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def truth(checkpoint):
    return one_process(checkpoint, prompts_of(LENGTHS), NEW, range(4), Sampling(temperature=0.9))[0]


@pytest.mark.parametrize("world", WORLDS)
def test_the_ring_answers_alike_in_every_world(checkpoint, truth, world):
    """Signed, three stages, two micro-batches; in the middle a stage dies and a spare takes its seat."""
    ring = SmallRing(checkpoint, 3, spares=1, fabric=WORLDS[world](), signed=True, temperature=0.9, overdue_s_min=5.0)

    async def main(ring):
        async def kill():
            while sum(len(kept.answer) for kept in ring.head.log.requests.values()) < 20:
                await ring.client.sleep(0.001)
            ring.fabric.kill("s1")

        ring.client.spawn(kill(), "fault")
        done = await ring.client.call("s0", ask(prompts_of(LENGTHS), NEW), 120)
        ring.head.stop()
        return [answer.tolist() for answer in done.answers]

    assert ring.run(main) == truth
    assert ring.head.ring.seats == ["s0", "s3", "s2"] and not ring.head.verdicts


def test_virtual_time_is_that_of_the_bound(checkpoint):
    """Priced at 7 ms a pass and 2 ms a hop (1 ms at each end of a link), the cycle in virtual time is
    max(M tau, N (tau + lambda)), for M below and above the corner."""
    for micro_batches in (1, 2, 5):
        fabric = sim_fabric(1)
        ring = SmallRing(checkpoint, 3, fabric=fabric, micro_batches=micro_batches, rows=1, temperature=0.0)
        for world in ring.worlds.values():
            world.price = lambda work: 0.007 if isinstance(work, Forward) else 0.0

        async def main(ring, micro_batches=micro_batches):
            await ring.client.call("s0", ask(prompts_of([2] * micro_batches), [40] * micro_batches), 120)
            ring.head.stop()
            return ring.head.cycle_s()

        bound_s = max(micro_batches * 0.007, 3 * (0.007 + 0.002))
        assert ring.run(main) == pytest.approx(bound_s, rel=0.02)


def test_one_run_is_one_sequence_of_events(checkpoint):
    """In virtual time the same seed gives the same ring, pass for pass and nanosecond for nanosecond."""
    logs = []
    for _ in range(2):
        ring = SmallRing(checkpoint, 3, spares=1, fabric=sim_fabric(1), signed=True, temperature=0.9)
        times = []

        async def main(ring, times=times):
            for world in ring.worlds.values():
                world.price = lambda work: 0.003
            returned = ring.head.schedule.returned

            def noted(epoch, number, tokens):
                times.append((ring.client.now(), epoch, number, tuple(tokens)))
                return returned(epoch, number, tokens)

            ring.head.schedule.returned = noted
            await ring.client.call("s0", ask(prompts_of(LENGTHS), NEW), 120)
            ring.head.stop()

        ring.run(main)
        logs.append(times)
    assert logs[0] == logs[1] and len(logs[0]) > 30


def test_a_stage_needs_only_the_port(checkpoint):
    """No asyncio, no sockets, no files in the roles: a stage is built from a world and its parts."""
    world = sim_fabric(1).node("alone")
    stage = Stage(world, StageConfig(), Identity.from_seed(1, "alone"), torch_parts(checkpoint, dtype="float32"))
    assert stage.formation is None
