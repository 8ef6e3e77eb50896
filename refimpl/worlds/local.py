"""The emulated world: every node in one process, wall-clock time, lines with injected latency and bandwidth.

Messages are encoded and decoded on their way, so what works here works over sockets; only the sockets are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from refimpl.messages import BadMessage, Message, decode, encode
from refimpl.world import Refused, TaskFailure, Timeout, Unreachable
from refimpl.worlds.asyncio_node import AsyncioNode, Line, Supervisor, device_thread

T = TypeVar("T")


class LocalWorld(AsyncioNode):
    """One node of a `LocalFabric`."""

    fabric: LocalFabric

    async def call(self, target: str, message: Message, timeout_s: float) -> Any:
        loop = asyncio.get_running_loop()
        reply: asyncio.Future[Message] = loop.create_future()
        self.start_task(self.fabric.carry(self, target, message, reply))
        try:
            async with asyncio.timeout(timeout_s):
                return await reply
        except TimeoutError:
            raise Timeout(f"{target!r} did not answer {type(message).__name__} within {timeout_s:g} s") from None


class LocalFabric:
    """The nodes of one run in one process."""

    def __init__(self, *, run_seed: int = 0) -> None:
        self.run_seed = run_seed
        self.nodes: dict[str, LocalWorld] = {}
        self._supervisor = Supervisor()
        self._device = device_thread()
        self._started_s = time.monotonic()

    @property
    def failures(self) -> list[TaskFailure]:
        return self._supervisor.failures

    def node(self, name: str, line: Line | None = None) -> LocalWorld:
        """A new node. A name whose node was killed may be used again: the node is back, with nothing of its past."""
        if name in self.nodes and self.nodes[name].alive:
            raise ValueError(f"there is a node {name!r} already")
        world = LocalWorld(
            name,
            run_seed=self.run_seed,
            started_s=self._started_s,
            supervisor=self._supervisor,
            device=self._device,
            line=line or Line(),
        )
        world.fabric = self
        self.nodes[name] = world
        return world

    def kill(self, name: str) -> None:
        """The node's process dies: its tasks end, calls to it fail with Unreachable."""
        self.nodes[name].stop_tasks()

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run until `main` ends (its result) or a task fails (TaskFailed)."""

        async def body() -> T:
            try:
                return await self._supervisor.run(main)
            finally:
                for node in self.nodes.values():
                    node.stop_tasks()

        return asyncio.run(body())

    async def carry(
        self, source: LocalWorld, target_name: str, message: Message, reply: asyncio.Future[Message]
    ) -> None:
        """Take a message to its target, and the target's reply back into `reply`."""
        target = self.nodes.get(target_name)
        try:
            frame = encode(message)
            if target is None:
                raise Unreachable(f"there is no node {target_name!r}")
            await self._travel(source, target, len(frame))
            if not target.alive:
                raise Unreachable(f"node {target_name!r} is down")
            serving = target.start_task(target.answer(source.name, decode(frame)))
            await asyncio.wait((serving,))
            if serving.cancelled():
                raise Unreachable(f"node {target_name!r} was lost in mid-call")
            answer = encode(serving.result())
            await self._travel(target, source, len(answer))
            if not target.alive:
                raise Unreachable(f"node {target_name!r} was lost in mid-call")
            if not reply.done():
                reply.set_result(decode(answer))
        except (BadMessage, Refused, Unreachable) as error:
            refusal = Refused(str(error)) if isinstance(error, BadMessage) else error
            if not reply.done():
                reply.set_exception(refusal)

    async def _travel(self, source: LocalWorld, target: LocalWorld, size_bytes: int) -> None:
        latency_s = (source.line.latency_ms + target.line.latency_ms) / 1000
        sent_s = source.elapsed_s()
        arrived_s = sent_s + latency_s
        if source is not target and (source.paced or target.paced):
            left, step = size_bytes, min(source.uplink.piece_bytes, target.downlink.piece_bytes)
            while left > 0:
                piece = min(left, step)
                sent_s = source.uplink.reserve_next(piece, sent_s, source.elapsed_s())
                arrived_s = target.downlink.reserve(piece, sent_s + latency_s)
                left -= piece
                await source.sleep_until(sent_s)
        await source.sleep_until(arrived_s)
