"""The engine: text out of a model with a proof of every chunk, and the same text read back to check it.

`generate` writes answers, drawn with one seed per sequence and committed to while they are written: each time 32 states
are full, a TOPLOC proof of them is made and the states are dropped. `replay` is the verifier's half: one prefill over
prompt and answer gives the states that should have chosen each token, at a fraction of the cost.

A sequence does not depend on its neighbours but for rounding: its tokens are drawn from (seed, place in the answer),
rows are padded on the right where no token looks, padding is dropped before anything is hashed, and a finished sequence
leaves the batch while the next waiting one takes its place.

No state outside the objects here, no clock, no threads: the simulator calls it as well as real processes do.

Shapes: N sequences of one call, B of them at work, T tokens, n tokens of one answer, C tokens of a chunk, D hidden,
V vocabulary.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from refimpl.model.cache import KVCache, Store
from refimpl.model.sampler import Sampling, cutoffs, sample, scale
from refimpl.model.transformer import Decoder
from refimpl.threads import set_threads as set_threads
from refimpl.toploc.proof import CHUNK_TOKENS, TOP_K, Mode, build_proofs

Tokens = Sequence[int] | npt.NDArray[np.integer]

LOGIT_ROWS = 256  # rows of the vocabulary-wide table that `Replay` makes at a time


@dataclass(frozen=True, kw_only=True)
class ProofSettings:
    """How answers are committed to; see `refimpl.toploc.proof`."""

    chunk_tokens: int = CHUNK_TOKENS
    top_k: int = TOP_K
    mode: Mode = "strict"


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """One answer. `tokens` includes the end-of-text token if it was drawn."""

    tokens: npt.NDArray[np.int32]  # [n]
    logprobs: npt.NDArray[np.float32]  # [n], of the processed distribution that the tokens were drawn from
    proofs: tuple[bytes, ...]  # one per chunk of the answer; empty without proof settings
    finished: Literal["eos", "length"]
    states: torch.Tensor | None = None  # bf16 [n, D], if the engine keeps them


@dataclass(frozen=True, kw_only=True, eq=False)
class Replay:
    """What the right model computes on somebody's answer: row i is what token i was to be drawn from."""

    states: torch.Tensor  # bf16 [n, D]: final normed hidden states at prompt_len − 1 … prompt_len + n − 2
    hidden: torch.Tensor  # [n, D], the same in the model's dtype
    tokens: torch.Tensor  # int64 [n]
    model: Decoder = field(repr=False)

    def logits(self, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Raw logits, float32 [rows, V], of rows start … stop − 1 (all by default: n × V numbers at once)."""
        with torch.no_grad():
            return self.model.logits(self.hidden[start:stop]).float()

    def logprobs(self, sampling: Sampling | None = None) -> torch.Tensor:
        """Log-probability of each answer token, float32 [n]: of the raw distribution, or as `sampling` processes it
        (−inf where the token could not have been drawn)."""
        rule = Sampling() if sampling is None else sampling
        parts = []
        for start, stop in self._blocks():
            scaled = scale(self.logits(start, stop), rule)
            cut = cutoffs(scaled, rule)[:, None]
            kept = scaled.masked_fill(scaled < cut, -torch.inf)
            parts.append(kept.log_softmax(-1).gather(1, self.tokens[start:stop, None])[:, 0])
        return torch.cat(parts) if parts else torch.zeros(0)

    def eos_probability(self, eos_ids: Iterable[int] | None = None) -> torch.Tensor:
        """Probability at temperature 1 that the text ends with each token, float32 [n]."""
        ends = torch.tensor(sorted(self.model.config.eos_ids if eos_ids is None else eos_ids), dtype=torch.int64)
        blocks = [self.logits(*block).softmax(-1) for block in self._blocks()]
        return torch.cat([p[:, ends].sum(-1) for p in blocks]) if blocks else torch.zeros(0)

    def _blocks(self) -> list[tuple[int, int]]:
        n = len(self.tokens)
        return [(start, min(start + LOGIT_ROWS, n)) for start in range(0, n, LOGIT_ROWS)]


@dataclass(slots=True)
class _Row:
    """A sequence at work: which one it is, and what it has written so far."""

    index: int  # in the call's arguments
    slot: int  # its place in the buffer of states
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    proofs: list[bytes] = field(default_factory=list)
    states: list[torch.Tensor] = field(default_factory=list)


class TorchEngine:
    """Runs a whole model. `name` is what it is called in messages and price lists."""

    def __init__(
        self,
        model: Decoder,
        *,
        name: str,
        proof: ProofSettings | None,
        batch_max: int = 8,  # sequences decoded together
        pass_tokens_max: int = 4096,  # tokens (padding too) per prefill pass: bounds the memory for activations
        store: Store | None = None,  # what becomes of cached keys and values; None: kept as they are
        keep_states: bool = False,  # completions carry their states
    ) -> None:
        if not (model.first and model.last):
            raise ValueError(f"model holds layers {model.layer_range}, expected all {model.config.layers}")
        if batch_max < 1 or pass_tokens_max < 1:
            raise ValueError(f"batch_max is {batch_max}, pass_tokens_max {pass_tokens_max}; expected at least 1")
        self.model, self.name, self.proof, self.batch_max = model, name, proof, batch_max
        self.pass_tokens_max, self.store, self.keep_states = pass_tokens_max, store, keep_states

    # ----------------------------------------------------------------------------------------------------- generate
    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: int,
        eos_ids: frozenset[int] | None = None,  # None: the checkpoint's
    ) -> list[Completion]:
        """One answer per prompt, in their order, of 1 … `max_new_tokens` tokens each.

        Raises ValueError for an empty prompt, a token outside the vocabulary, a text longer than the model takes, or
        logits that are not finite; `CannotProve` for states that are not.
        """
        if len(seeds) != len(prompts):
            raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts, expected one each")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, expected at least 1")
        for prompt in prompts:
            self._check_text(prompt, len(prompt) + max_new_tokens)
        if not prompts:
            return []
        ends = frozenset(self.model.config.eos_ids) if eos_ids is None else eos_ids
        return _Generation(self, prompts, sampling, seeds, max_new_tokens, ends).run()

    def prefill(self, cache: KVCache, texts: Sequence[Sequence[int]]) -> torch.Tensor:
        """Read `texts` into the empty rows of `cache`; the normed states of their last tokens, [B, D]."""
        lengths = [len(text) for text in texts]
        width = max(1, self.pass_tokens_max // len(texts))
        found: list[torch.Tensor | None] = [None] * len(texts)
        for start in range(0, max(lengths), width):
            tokens_BT, counts = self._padded([text[start : start + width] for text in texts])
            hidden_BTD = self.model(tokens_BT, cache, new_lengths=counts)
            for row, length in enumerate(lengths):
                if start < length <= start + width:
                    found[row] = hidden_BTD[row, length - 1 - start]
        return torch.stack([state for state in found if state is not None])

    # ------------------------------------------------------------------------------------------------------- replay
    @torch.inference_mode()
    def replay(self, prompts: Sequence[Sequence[int]], answers: Sequence[Tokens]) -> list[Replay]:
        """What this model computes on each answer after its prompt, in their order.

        Texts of like length are read together, at most `pass_tokens_max` tokens a pass. Raises ValueError as `generate`
        does; an empty answer gives no rows.
        """
        if len(prompts) != len(answers):
            raise ValueError(f"{len(answers)} answers for {len(prompts)} prompts, expected one each")
        texts: list[list[int]] = []
        for prompt, answer in zip(prompts, answers, strict=True):
            whole = [*map(int, prompt), *map(int, answer)]
            self._check_text(prompt, len(whole))
            self._check_text(whole, len(whole))
            texts.append(whole[:-1])  # what follows the last token does not matter
        wanted = [index for index, answer in enumerate(answers) if len(answer)]
        hidden: dict[int, torch.Tensor] = {}
        for group in self._groups(wanted, texts):
            for index, hidden_TD in zip(group, self._read([texts[index] for index in group]), strict=True):
                hidden[index] = hidden_TD[len(prompts[index]) - 1 :]
        nothing = torch.zeros(0, self.model.config.hidden, dtype=self.model.dtype, device=self.model.device)
        return [self._replayed(hidden.get(index, nothing), answers[index]) for index in range(len(answers))]

    def _replayed(self, hidden_nD: torch.Tensor, answer: Tokens) -> Replay:
        with (
            torch.inference_mode(False),
            torch.no_grad(),
        ):  # ordinary tensors: the caller may do with them what it likes
            hidden = hidden_nD.clone()
            tokens = torch.tensor([int(token) for token in answer], dtype=torch.int64, device=hidden.device)
            return Replay(states=hidden.to(torch.bfloat16), hidden=hidden, tokens=tokens, model=self.model)

    def _groups(self, wanted: Sequence[int], texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Indices of texts to read in one pass: neighbours in length, within the bound on tokens."""
        groups: list[list[int]] = []
        for index in sorted(wanted, key=lambda index: (len(texts[index]), index), reverse=True):
            longest = len(texts[groups[-1][0]]) if groups else 0
            if not groups or (len(groups[-1]) + 1) * longest > self.pass_tokens_max:
                groups.append([])
            groups[-1].append(index)
        return groups

    def _read(self, texts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
        """Normed hidden states of every token of each text, [length, D]."""
        tokens_BT, lengths = self._padded(texts)
        T = tokens_BT.shape[1]
        if self.pass_tokens_max >= T:
            hidden_BTD = self.model(tokens_BT)
        else:  # one text longer than a pass: piece by piece through a cache
            cache = self.model.new_cache(batch=len(texts), capacity=T)
            pieces = tokens_BT.split(self.pass_tokens_max, dim=1)
            hidden_BTD = torch.cat([self.model(piece, cache) for piece in pieces], dim=1)
        return [hidden_BTD[row, :length] for row, length in enumerate(lengths)]

    # ------------------------------------------------------------------------------------------------------- shared
    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[int]]:
        """Token ids [B, T], padded with 0 on the right, and how many of each row count."""
        lengths = [len(text) for text in texts]
        tokens = np.zeros((len(texts), max(lengths)), dtype=np.int64)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = text
        return torch.from_numpy(tokens).to(self.model.device), lengths

    def _check_text(self, text: Sequence[int], length: int) -> None:
        config = self.model.config
        if not len(text):
            raise ValueError("a prompt is empty, expected at least one token")
        if length > config.positions_max:
            raise ValueError(f"a text has {length} tokens, expected at most {config.positions_max} ({self.name})")
        low, high = min(text), max(text)
        if low < 0 or high >= config.vocabulary:
            wrong = low if low < 0 else high
            raise ValueError(f"token {wrong} in a text, expected 0 … {config.vocabulary - 1} ({self.name})")


class _Generation:
    """One call of `generate`: the rows at work, and what of theirs lies in tensors, row by row."""

    def __init__(
        self,
        engine: TorchEngine,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: int,
        ends: frozenset[int],
    ) -> None:
        model = engine.model
        self.engine, self.prompts, self.sampling, self.seeds = engine, prompts, sampling, seeds
        self.max_new_tokens, self.ends = max_new_tokens, ends
        self.waiting = deque(range(len(prompts)))
        self.batch = min(engine.batch_max, len(prompts))
        self.cache = model.new_cache(
            batch=self.batch, capacity=max(map(len, prompts)) + max_new_tokens - 1, store=engine.store
        )
        self.rows: list[_Row] = []
        self.free_slots = list(range(self.batch))
        self.chunk = engine.proof.chunk_tokens if engine.proof else CHUNK_TOKENS
        self.states_BCD = torch.empty(
            self.batch, self.chunk, model.config.hidden, dtype=torch.bfloat16, device=model.device
        )
        self.finished: dict[int, Completion] = {}

    def run(self) -> list[Completion]:
        while self.waiting or self.rows:
            if self.waiting and len(self.rows) < self.batch:
                self._admit()
            else:
                self._decode()
        return [self.finished[index] for index in range(len(self.prompts))]

    def _admit(self) -> None:
        """Prefill waiting prompts into the free rows; each gets its first token."""
        start = len(self.rows)
        taken = [self.waiting.popleft() for _ in range(min(self.batch - start, len(self.waiting)))]
        view = self.cache.rows(start, start + len(taken))
        view.lengths[:] = 0
        normed_BD = self.engine.prefill(view, [self.prompts[index] for index in taken])
        self.rows += [_Row(index, self.free_slots.pop()) for index in taken]
        self._arrange()
        self._draw(normed_BD, start)

    def _decode(self) -> None:
        """One more token for every row."""
        hidden_B1D = self.engine.model(self.last_B[:, None], self.cache.rows(0, len(self.rows)))
        self._draw(hidden_B1D[:, 0], 0)

    def _draw(self, normed_BD: torch.Tensor, start: int) -> None:
        """Draw a token for each row from `start` on, and keep what it was drawn from."""
        logits_BV = self.engine.model.logits(normed_BD)
        counts_B = self.counts_B[start:]
        tokens_B, logprobs_B = sample(logits_BV, self.seeds_B[start:], counts_B, self.sampling)
        if self.engine.proof or self.engine.keep_states:
            self.states_BCD[self.slots_B[start:], counts_B % self.chunk] = normed_BD.to(torch.bfloat16)
        self.last_B[start:] = tokens_B
        counts_B += 1
        for row, token, logprob in zip(self.rows[start:], tokens_B.tolist(), logprobs_B.tolist(), strict=True):
            row.tokens.append(token)
            row.logprobs.append(logprob)
        self._commit(self.rows[start:])
        self._retire(start)

    def _commit(self, rows: Sequence[_Row]) -> None:
        """Prove the chunks that have just become full, all in one go."""
        full = [row for row in rows if len(row.tokens) % self.chunk == 0]
        if not full:
            return
        states_BCD = self.states_BCD[[row.slot for row in full]]
        if self.engine.keep_states:
            for row, states_CD in zip(full, states_BCD, strict=True):
                row.states.append(states_CD)
        self._prove(full, states_BCD)

    def _prove(self, rows: Sequence[_Row], states_BCD: torch.Tensor) -> None:
        """One more proof for each row, of its states there."""
        settings = self.engine.proof
        if settings is None:
            return
        proofs = build_proofs(
            states_BCD.flatten(0, 1), chunk_tokens=states_BCD.shape[1], top_k=settings.top_k, mode=settings.mode
        )
        for row, proof in zip(rows, proofs, strict=True):
            row.proofs.append(proof.encode())

    def _commit_rest(self, rows: Sequence[_Row]) -> None:
        """Prove the last chunks of rows that have ended, those of equal length in one go."""
        by_rest: dict[int, list[_Row]] = {}
        for row in rows:
            if rest := len(row.tokens) % self.chunk:
                by_rest.setdefault(rest, []).append(row)
        for rest, alike in by_rest.items():
            tails_BCD = self.states_BCD[[row.slot for row in alike], :rest]
            if self.engine.keep_states:
                for row, tail_CD in zip(alike, tails_BCD, strict=True):
                    row.states.append(tail_CD)
            self._prove(alike, tails_BCD)

    def _retire(self, start: int) -> None:
        """Rows that have ended leave; the last row moves into the gap."""
        ended = [
            place
            for place in range(start, len(self.rows))
            if len(self.rows[place].tokens) == self.max_new_tokens or self.rows[place].tokens[-1] in self.ends
        ]
        self._commit_rest([self.rows[place] for place in ended])
        for place in reversed(ended):
            row = self.rows[place]
            last = self.rows.pop()
            if last is not row:
                self.rows[place] = last
                self.cache.move(len(self.rows), place)
            self._finish(row)
        if ended:
            self._arrange()

    def _finish(self, row: _Row) -> None:
        states = None
        if self.engine.keep_states:
            with torch.inference_mode(False):
                states = torch.cat(row.states).clone()
        self.free_slots.append(row.slot)
        self.finished[row.index] = Completion(
            tokens=np.array(row.tokens, dtype=np.int32),
            logprobs=np.array(row.logprobs, dtype=np.float32),
            proofs=tuple(row.proofs),
            finished="eos" if row.tokens[-1] in self.ends else "length",
            states=states,
        )

    def _arrange(self) -> None:
        """Write down again, row by row, what lies in tensors: after rows came or went."""
        device = self.engine.model.device

        def column(values: list[int]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self.last_B = column([row.tokens[-1] if row.tokens else 0 for row in self.rows])
        self.counts_B = column([len(row.tokens) for row in self.rows])  # tokens of the answer before the next
        self.seeds_B = column([_as_int64(self.seeds[row.index]) for row in self.rows])
        self.slots_B = column([row.slot for row in self.rows])


def _as_int64(seed: int) -> int:
    """The signed number with the same 64 bits."""
    return (int(seed) + 2**63) % 2**64 - 2**63
