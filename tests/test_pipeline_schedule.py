"""Schedules as pure machines: no dead-lock on any small grid, every request answered once and right, the bound met."""

import heapq
import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.pipeline.schedule import Drift, HeadSchedule, Pass, PassRow, Request, StageOrder, StageRows, TooLong
from refimpl.pipeline.timing import cycle_s, plan_schedule
from refimpl.pipeline.watch import Progress, find_blockage


def true_answer(request):
    """What the model of these tests says: each token is a function of all tokens before it, and of the seed."""
    tokens, answer = list(request.prompt), []
    while len(answer) < request.max_new_tokens:
        answer.append(draw(tokens, request.seed, len(answer)))
        tokens.append(answer[-1])
        if answer[-1] in request.stop_tokens:
            break
    return tuple(answer)


def draw(tokens, seed, position):
    return (sum((i + 1) * t for i, t in enumerate(tokens)) * 31 + seed * 7 + position) % 97


class Ring:
    """A discrete-time executor: stages that compute one pass at a time, links with latency that may reorder."""

    def __init__(self, schedule, stages, micro_batches, tau=3, hop=2, shuffle=None, duplicates=False, posted=None):
        self.schedule, self.stages, self.tau, self.hop = schedule, stages, tau, hop
        self.shuffle, self.duplicates = shuffle, duplicates
        self.now, self.ids, self.events = 0, itertools.count(), []
        window = posted or schedule.window
        self.orders = [StageOrder(window) for _ in range(stages)]
        self.rows = [
            StageRows(micro_batches=micro_batches, rows=schedule.rows, capacity_tokens=schedule.capacity_tokens)
            for _ in range(stages)
        ]
        self.queues = [[] for _ in range(stages)]
        self.busy = [False] * stages
        self.caches = [{} for _ in range(stages)]  # stage -> request -> tokens
        self.finished, self.returns, self.passes = [], [], []

    def later(self, delay, what, *args):
        heapq.heappush(self.events, (self.now + delay, next(self.ids), what, args))

    def kick(self):
        if not self.busy[0] and (made := self.schedule.next_pass()) is not None:
            self.passes.append(made)
            self.work(0, made)

    def work(self, stage, made):
        """Obey the header, feed the cache, and take tau."""
        if made.epoch != self.rows[stage].epoch:
            self.caches[stage] = {}
        drawing = self.rows[stage].obey(made)
        cache = self.caches[stage]
        for request in made.ended:
            del cache[request]
        for row in made.rows:
            if row.past == 0:
                cache[row.request] = []
            assert len(cache[row.request]) == row.past, "the cache has what the header says"
            cache[row.request] = cache[row.request] + list(row.tokens)
        drawn = [draw(cache[r.request], r.seed, r.answered) for r in drawing]
        self.busy[stage] = True
        self.later(self.tau if made.rows else 0, self.done, stage, made, drawn, made.epoch)

    def done(self, stage, made, drawn, epoch):
        self.busy[stage] = False
        if epoch == self.rows[stage].epoch:
            for _ in range(2 if self.duplicates else 1):
                hop = self.hop if self.shuffle is None else self.shuffle.randint(0, 4 * self.hop)
                if stage == self.stages - 1:
                    self.later(hop if self.stages > 1 else 0, self.back, made, drawn)
                else:
                    self.later(hop, self.arrive, stage + 1, made)
        self.pull(stage)

    def arrive(self, stage, made):
        self.queues[stage].extend(self.orders[stage].arrive(made.epoch, made.number, made))
        self.pull(stage)

    def pull(self, stage):
        if stage == 0:
            self.kick()
        elif not self.busy[stage] and self.queues[stage]:
            self.work(stage, self.queues[stage].pop(0))

    def back(self, made, drawn):
        self.finished.extend(self.schedule.returned(made.epoch, made.number, drawn))
        self.returns.append((self.now, made))
        self.kick()

    def run(self, until=10**9, kill_at=None):
        self.kick()
        while self.events:
            self.now, _, what, args = heapq.heappop(self.events)
            what(*args)
            if kill_at is not None and len(self.passes) >= kill_at:
                kill_at = None
                self.schedule.restart()  # what is on its way goes on, and must not count
                self.kick()
            if self.now > until:
                break


def requests_of(lengths, stop=frozenset()):
    return [
        Request(id=100 + i, prompt=tuple(range(1, 1 + prompt)), max_new_tokens=new, seed=i, stop_tokens=stop)
        for i, (prompt, new) in enumerate(lengths)
    ]


def check_all_answered(ring, requests):
    assert ring.schedule.idle, "nothing may be left waiting: a dead-lock"
    assert sorted(f.request for f in ring.finished) == sorted(r.id for r in requests), "each once, none twice"
    assert {f.request: f.answer for f in ring.finished} == {r.id: true_answer(r) for r in requests}
    for stage in range(ring.stages if ring.schedule.epoch == 0 else 0):
        assert not ring.caches[stage], "every stage was told to forget every request"
        assert all(not held for held in ring.rows[stage]._held)


LENGTHS = [(1, 1), (1, 3), (2, 2), (5, 1), (3, 4)]


@pytest.mark.parametrize("stages", [1, 2, 3, 4, 5])
def test_no_deadlock_on_exhaustive_small_grids(stages):
    """Stages x micro-batches x rows x every multiset of ragged lengths up to 4 requests, chunks of 2: all end, with
    right answers, each once; 1875 rings per number of stages."""
    rings = 0
    for micro_batches, rows in itertools.product((1, 2, 3, 4, 5), (1, 2, 3)):
        for count in range(5):
            for lengths in itertools.combinations_with_replacement(LENGTHS, count):
                schedule = HeadSchedule(
                    micro_batches=micro_batches, rows=rows, capacity_tokens=8, chunk_tokens=2, ahead=2
                )
                requests = requests_of(lengths)
                for request in requests:
                    assert schedule.submit(request)
                ring = Ring(schedule, stages, micro_batches)
                ring.run()
                check_all_answered(ring, requests)
                rings += 1
    assert rings == 15 * 126


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=12),
    st.integers(0, 10**6),
    st.booleans(),
    st.integers(0, 60),
)
def test_reordered_repeated_and_restarted_rings_answer_the_same(stages, batches, rows, lengths, seed, repeat, kill):
    """Links that reorder, messages that come twice, a new epoch in the middle: the same answers, each once."""
    schedule = HeadSchedule(micro_batches=batches, rows=rows, capacity_tokens=17, chunk_tokens=3)
    requests = requests_of(lengths, stop=frozenset(range(0, 97, 11)))
    for request in requests:
        schedule.submit(request)
    ring = Ring(schedule, stages, batches, shuffle=random.Random(seed), duplicates=repeat)
    ring.run(kill_at=kill or None)
    check_all_answered(ring, requests)
    assert all(f.reason == ("stop" if f.answer[-1] % 11 == 0 else "length") for f in ring.finished)


def test_too_few_posted_receives_are_noticed():
    """The machine that checks the above can fail: with one receive posted where several passes fly, it does."""
    schedule = HeadSchedule(micro_batches=4, rows=1, capacity_tokens=9)
    for request in requests_of([(1, 5)] * 4):
        schedule.submit(request)
    with pytest.raises(Drift, match="more than 1 ahead"):
        Ring(schedule, 3, 4, shuffle=random.Random(1), posted=1).run()


@pytest.mark.parametrize("hop", [0, 1, 5, 40])
@pytest.mark.parametrize("stages", [1, 2, 3, 5])
def test_the_cycle_meets_the_bound(stages, hop):
    """C = max(M tau, N (tau + lambda)), to the tick, for M from 1 past the corner; never less."""
    for micro_batches in (1, 2, 3, 4, 5, 8, 13):
        schedule = HeadSchedule(micro_batches=micro_batches, rows=2, capacity_tokens=400)
        for request in requests_of([(1, 300)] * (2 * micro_batches)):
            schedule.submit(request)
        ring = Ring(schedule, stages, micro_batches, tau=7, hop=hop)
        ring.run(until=17_000)
        came = [now for now, made in ring.returns if made.micro_batch == 0][20:60]
        assert len(came) == 40
        bound = cycle_s([7] * stages, [hop] * stages, micro_batches)
        assert (came[-1] - came[0]) / 39 == bound, {b - a for a, b in itertools.pairwise(came)}


def test_a_freed_row_is_refilled_while_others_go_on():
    """Continuous refill when a sequence ends: the batch never empties while requests wait."""
    schedule = HeadSchedule(micro_batches=2, rows=2, capacity_tokens=50)
    lengths = [(2, 3), (2, 20), (2, 4), (2, 20), (2, 5), (2, 5), (2, 5)]
    requests = requests_of(lengths)
    for request in requests:
        schedule.submit(request)
    ring = Ring(schedule, 3, 2)
    ring.run()
    check_all_answered(ring, requests)
    live = {0: set(), 1: set()}
    shared = 0
    for made in ring.passes:
        live[made.micro_batch] -= set(made.ended)
        live[made.micro_batch] |= {row.request for row in made.rows}
        decode = all(len(row.tokens) == 1 and row.past for row in made.rows)
        shared += decode and len(made.rows) == 2
        if decode and made.rows:
            assert {row.request for row in made.rows} == live[made.micro_batch], "no live row is left out"
    assert shared >= 15 and max(len(m.moves) for m in ring.passes) >= 1


def test_chunks_follow_each_other_and_stop_at_the_limit():
    """A long prompt goes in chunks of `chunk_tokens`; up to `ahead` of them fly at once, the last one draws."""
    schedule = HeadSchedule(micro_batches=1, rows=1, capacity_tokens=40, chunk_tokens=5, ahead=3)
    schedule.submit(Request(id=1, prompt=tuple(range(17)), max_new_tokens=2))
    passes = [schedule.next_pass() for _ in range(4)]
    assert passes[3] is None and [len(p.rows[0].tokens) for p in passes[:3]] == [5, 5, 5]
    assert [p.rows[0].draws for p in passes[:3]] == [False] * 3
    schedule.returned(0, 0, [])
    last = schedule.next_pass()
    assert last.rows[0].tokens == (15, 16) and last.rows[0].draws and schedule.next_pass() is None


def test_a_restart_may_cut_answers_back_to_whole_chunks():
    """Where a chunk that is not complete is not to be trusted, its tokens are drawn again, and come out the same."""
    for chunk, kept in ((1, 3), (4, 3), (8, 3), (7, 2), (9, 0)):
        schedule = HeadSchedule(micro_batches=1, rows=1, capacity_tokens=30)
        request = Request(id=1, prompt=(4, 5, 6, 7, 8, 9), max_new_tokens=9, seed=3)
        schedule.submit(request)
        answer = true_answer(request)
        for token in answer[:3]:
            schedule.returned(0, schedule.next_pass().number, [token])
        assert schedule.restart(keep_chunk=chunk) == 1 and schedule.answers() == {1: answer[:kept]}
        ring = Ring(schedule, 2, 1)
        ring.run()
        assert [f.answer for f in ring.finished] == [answer]


def test_finish_is_idempotent():
    """A pass that comes round twice completes its request once."""
    schedule = HeadSchedule(micro_batches=1, rows=1, capacity_tokens=8)
    schedule.submit(Request(id=7, prompt=(1, 2), max_new_tokens=1))
    made = schedule.next_pass()
    assert [f.request for f in schedule.returned(0, made.number, [5])] == [7]
    assert schedule.returned(0, made.number, [5]) == [] and schedule.returned(0, made.number, [6]) == []
    assert not schedule.submit(Request(id=7, prompt=(1, 2), max_new_tokens=1))
    with pytest.raises(Drift, match="never sent"):
        schedule.returned(0, 99, [1])
    release = schedule.next_pass()
    assert release.ended == (7,) and not release.rows


def test_a_request_beyond_the_cache_is_refused_before_work():
    """Prompt = capacity + 1 is refused with the numbers; the largest that fits is taken."""
    schedule = HeadSchedule(micro_batches=1, rows=1, capacity_tokens=8)
    with pytest.raises(TooLong, match="needs room for 9 tokens .* a row has 8"):
        schedule.submit(Request(id=1, prompt=tuple(range(9)), max_new_tokens=1))
    assert schedule.idle and schedule.submit(Request(id=2, prompt=tuple(range(8)), max_new_tokens=1))


def held(rows):
    return [(row.request, row.tokens) for row in rows.held(0)]


def row(request, past, tokens):
    return PassRow(request, past, len(tokens), True, 0, 0, tokens)


@pytest.mark.parametrize(
    ("made", "says"),
    [
        (Pass(0, 1, 0, 0, (row(5, 3, (1,)),)), "with 3 tokens cached, this stage holds"),
        (Pass(0, 1, 0, 1, (row(4, 2, (1,)),)), "the header says request 4"),
        (Pass(0, 1, 0, 0, (row(5, 2, (1,) * 9),)), "11 tokens, room for 8"),
        (Pass(0, 1, 0, 5, (row(9, 0, (1,)),)), "begins at row 5"),
        (Pass(0, 1, 0, 0, (), ended=(8,)), "ends request 8, which holds no row"),
        (Pass(0, 1, 0, 0, (), ended=(5,)), "moves no row into its place"),
        (Pass(0, 1, 0, 0, (), ended=(5,), moves=((0, 1),)), "which cannot be"),
        (Pass(0, 1, 3, 0, (row(5, 2, (1,)),)), "micro-batch 3"),
    ],
)
def test_a_stage_refuses_a_header_that_does_not_fit(made, says):
    """Stages do not drift apart unnoticed: the cache length is asserted at each step, and nothing is half done."""
    rows = StageRows(micro_batches=2, rows=3, capacity_tokens=8)
    rows.obey(Pass(0, 0, 0, 0, (row(5, 0, (1, 2)), row(6, 0, (1,)))))
    before = rows.held(0)
    with pytest.raises(Drift, match=says):
        rows.obey(made)
    assert rows.held(0) == before and held(rows) == [(5, 2), (6, 1)]
    rows.obey(Pass(0, 1, 0, 1, (row(4, 0, (1,)),), ended=(5,), moves=((1, 0),)))
    assert held(rows) == [(6, 1), (4, 1)]


# ------------------------------------------------------------------------------------------------ the bound, the plan
def test_memory_bound_decode_gains_nothing_from_micro_batches():
    """tau(m) = tau_0: at lambda = 0, M = 1 and M = N both give B / (N tau_0); no M exceeds B / (N (tau_0 + lambda)),
    M tau_0 > N (tau_0 + lambda) loses; the planner stays synchronous."""
    stages, tau_0, batch = 4, 0.01, 32
    for hop_s in (0.0, 0.05):
        ceiling = batch / (stages * (tau_0 + hop_s))
        speeds = {m: batch / cycle_s([tau_0] * stages, [hop_s] * stages, m) for m in (1, 2, 4, 8, 16, 32)}
        assert speeds[1] == pytest.approx(ceiling) and speeds[4] == pytest.approx(ceiling)
        assert all(speed <= ceiling * (1 + 1e-12) for speed in speeds.values())
        assert (speeds[8] == pytest.approx(ceiling / 2)) if hop_s == 0 else (speeds[8] == pytest.approx(ceiling))
        assert speeds[32] < ceiling * 0.99 or hop_s > 0
        table = dict.fromkeys((1, 2, 4, 8, 16, 32), tau_0)
        plan = plan_schedule([table] * stages, [hop_s] * stages, batch)
        assert (plan.micro_batches, plan.rows) == (1, 32) and plan.gain == pytest.approx(1.0)
        assert plan.tokens_per_s == pytest.approx(ceiling)


def test_compute_bound_work_gains_as_many_times_as_there_are_stages():
    """tau(m) = a m, lambda = 0: M = N gives B / (a B), N times the synchronous schedule; the planner takes it."""
    stages, a, batch = 4, 0.002, 32
    table = {m: a * m for m in (1, 2, 4, 8, 16, 32)}
    assert cycle_s([table[32]] * stages, [0.0] * stages, 1) == pytest.approx(stages * a * batch)
    assert cycle_s([table[8]] * stages, [0.0] * stages, 4) == pytest.approx(a * batch)
    plan = plan_schedule([table] * stages, [0.0] * stages, batch)
    assert (plan.micro_batches, plan.gain) == (4, pytest.approx(stages))


def test_the_planner_is_the_best_of_all_choices():
    """Against every (M, m) over random tables, uneven stages and hops."""
    dice = random.Random(4)
    for _ in range(300):
        stages = dice.randint(1, 5)
        tables = [{m: dice.uniform(0.5, 1) * (1 + dice.random() * m) for m in (1, 2, 3, 5, 8)} for _ in range(stages)]
        hops_s = [dice.choice((0.0, dice.uniform(0, 20))) for _ in range(stages)]
        batch_max = dice.randint(1, 40)
        plan = plan_schedule(tables, hops_s, batch_max)
        assert plan.batch <= batch_max
        best = max(
            micro_batches * m / cycle_s([table[m] for table in tables], hops_s, micro_batches)
            for m in tables[0]
            for micro_batches in range(1, batch_max // m + 1)
        )
        assert plan.tokens_per_s == pytest.approx(best)


def test_bad_plans_are_refused():
    with pytest.raises(ValueError, match="within batch_max 3"):
        plan_schedule([{4: 1.0}], [0.0], 3)
    with pytest.raises(ValueError, match="as many hops as stages"):
        cycle_s([1.0], [], 1)
    with pytest.raises(ValueError, match="micro_batches is 0"):
        HeadSchedule(micro_batches=0, rows=1, capacity_tokens=4)


# --------------------------------------------------------------------------------------------------- who waits for whom
@pytest.mark.parametrize(
    ("counts", "stage", "to", "says"),
    [
        ([(5, 5, 5), (5, 5, 5), (5, 5, 5)], None, None, None),
        ([(5, 5, 5), (3, 3, 3), (3, 3, 3)], "a", "b", "link 'a' -> 'b': pass 3 left 'a' and did not arrive"),
        ([(5, 5, 3), (3, 3, 3), (3, 3, 3)], "a", "b", "'a' waits for 'b' to take pass 3"),
        ([(5, 5, 5), (5, 2, 2), (2, 2, 2)], "b", None, "stage 'b' has pass 2 and does not finish it"),
        ([(5, 5, 5), (5, 5, 5), (5, 5, 4)], "c", "a", "link 'c' -> 'a'"),
        ([(5, 5, 5), None, (2, 2, 2)], "b", None, "does not answer"),
        ([(4, 4, 4), (4, 4, 4), (4, 4, 4)], "c", "a", "link 'c' -> 'a'"),
    ],
)
def test_a_hung_run_says_which_link_waits_for_whom(counts, stage, to, says):
    reports = [None if c is None else Progress(n, 1, *c) for n, c in zip("abc", counts, strict=True)]
    found = find_blockage(5, reports, ["a", "b", "c"], epoch=1)
    assert (found is None) if says is None else ((found.stage, found.to) == (stage, to) and says in found.sentence)
    late = [Progress(n, 0, 5, 5, 5) for n in "abc"]
    assert "epoch 0, the ring in epoch 1" in find_blockage(5, late, ["a", "b", "c"], epoch=1).sentence
