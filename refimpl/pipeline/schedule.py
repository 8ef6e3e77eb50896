"""Who computes what next: the head's schedule and the stages' obedience, as pure state machines.

Only the head schedules. It deals its requests into M micro-batches of up to `rows` sequences each and decides, whenever
the first stage is free, which *pass* goes round the ring next: some prompt tokens of new sequences (a prefill chunk),
or one token of every live sequence of a micro-batch. M = 1 is the synchronous schedule (one batch circulates), M > 1
the micro-batched one. A sequence that ends makes room at once: the last row moves into its place and a waiting request
is prefilled behind it (continuous refill).

Passes are numbered from 0 in each epoch, and every link carries all of them in that order. So a stage needs no
decisions: it computes pass n after pass n - 1 (`StageOrder`), does to its cache what the header says, and refuses a
header that does not fit the cache it has (`StageRows`). Receives are posted ahead: passes that arrive early, or twice,
are kept or dropped here, never refused for their order.

After a stage is replaced the head begins a new epoch (`restart`): every live sequence is prefilled again, prompt and
answer so far, and goes on from its next token. Whatever still arrives from the old epoch is ignored.

Differs from prime-pipeline 67af3d0: 1) requests of unequal length, ends and refills; there all sequences of a run have
one length; 2) stages hold no schedule; 3) prompts go in chunks, and several chunks may follow each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


class TooLong(ValueError):
    """A request that the caches cannot hold, refused before any work. Takes exactly one argument: the sentence."""


class Drift(ValueError):
    """A header that does not fit what this stage holds. Takes exactly one argument: the sentence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to be continued."""

    id: int
    prompt: tuple[int, ...]
    max_new_tokens: int
    seed: int = 0
    stop_tokens: frozenset[int] = frozenset()
    answer: tuple[int, ...] = ()  # what an earlier run of this request has made already

    def end(self, answer: Sequence[int]) -> str:
        """Why this answer is complete: "stop" (its last token is a stop token) or "length"; empty if it is not."""
        if answer and answer[-1] in self.stop_tokens:
            return "stop"
        return "length" if len(answer) >= self.max_new_tokens else ""


@dataclass(frozen=True, slots=True)
class PassRow:
    """One sequence's part in a pass: `new` tokens follow the `past` tokens that its caches hold."""

    request: int
    past: int
    new: int
    draws: bool  # these are the last known tokens: the last stage draws the next one
    answered: int  # tokens of the answer before the one drawn; with the seed, said where a row starts (`past` is 0)
    seed: int
    tokens: tuple[int, ...] = ()  # the first stage's input; later stages take activations


@dataclass(frozen=True, slots=True)
class Pass:
    """One trip round the ring, for one micro-batch: what every stage is to do, in this order.

    1. forget the rows of `ended` requests; 2. for each (source, target) of `moves` row `target` becomes row `source`;
    3. run `rows`, which lie in cache rows `first_row` onwards.
    """

    epoch: int
    number: int
    micro_batch: int
    first_row: int
    rows: tuple[PassRow, ...]
    ended: tuple[int, ...] = ()
    moves: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """A request is complete: given out exactly once."""

    request: int
    answer: tuple[int, ...]
    reason: str  # "stop" (a stop token was drawn; it is part of the answer) or "length"


@dataclass(slots=True)
class _Row:
    request: Request
    answer: list[int]
    fed: int = 0  # tokens in the stages' caches once all passes given out are done
    fill_to: int = 0  # known tokens when it was admitted: these are prefilled

    @property
    def known(self) -> int:
        return len(self.request.prompt) + len(self.answer)

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        prompt = len(self.request.prompt)
        return self.request.prompt[start:end] + tuple(self.answer[max(0, start - prompt) : max(0, end - prompt)])


@dataclass(slots=True)
class _MicroBatch:
    rows: list[_Row] = field(default_factory=list)
    in_flight: int = 0
    ended: list[int] = field(default_factory=list)  # finished; the stages have not been told
    filling: bool = False  # prompt tokens are left to be fed


class HeadSchedule:
    """The one place that decides. `submit` and `returned` bring events in, `next_pass` takes decisions out.

    `capacity_tokens`: cache room of one row. `chunk_tokens`: prompt tokens of one row per pass. `ahead`: prefill passes
    of one micro-batch that may be on their way at once.
    """

    def __init__(
        self, *, micro_batches: int, rows: int, capacity_tokens: int, chunk_tokens: int = 512, ahead: int = 4
    ) -> None:
        for name, value in (("micro_batches", micro_batches), ("rows", rows), ("chunk_tokens", chunk_tokens)):
            if value < 1:
                raise ValueError(f"{name} is {value}, expected at least 1")
        if ahead < 1 or capacity_tokens < 2:
            raise ValueError(f"ahead is {ahead} and capacity_tokens {capacity_tokens}, expected at least 1 and 2")
        self.rows, self.capacity_tokens, self.chunk_tokens, self.ahead = rows, capacity_tokens, chunk_tokens, ahead
        self.epoch, self.number = 0, 0  # of the next pass
        self.in_flight: dict[int, Pass] = {}  # in the order of their numbers
        self._batches = [_MicroBatch() for _ in range(micro_batches)]
        self._turns = deque(range(micro_batches))  # whose turn it is, first to last
        self._waiting: deque[_Row] = deque()
        self._seen: set[int] = set()

    @property
    def window(self) -> int:
        """How many passes may be on their way at once: receives to be posted ahead."""
        return len(self._batches) * self.ahead

    @property
    def idle(self) -> bool:
        """Nothing is waiting, live or on its way."""
        return not self._waiting and not self.in_flight and not any(b.rows or b.ended for b in self._batches)

    def check(self, request: Request) -> None:
        """Raises `TooLong` for a request that no cache row holds, ValueError for one that asks for nothing."""
        if not request.prompt or request.max_new_tokens <= len(request.answer):
            raise ValueError(
                f"request {request.id} has {len(request.prompt)} prompt tokens, {len(request.answer)} answered and "
                f"max_new_tokens {request.max_new_tokens}: expected a prompt, and something left to answer"
            )
        needs = len(request.prompt) + request.max_new_tokens - 1  # the last token drawn is never fed
        if needs > self.capacity_tokens:
            raise TooLong(
                f"request {request.id} needs room for {needs} tokens ({len(request.prompt)} of its prompt and "
                f"{request.max_new_tokens} new ones, the last of which is not cached), a row has {self.capacity_tokens}"
            )

    def submit(self, request: Request) -> bool:
        """Queue a request. False: it was submitted before (said twice, done once). Raises as `check` does."""
        self.check(request)
        if request.id in self._seen:
            return False
        self._seen.add(request.id)
        self._waiting.append(_Row(request, list(request.answer)))
        return True

    def next_pass(self) -> Pass | None:
        """The next pass, now that the first stage is free; None: nothing can go until something returns."""
        for _ in range(len(self._turns)):
            index = self._turns[0]
            self._turns.rotate(-1)
            made = self._turn(index)
            if made is not None:
                self.number += 1
                self.in_flight[made.number] = made
                self._batches[index].in_flight += 1
                return made
        return None

    def _turn(self, index: int) -> Pass | None:
        batch = self._batches[index]
        moves, ended = tuple[tuple[int, int], ...](), tuple[int, ...]()
        if batch.in_flight == 0:
            moves, ended = self._close_up(batch), tuple(batch.ended)
            self._admit(batch)
        first, rows = 0, tuple[PassRow, ...]()
        if batch.filling and batch.in_flight < self.ahead:
            first, rows = self._chunk(batch)
        elif not batch.filling and batch.in_flight == 0:
            rows = tuple(self._feed(row, 1) for row in batch.rows)
        if not rows and not ended:
            return None
        if ended:
            batch.ended.clear()
        return Pass(self.epoch, self.number, index, first, rows, ended, moves)

    @staticmethod
    def _close_up(batch: _MicroBatch) -> tuple[tuple[int, int], ...]:
        """Drop the rows of ended requests; the last row that lives takes the place of each."""
        moves = []
        for at in range(len(batch.rows)):
            while batch.rows and batch.rows[-1].request.id in batch.ended:
                batch.rows.pop()
            if at < len(batch.rows) and batch.rows[at].request.id in batch.ended:
                batch.rows[at] = batch.rows.pop()
                moves.append((len(batch.rows), at))
        return tuple(moves)

    def _admit(self, batch: _MicroBatch) -> None:
        """Fill free rows from the queue, longest first: each prefill pass then covers a run of rows from the left."""
        free = min(self.rows - len(batch.rows), len(self._waiting))
        if free and not batch.filling:
            new = sorted((self._waiting.popleft() for _ in range(free)), key=lambda row: -row.known)
            for row in new:
                row.fill_to = row.known
            batch.rows.extend(new)
            batch.filling = True

    def _chunk(self, batch: _MicroBatch) -> tuple[int, tuple[PassRow, ...]]:
        """The next chunk of every row that is still being prefilled: neighbours, for the longest came first."""
        first = next(at for at, row in enumerate(batch.rows) if row.fed < row.fill_to)
        rows = [row for row in batch.rows if row.fed < row.fill_to]
        assert rows == batch.rows[first : first + len(rows)]
        made = tuple(self._feed(row, min(self.chunk_tokens, row.fill_to - row.fed)) for row in rows)
        batch.filling = any(row.fed < row.fill_to for row in rows)
        return first, made

    def _feed(self, row: _Row, count: int) -> PassRow:
        past = row.fed
        row.fed += count
        draws = row.fed == row.known
        tokens = row.tokens(past, row.fed)
        return PassRow(row.request.id, past, count, draws, len(row.answer), row.request.seed, tokens)

    def returned(self, epoch: int, number: int, tokens: Sequence[int]) -> list[Finished]:
        """A pass came round: `tokens` are those drawn, one for each row that draws, in their order.

        An old epoch's pass, or one that came round before, changes nothing.
        """
        if epoch != self.epoch or number not in self.in_flight:
            if epoch > self.epoch or (epoch == self.epoch and number >= self.number):
                raise Drift(f"pass {number} of epoch {epoch} came round, but was never sent")
            return []
        made = self.in_flight[number]
        drawing = [row.request for row in made.rows if row.draws]
        if len(tokens) != len(drawing):
            raise Drift(f"pass {number} brings {len(tokens)} tokens, expected {len(drawing)}")
        del self.in_flight[number]
        batch = self._batches[made.micro_batch]
        batch.in_flight -= 1
        rows = {row.request.id: row for row in batch.rows}
        finished = []
        for request_id, token in zip(drawing, tokens, strict=True):
            row = rows[request_id]
            row.answer.append(int(token))
            if reason := row.request.end(row.answer):
                batch.ended.append(request_id)
                finished.append(Finished(request_id, tuple(row.answer), reason))
        return finished

    def answers(self) -> dict[int, tuple[int, ...]]:
        """What every unfinished request has so far: to be written down, so that a head that dies loses nothing."""
        rows = [row for batch in self._batches for row in batch.rows if row.request.id not in batch.ended]
        return {row.request.id: tuple(row.answer) for row in (*rows, *self._waiting)}

    def restart(self, *, keep_chunk: int = 1, epoch: int | None = None) -> int:
        """A new epoch (the next, or the one given): passes on their way are lost, caches empty; live sequences go to
        the front of the queue.

        `keep_chunk`: answers are cut back to whole chunks of so many tokens of the sequence, where a chunk that is not
        complete is not to be trusted.
        """
        self.epoch = self.epoch + 1 if epoch is None else epoch
        self.number = 0
        self.in_flight.clear()
        for batch in reversed(self._batches):
            live = [row for row in batch.rows if row.request.id not in batch.ended]
            for row in reversed(live):
                whole = (row.known - 1) // keep_chunk * keep_chunk  # of the tokens that were fed and came round
                keep = max(0, whole + 1 - len(row.request.prompt))  # each state gives the token after it
                self._waiting.appendleft(_Row(row.request, row.answer[:keep]))
            batch.rows, batch.ended, batch.in_flight, batch.filling = [], [], 0, False
        return self.epoch


class StageOrder(Generic[T]):
    """One link's receiving end: whatever order passes arrive in, they come out once each and in order."""

    def __init__(self, window: int, epoch: int = 0) -> None:
        if window < 1:
            raise ValueError(f"window is {window}, expected at least 1")
        self.window, self.epoch, self.expected = window, epoch, 0
        self._early: dict[int, T] = {}

    def arrive(self, epoch: int, number: int, item: T) -> list[T]:
        """The passes that may be computed now. A repeated or outdated one gives none. Raises `Drift` for a number that
        no honest sender can have reached; a newer epoch starts afresh."""
        if epoch < self.epoch:
            return []
        if epoch > self.epoch:
            self.epoch, self.expected = epoch, 0
            self._early.clear()
        if number >= self.expected + self.window:
            raise Drift(f"pass {number} arrived while {self.expected} is expected: more than {self.window} ahead")
        if number < self.expected or number in self._early:
            return []
        self._early[number] = item
        ready = []
        while self.expected in self._early:
            ready.append(self._early.pop(self.expected))
            self.expected += 1
        return ready


@dataclass(frozen=True, slots=True)
class HeldRow:
    """One row of a stage's caches."""

    request: int
    tokens: int
    seed: int
    answered: int  # tokens drawn for it so far, by this ring or an earlier one


class StageRows:
    """What a stage's caches hold, by micro-batch and row: headers are done to it, and must fit it."""

    def __init__(self, *, micro_batches: int, rows: int, capacity_tokens: int) -> None:
        self.rows, self.capacity_tokens = rows, capacity_tokens
        self.epoch = 0
        self._held: list[list[HeldRow]] = [[] for _ in range(micro_batches)]

    def held(self, micro_batch: int) -> list[HeldRow]:
        """The rows of a micro-batch."""
        return list(self._held[micro_batch])

    def obey(self, made: Pass) -> list[HeldRow]:
        """Apply a header; returns the rows that draw, as they were before. Raises `Drift`, and changes nothing, when
        the header does not fit what this stage holds."""
        if made.epoch != self.epoch:
            self._held = [[] for _ in self._held]
            self.epoch = made.epoch
        if not 0 <= made.micro_batch < len(self._held):
            raise Drift(f"pass {made.number} is for micro-batch {made.micro_batch}, expected below {len(self._held)}")
        held = self._closed_up(made)
        if made.rows and not 0 <= made.first_row <= len(held):
            raise Drift(f"pass {made.number} begins at row {made.first_row}, rows 0..{len(held) - 1} are held")
        drawing = []
        for at, row in enumerate(made.rows, start=made.first_row):
            if at == len(held) < self.rows and row.past == 0:
                held.append(HeldRow(row.request, 0, row.seed, row.answered))
            here = held[at] if at < len(held) else None
            if here is None or (here.request, here.tokens) != (row.request, row.past):
                raise Drift(
                    f"pass {made.number}, row {at}: the header says request {row.request} with {row.past} tokens "
                    f"cached, this stage holds {here}"
                )
            total = row.past + row.new
            if row.new < 1 or total > self.capacity_tokens:
                raise Drift(f"pass {made.number}, row {at}: {total} tokens, room for {self.capacity_tokens}")
            if row.draws:
                drawing.append(here)
            held[at] = HeldRow(row.request, total, here.seed, here.answered + row.draws)
        self._held[made.micro_batch] = held
        return drawing

    def _closed_up(self, made: Pass) -> list[HeldRow]:
        """The rows after the ended ones have gone and the moves are done."""
        held = list(self._held[made.micro_batch])
        gone = set(made.ended) - {row.request for row in held}
        if gone:
            raise Drift(f"pass {made.number} ends request {min(gone)}, which holds no row here")

        def trim() -> None:  # rows at the end go without a move
            while held and held[-1].request in made.ended:
                held.pop()

        trim()
        for source, target in made.moves:
            if source != len(held) - 1 or not 0 <= target < source or held[target].request not in made.ended:
                raise Drift(f"pass {made.number} moves row {source} to {target} of {len(held)}, which cannot be")
            held[target] = held.pop()
            trim()
        left = [row.request for row in held if row.request in made.ended]
        if left:
            raise Drift(f"pass {made.number} ends request {left[0]}, but moves no row into its place")
        return held
