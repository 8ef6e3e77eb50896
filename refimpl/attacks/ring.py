"""Dishonest stages of a ring, as code against the real stage: each cheat is one line of `RING_CHEATS`.

A cheat changes the layers that are run, what is made of their output, what is sent of that, what is committed to, or
what is said to the neighbours. Everything else, signatures too, is the honest stage's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from refimpl.attacks.quantize import perturbed, quantized
from refimpl.messages import Message
from refimpl.model.transformer import Decoder, Layer, Step
from refimpl.pipeline.blame import Complaint, Receipt
from refimpl.pipeline.compute import torch_parts
from refimpl.pipeline.formation import Formation
from refimpl.pipeline.messages import FileComplaint, Hop, RingPlan, Taken, hop_of
from refimpl.pipeline.schedule import HeldRow, Pass
from refimpl.pipeline.stage import Stage
from refimpl.world import CallError

States = np.ndarray
Twist = Callable[["CheatingStage", Pass, States], States]


@dataclass(frozen=True, kw_only=True)
class Cheat:
    """What a dishonest stage does otherwise than an honest one."""

    layers: Callable[[Decoder], Decoder] = lambda decoder: decoder
    made: Twist = lambda stage, made, states: states  # sent and committed to
    sent: Twist = lambda stage, made, states: states  # sent only
    committed: Twist = lambda stage, made, states: states  # committed to only
    confirms: bool = True  # signs receipts
    looks: bool = True  # complains when it should
    accuses: bool = False  # complains when it should not


def floats(states: States) -> torch.Tensor:
    """Activations as they travel -> float32."""
    if states.dtype == np.uint16:
        return torch.from_numpy(states.view(np.int16).copy()).view(torch.bfloat16).float()
    return torch.from_numpy(states.copy())


def as_sent(values: torch.Tensor, like: States) -> States:
    """float32 -> activations as they travel."""
    if like.dtype == np.uint16:
        return values.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    return values.float().numpy()


def twisted(stage: CheatingStage, made: Pass, states: States) -> States:
    """Other activations altogether."""
    return as_sent(floats(states) * -1.5, states)


def small_ones_lost(stage: CheatingStage, made: Pass, states: States) -> States:
    """Of each token only the largest numbers are kept: the top K of a chunk stays as it is, and with it the proof."""
    values = floats(states)
    if not len(values):
        return states
    keep = values.abs() >= values.abs().quantile(0.6, dim=1, keepdim=True)
    return as_sent(values * keep, states)


def old_reply(stage: CheatingStage, made: Pass, states: States) -> States:
    """From the first whole chunk on, what was said `REPLY_AGE` tokens ago."""
    out, at = floats(states), 0
    for row in made.rows:
        past = stage.history.setdefault(row.request, [])
        for token in range(row.new):
            past.append(out[at + token].clone())
            if len(past) > REPLY_AGE:
                out[at + token] = past[-1 - REPLY_AGE]
        at += row.new
    return as_sent(out, states)


class Through(torch.nn.Module):
    """A layer that does nothing. It keeps one parameter, so that the stage still has a dtype and a device."""

    def __init__(self, left_out: Layer) -> None:
        super().__init__()
        self.kept = left_out.attention_norm

    def forward(self, hidden_BTD: torch.Tensor, step: Step, index: int) -> torch.Tensor:
        return hidden_BTD


def layer_skipped(decoder: Decoder) -> Decoder:
    """The last layer held is left out."""
    left_out = decoder.layers[-1]
    assert isinstance(left_out, Layer)
    decoder.layers[-1] = Through(left_out)
    return decoder


REPLY_AGE = 4

RING_CHEATS: dict[str, Cheat] = {
    "honest": Cheat(),
    "tampered-send": Cheat(sent=twisted),
    "tampered-commitment": Cheat(committed=twisted),
    "tampered-below-top-k": Cheat(made=small_ones_lost),
    "layer-skipped": Cheat(layers=layer_skipped),
    "weights-4bit": Cheat(layers=lambda decoder: quantized(decoder, bits=4, group=None)),
    "stale-weights": Cheat(layers=lambda decoder: perturbed(decoder, relative=0.2, seed=11)),
    "old-reply": Cheat(made=old_reply),
    "receipt-withheld": Cheat(confirms=False),
    "complaint-forged": Cheat(accuses=True),
    "looks-away": Cheat(looks=False),
}


def cheating_parts(path: Any, cheat: Cheat, **options: Any) -> Any:
    """`torch_parts` with the cheat's layers."""
    return torch_parts(path, change=cheat.layers, **options)


class CheatingStage(Stage):
    """A stage with a `cheat`."""

    def __init__(self, *arguments: Any, cheat: Cheat, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cheat = cheat
        self.history: dict[int, list[torch.Tensor]] = {}
        self._accused = False

    async def join(self, plan: RingPlan) -> None:
        await super().join(plan)
        self.history.clear()
        ring = self.formation
        assert ring is not None
        if not self.cheat.looks and ring.receiver is not None:
            self._look_away(ring)

    def _look_away(self, ring: Formation) -> None:
        """Confirm what should be complained about."""
        receiver = ring.receiver
        assert receiver is not None
        honest = receiver.take

        def take(signed: Any, *arguments: Any, **options: Any) -> Receipt | Complaint:
            answer = honest(signed, *arguments, **options)
            if isinstance(answer, Receipt):
                return answer
            return Receipt(signed.digest.number, ring.sign(Receipt.content(signed.digest)))

        receiver.take = take  # type: ignore[method-assign]

    def _message(self, ring: Formation, made: Pass, drawing: Sequence[HeldRow], result: Any) -> Message | None:
        states = self.cheat.made(self, made, result.states)
        said = replace(result, states=self.cheat.committed(self, made, states))
        if ring.last:
            return super()._message(ring, made, drawing, said)
        sent = self.cheat.sent(self, made, states)
        if ring.sender is None:
            return hop_of(made, sent)
        commitments, _ = ring.commitments(made, said.states)
        signed = ring.sender.seal(made.number, ring.rows_of(made, sent), commitments)
        return hop_of(made, sent, commitments, signed.signature)

    async def _hop(self, source: str, hop: Hop) -> Message:
        answer = await super()._hop(source, hop)
        if self.cheat.accuses and not self._accused:
            await self._accuse()
        return answer if self.cheat.confirms else Taken()

    async def _accuse(self) -> None:
        """Complain about the predecessor's first whole chunk, which was right."""
        ring = self.formation
        if ring is None or ring.receiver is None:
            return
        for signed in ring.receiver.digests():
            for c in signed.digest.commitments:
                first, end = c.chunk * ring.plan.chunk_tokens, (c.chunk + 1) * ring.plan.chunk_tokens
                leaves = [(e, e.leaves[e.row]) for e in ring.receiver.defence(c.request)]
                part = [e for e, leaf in leaves if leaf.first_token < end and leaf.first_token + leaf.tokens > first]
                if not part:
                    continue
                self._accused = True
                complaint = Complaint(ring.member.public_key, c.request, c.chunk, tuple(part), signed)
                complaint = replace(complaint, signature=ring.sign(complaint.content()))
                try:
                    message = FileComplaint(ring.plan.epoch, complaint)
                    await self.world.call(ring.plan.members[0].name, message, self.config.hop_timeout_s)
                except CallError:
                    pass
                return
