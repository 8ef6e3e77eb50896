"""No innocent stage is ever blamed: every attack, at every position, in rings of 2 to 5 stages.

Signatures and proofs are real, the model a toy chain of causal layers; the verifier's arithmetic differs from the
stages' (honest noise)."""

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from refimpl.identity import Identity, verify
from refimpl.pipeline.blame import Complaint, Leaf, Receipt, SignedDigest, root_of, settle, settle_equivocation
from refimpl.pipeline.hops import BadHop, Chunks, HopReceiver, HopSender
from refimpl.pipeline.judge import (
    LinkTrouble,
    disowned,
    first_deviating_stage,
    judge_group,
    shown_commitments,
    trial,
)
from refimpl.toploc.check import PRESETS, verify_proofs
from refimpl.toploc.proof import build_proofs

HIDDEN, CHUNK, TOP_K, PROMPT, TOKENS = 48, 8, 24, 10, 21
WIDTH = 2 * HIDDEN  # bytes per token
KEYS = [Identity.from_seed(5, f"stage{i}") for i in range(5)]
REQUEST, RING = 7, "ring"


def to_bytes(states_TD):
    return states_TD.to(torch.bfloat16).contiguous().view(torch.int16).numpy().tobytes()


def from_bytes(data):
    return torch.frombuffer(bytearray(data), dtype=torch.bfloat16).view(-1, HIDDEN)


def commit(data):
    """TOPLOC proof of one chunk's bytes."""
    (proof,) = build_proofs(from_bytes(data), chunk_tokens=CHUNK, top_k=TOP_K)
    return proof.encode()


def layer(states_TD, weights, dtype):
    """A causal residual block: what a token gives depends on all tokens before it."""
    x = states_TD.to(dtype)
    seen = torch.cumsum(x, 0) / torch.arange(1, len(x) + 1, dtype=dtype)[:, None]
    return x + 2 * torch.tanh((x + seen) @ weights.to(dtype))


def honest(stage, last, states_TD, dtype=torch.float32):
    """Stage `stage`'s two layers; the last stage commits to the normed state."""
    generator = torch.Generator().manual_seed(100 + stage)
    for _ in range(2):
        states_TD = layer(states_TD, torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.35, dtype)
    if last:
        states_TD = states_TD / states_TD.float().pow(2).mean(-1, keepdim=True).sqrt().to(states_TD.dtype)
    return states_TD.to(torch.bfloat16)


def embedded(seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(31, HIDDEN, generator=torch.Generator().manual_seed(1)) * torch.linspace(0.3, 3, HIDDEN)
    return table[torch.randint(0, 31, (TOKENS,), generator=generator)].to(torch.bfloat16)


def skipped(stage, last, x, dtype):
    generator = torch.Generator().manual_seed(100 + stage)
    out = layer(x, torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.35, dtype)
    return (out / out.float().pow(2).mean(-1, keepdim=True).sqrt() if last else out).to(torch.bfloat16)


def stale(stage, last, x, dtype):
    return honest(stage + 50, last, x, dtype)  # another version of the weights


def four_bit(stage, last, x, dtype):
    y = honest(stage, last, x, dtype).float()
    noise = torch.randn(y.shape, generator=torch.Generator().manual_seed(stage))
    return (y * (1 + 0.25 * noise)).to(torch.bfloat16)


def old_reply(stage, last, x, dtype):
    y = honest(stage, last, x, dtype).clone()
    y[CHUNK:] = y[: len(y) - CHUNK].clone()  # answers with what it said a chunk ago
    return y


def twisted(y):
    """Large values changed: the commitment changes with them."""
    return (-y.float() * 1.7).to(torch.bfloat16)


def below_top_k(y):
    """All numbers outside the top K of each chunk replaced: the commitment does not change."""
    out = y.clone()
    for at in range(0, len(out), CHUNK):
        flat = out[at : at + CHUNK].reshape(-1)
        order = flat.float().abs().argsort(descending=True, stable=True)
        small = order[TOP_K:]
        flat[small] = (flat[small].float().abs() * 0.98).to(torch.bfloat16)  # signs lost, still below the top
        out[at : at + CHUNK] = flat.view(-1, HIDDEN)
    return out


class Member:
    """One stage of the toy ring, and every way in which it may cheat."""

    def __init__(
        self, stage, stages, dtype, compute=honest, send=None, commit_to=None, state=None, hears=True, receipts=True
    ):
        self.stage, self.last, self.dtype, self.key = stage, stage == stages - 1, dtype, KEYS[stage]
        self.compute, self.send, self.commit_to = compute, send, commit_to
        self.hears, self.receipts = hears, receipts
        self.inputs = torch.empty(0, HIDDEN, dtype=torch.bfloat16)
        self.outputs, self.stated, self.chunks = [], {}, Chunks(commit, WIDTH, CHUNK)
        self.sender, self.receiver = None, None

    def outputs_for(self, states):
        """(what it sends, what it commits to) for the new tokens, after everything before."""
        first = len(self.inputs)
        self.inputs = torch.cat([self.inputs, states])
        y = self.compute(self.stage, self.last, self.inputs, self.dtype)
        sent, said = (y if f is None else f(y) for f in (self.send, self.commit_to))
        return to_bytes(sent[first:]), to_bytes(said[first:])


class Run:
    """The ring over one sequence: prompt, then token by token, then the end; and the verifier's judgement."""

    def __init__(self, stages, seed=0, dtypes=(torch.float32, torch.bfloat16), **cheats):
        self.stages = stages
        self.members = [
            Member(s, stages, dtypes[(s + seed) % len(dtypes)], **cheats.get(f"stage{s}", {})) for s in range(stages)
        ]
        self.states, self.verdicts, self.links = embedded(seed), [], []
        for a, b in zip(self.members, self.members[1:], strict=False):
            link = {"ring": RING, "epoch": 0, "sender": a.key.public_key, "receiver": b.key.public_key}
            a.sender = HopSender(**link, sign=a.key.sign, bytes_per_token=WIDTH)
            b.receiver = HopReceiver(
                **link, sign=b.key.sign, verify=verify, commit=commit, bytes_per_token=WIDTH, chunk_tokens=CHUNK
            )

    def run(self):
        spans = [(0, PROMPT)] + [(t, t + 1) for t in range(PROMPT, TOKENS)] + [(TOKENS, TOKENS)]
        for number, (first, end) in enumerate(spans):
            states = self.states[first:end]
            for member in self.members:
                states = self.step(member, number, first, states, ended=first == end)
                if states is None:
                    return self
        for a, b in zip(self.members, self.members[1:], strict=False):
            if len(a.sender.unconfirmed()) > 2:
                self.links.append(LinkTrouble(a.stage, b.stage, "no receipts"))
        return self

    def step(self, member, number, first, states, ended):
        sent, said = member.outputs_for(states)
        made = member.chunks.close(REQUEST) if ended else member.chunks.feed(REQUEST, said)
        member.stated |= {(c.request, c.chunk): c for c in made}
        if member.last:
            return states
        rows = [] if ended else [(REQUEST, first, sent)]
        signed = member.sender.seal(number, rows, made)
        after = self.members[member.stage + 1]
        try:
            answer = after.receiver.take(signed, rows, [REQUEST] if ended else [])
        except BadHop as error:
            self.links.append(LinkTrouble(member.stage, after.stage, str(error)))
            return None
        if isinstance(answer, Complaint):
            if after.hears:
                self.verdicts.append(self.settle(answer, member))
                return None
            answer = Receipt(number, after.key.sign(Receipt.content(signed.digest)))  # it looks away
        if after.receipts:
            assert member.sender.confirm(answer, verify)
        return from_bytes(sent) if sent else self.states[:0]

    def settle(self, complaint, accused):
        return settle(
            complaint,
            ring=RING,
            sender=accused.key.public_key,
            verify=verify,
            commit=commit,
            bytes_per_token=WIDTH,
            chunk_tokens=CHUNK,
        )

    def deviates(self):
        """Boundary by boundary: the stated commitments against one replay in other arithmetic."""
        states, rows = self.states, []
        for member in self.members:
            states = honest(member.stage, member.last, states, torch.float64)
            proofs = [member.stated[key].commitment for key in sorted(member.stated)]
            verdicts = [
                verify_proofs(states[at : at + CHUNK], [p], thresholds=THRESHOLDS, chunk_tokens=CHUNK, top_k=TOP_K)
                for at, p in zip(range(0, TOKENS, CHUNK), proofs, strict=True)
            ]
            rows.append([not verdict.accepted for verdict in verdicts])
        return rows

    def follows(self, stage):
        """Run the stage's layers on exactly what its predecessor signed; compare with all bytes that it signed."""
        member = self.members[stage]
        fed = self.states
        if stage:
            fed = from_bytes(b"".join(exhibit.data for exhibit in member.receiver.defence(REQUEST)))
        true = honest(stage, member.last, fed, torch.float64)
        if member.last:
            proofs = [member.stated[key].commitment for key in sorted(member.stated)]
            return verify_proofs(true, proofs, thresholds=THRESHOLDS, chunk_tokens=CHUNK, top_k=TOP_K).accepted
        receiver = self.members[stage + 1].receiver
        sent = from_bytes(b"".join(exhibit.data for exhibit in receiver.defence(REQUEST)))
        return bool((sent.float() - true.float()).norm() < 0.05 * true.float().norm())

    def judge(self, with_trial=True):
        complete = not self.verdicts and not self.links
        disowning = []
        for a, b in zip(self.members, self.members[1:], strict=False):
            shown = shown_commitments(b.receiver.digests(), ring=RING, epoch=0, sender=a.key.public_key, verify=verify)
            if disowned(a.stated, shown) is not None:
                disowning.append(a.stage)
        return judge_group(
            self.stages,
            deviates=self.deviates() if complete else None,
            members=[member.key.public_key for member in self.members],
            settled=self.verdicts,
            disowning=disowning,
            links=self.links,
            follows=self.follows if with_trial else None,
        )


THRESHOLDS = PRESETS["paper"]
PLACES = [(stages, guilty) for stages in (2, 3, 4, 5) for guilty in range(stages)]
SENDING = [(stages, guilty) for stages, guilty in PLACES if guilty < stages - 1]


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_honest_rings_of_mixed_dtypes_are_paid(stages):
    """Honest noise is not guilt: float32 beside bfloat16, verified in float64; every output follows from its input."""
    for seed in range(8):
        run = Run(stages, seed=seed).run()
        result = run.judge()
        assert result.accepted and result.paid == tuple(range(stages)) and not result.blamed and not result.links
        assert first_deviating_stage(run.deviates()) is None and trial(stages - 1, run.follows) is None


COMPUTED = {"skipped layers": skipped, "stale weights": stale, "4-bit": four_bit, "old reply": old_reply}


@pytest.mark.parametrize("attack", COMPUTED)
@pytest.mark.parametrize(("stages", "guilty"), PLACES)
def test_wrong_computation_is_blamed_on_the_stage_that_did_it(stages, guilty, attack):
    """The first stage whose commitment deviates is named, the output rejected, the others paid."""
    for seed in range(3):
        result = Run(stages, seed=seed, **{f"stage{guilty}": {"compute": COMPUTED[attack]}}).run().judge()
        assert not result.accepted and result.blamed == (guilty,), result.reason
        assert result.paid == tuple(s for s in range(stages) if s != guilty)


@pytest.mark.parametrize("attack", ["send", "commit_to"])
@pytest.mark.parametrize(("stages", "guilty"), SENDING)
def test_what_is_sent_must_be_what_is_committed_to(stages, guilty, attack):
    """Tampered send with honest commitment, honest send with tampered commitment: the receiver sees it without noise,
    complains before the chunk is used, and the complaint convicts the sender by its own signature."""
    for seed in range(3):
        run = Run(stages, seed=seed, **{f"stage{guilty}": {attack: twisted}}).run()
        assert [v.on for v in run.verdicts] == ["sender"]
        assert len(run.members[guilty + 1].inputs) < CHUNK + 2, "before the chunk is used"
        result = run.judge()
        assert result.blamed == (guilty,) and not result.accepted and guilty + 1 in result.paid


@pytest.mark.parametrize(("stages", "guilty"), SENDING)
def test_tampering_below_the_top_k_is_not_blamed_on_the_successor(stages, guilty):
    """The commitment does not bind small values. By commitments alone the innocent successor deviates first; with its
    signed input in hand it is acquitted, and the blame reaches the stage that tampered."""
    misled = 0
    for seed in range(3):
        run = Run(stages, seed=seed, **{f"stage{guilty}": {"send": below_top_k}}).run()
        assert not run.verdicts, "same top K, same commitment: the receiver cannot see it"
        assert run.judge(with_trial=False).blamed != (guilty,)
        misled += run.judge(with_trial=False).blamed == (guilty + 1,)
        result = run.judge()
        assert result.blamed in ((), (guilty,)) and (result.accepted or result.blamed == (guilty,))
    assert misled, "the hole is there where only commitments are compared"


@pytest.mark.parametrize(("stages", "guilty"), SENDING)
def test_tampering_in_the_prefill_alone_is_seen(stages, guilty):
    """Chunks count from the first prompt token: a poisoned prompt does not pass as the successor's deviation."""

    def prompt_only(y):
        out = y.clone()
        out[:PROMPT] = twisted(out[:PROMPT])
        return out

    cheat = {"send": prompt_only, "commit_to": prompt_only}
    result = Run(stages, **{f"stage{guilty}": cheat}).run().judge()
    assert result.blamed == (guilty,)


@pytest.mark.parametrize(("stages", "guilty"), SENDING)
def test_a_withheld_receipt_is_trouble_on_the_link_and_nobody_s_fault(stages, guilty):
    """Sent or not received? A soft verdict on the link, never a slash."""
    run = Run(stages, **{f"stage{guilty + 1}": {"receipts": False}}).run()
    result = run.judge()
    assert result.links == (LinkTrouble(guilty, guilty + 1, "no receipts"),)
    assert not result.blamed and not result.decided


@pytest.mark.parametrize(("stages", "first"), SENDING)
@pytest.mark.parametrize("says", ["twisted", "honest"])
def test_two_colluding_neighbours_cannot_shift_the_blame_to_a_third(stages, first, says):
    """The pair can hide what passes between them (no complaint), not what leaves them: one of the pair is blamed, or
    nothing wrong came out."""
    pair = (first, first + 1)
    for seed in range(3):
        cheats = {
            f"stage{first}": {"send": twisted, "commit_to": twisted if says == "twisted" else None},
            f"stage{first + 1}": {"hears": False},
        }
        result = Run(stages, seed=seed, **cheats).run().judge()
        assert not result.accepted and len(result.blamed) == 1 and result.blamed[0] in pair
        assert all(s in result.paid for s in range(stages) if s not in pair)


def test_a_pair_that_forwards_a_tampered_tensor_with_honest_words_is_caught_by_the_third():
    """Both neighbours commit honestly and pass on wrong tensors: the honest third complains about the second."""
    true = {}

    def said(y):
        return true["y"]

    def compute(stage, last, x, dtype):
        states = embedded(0)[: len(x)]
        for s in range(stage + 1):
            states = honest(s, False, states, torch.float32)
        true["y"] = states
        return honest(stage, last, x, dtype)

    cheats = {
        "stage1": {"send": twisted},
        "stage2": {"hears": False, "compute": compute, "commit_to": said},
    }
    run = Run(4, **cheats).run()
    assert run.judge().blamed == (2,) and run.verdicts[0].culprit == KEYS[2].public_key


# ------------------------------------------------------------------------------------------ complaints, true and forged
def honest_link():
    """Messages of an honest sender to stage 1, and what an accuser could make of them."""
    run = Run(2)
    run.run()
    return run, run.members[1].receiver.defence(REQUEST), run.members[1].receiver.digests()


def signed_complaint(exhibits, statement, request=REQUEST, chunk=0, who=1):
    made = Complaint(KEYS[who].public_key, request, chunk, tuple(exhibits), statement)
    return replace(made, signature=KEYS[who].sign(made.content()))


def test_forged_complaints_fall_back_on_the_complainer():
    """Made-up bytes, right bytes, another chunk's bytes, missing bytes, a stranger's message: all settle on the one who
    signed the complaint; one that is not signed settles on nobody."""
    run, exhibits, digests = honest_link()
    first = [e for e in exhibits if e.leaves[e.row].first_token < CHUNK]
    second = [e for e in exhibits if 2 * CHUNK > e.leaves[e.row].first_token + e.leaves[e.row].tokens > CHUNK]
    invented = b"\0" * len(first[0].data)
    lied = Leaf(REQUEST, 0, PROMPT, hashlib.sha256(invented).digest())
    other = run.members[1].key
    foreign = SignedDigest(digests[0].digest, other.sign(digests[0].digest.content()))
    stolen = SignedDigest(replace(digests[0].digest, receiver=KEYS[2].public_key), digests[0].signature)
    forgeries = {
        "is that of the bytes": signed_complaint(first, digests[0]),
        "not those that the sender signed": signed_complaint([replace(first[0], data=invented)], digests[0]),
        "leaves of message 0": signed_complaint([replace(first[0], leaves=(lied,), data=invented)], digests[0]),
        "no evidence": signed_complaint([], digests[0]),
        "begin at token 10": signed_complaint(second[1:], digests[-1], chunk=1),
        "no part in the chunk": signed_complaint(first, digests[0], chunk=3),
        "no commitment to it was due": signed_complaint(exhibits[:2], digests[0], chunk=1),
        "is missing": signed_complaint([exhibits[0], *exhibits[2:7]], digests[6], chunk=1),
        "brings 3 tokens of a chunk that has 5": signed_complaint(
            [e for e in exhibits if 16 <= e.leaves[e.row].first_token < 19], digests[-1], chunk=2
        ),
        "does not have the sender's signature": signed_complaint([replace(first[0], signed=foreign)], foreign),
        "not from the predecessor": signed_complaint([replace(first[0], signed=stolen)], digests[0]),
        "repeated or out of order": signed_complaint([first[0], first[0]], digests[0]),
        "another request": signed_complaint(first, digests[0], request=8),
    }
    for why, complaint in forgeries.items():
        verdict = run.settle(complaint, run.members[0])
        assert (verdict.on, verdict.culprit) == ("complainer", other.public_key), why
        assert why == "another request" or why in verdict.reason, verdict.reason
    unsigned = replace(forgeries["is that of the bytes"], signature=b"x" * 64)
    assert run.settle(unsigned, run.members[0]).on == "none"
    in_anothers_name = signed_complaint(first, digests[0], who=2)
    in_anothers_name = replace(in_anothers_name, complainer=KEYS[1].public_key)
    assert run.settle(in_anothers_name, run.members[0]).on == "none"


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_no_complaint_of_any_shape_convicts_an_honest_sender(data):
    """Fuzzed: any choice, order and mutation of what an honest sender signed, over two epochs, for any chunk."""
    run, exhibits, digests = HONEST
    later, late_digests = LATER
    pool, statements = exhibits + later, digests + late_digests
    chosen = data.draw(st.lists(st.sampled_from(pool), max_size=8))
    if data.draw(st.booleans()):
        chosen = sorted(set(chosen), key=lambda e: e.signed.digest.number)
    if data.draw(st.booleans()):
        start = data.draw(st.integers(0, len(exhibits) - 1))
        chosen = exhibits[start : start + data.draw(st.integers(1, 12))]
    if chosen and data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(chosen) - 1))
        twist = data.draw(st.sampled_from(["data", "row", "leaf", "signed"]))
        e = chosen[at]
        chosen = list(chosen)
        chosen[at] = {
            "data": replace(e, data=e.data[::-1]),
            "row": replace(e, row=data.draw(st.integers(-1, 2))),
            "leaf": replace(e, leaves=(*e.leaves, e.leaves[0])),
            "signed": replace(e, signed=data.draw(st.sampled_from(statements))),
        }[twist]
    complaint = signed_complaint(chosen, data.draw(st.sampled_from(statements)), chunk=data.draw(st.integers(-1, 4)))
    assert run.settle(complaint, run.members[0]).on == "complainer"


def epoch_one(run):
    """The same sequence after a restart, in other arithmetic: other bytes, other commitments, the same sender."""
    link = {"ring": RING, "epoch": 1, "sender": KEYS[0].public_key, "receiver": KEYS[1].public_key}
    sender = HopSender(**link, sign=KEYS[0].sign, bytes_per_token=WIDTH)
    receiver = HopReceiver(
        **link, sign=KEYS[1].sign, verify=verify, commit=commit, bytes_per_token=WIDTH, chunk_tokens=CHUNK
    )
    chunks = Chunks(commit, WIDTH, CHUNK)
    y = to_bytes(honest(0, False, run.states, torch.bfloat16))
    for number, (first, end) in enumerate([(0, 5), (5, 13), (13, TOKENS)]):
        rows = [(REQUEST, first, y[first * WIDTH : end * WIDTH])]
        signed = sender.seal(number, rows, chunks.feed(REQUEST, rows[0][2]))
        assert isinstance(receiver.take(signed, rows), Receipt)
    assert isinstance(receiver.take(sender.seal(3, [], chunks.close(REQUEST)), [], [REQUEST]), Receipt)
    return receiver.defence(REQUEST), receiver.digests()


HONEST = honest_link()
LATER = epoch_one(HONEST[0])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_every_complaint_of_an_honest_receiver_convicts_the_sender(data):
    """Fuzzed from the other side: whatever a sender signs (other bytes, commitments dropped, doubled, cut short, of
    other chunks), an honest receiver refuses it softly, or confirms it, or complains and is right."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    run = Run(2)
    sender, receiver = run.members[0].sender, run.members[1].receiver
    chunks, at = Chunks(commit, WIDTH, CHUNK), 0
    for number in range(6):
        ends = number == 5 or rng.random() < 0.1
        tokens = 0 if ends else int(rng.integers(1, 2 * CHUNK))
        payload = to_bytes(torch.from_numpy(rng.normal(size=(tokens, HIDDEN))))
        made = chunks.close(REQUEST) if ends else chunks.feed(REQUEST, payload)
        twist = data.draw(st.sampled_from(["none", "drop", "double", "short", "other", "bytes", "nan", "early"]))
        if twist == "drop":
            made = made[:-1]
        elif twist == "double":
            made = [*made, *made]
        elif twist == "short":
            made = [replace(c, tokens=c.tokens - 1) for c in made]
        elif twist == "other":
            made = [replace(c, commitment=c.commitment[::-1]) for c in made]
        elif twist == "nan":
            payload = b"\xc0\x7f" * (len(payload) // 2)
        elif twist == "bytes":
            payload = payload[::-1]
        elif twist == "early":
            made = [replace(c, chunk=c.chunk + 1) for c in made]
        rows = [] if ends else [(REQUEST, at, payload)]
        at += tokens
        try:
            answer = receiver.take(sender.seal(number, rows, made), rows, [REQUEST] if ends else [])
        except BadHop:
            return
        if isinstance(answer, Complaint):
            verdict = run.settle(answer, run.members[0])
            assert (verdict.on, verdict.culprit) == ("sender", KEYS[0].public_key), (twist, verdict)
            return
        if ends:
            return


def test_messages_that_do_not_count_as_sent_change_nothing():
    """Unsigned, altered, repeated (an old reply), mis-addressed or mis-placed messages are refused, softly; the right
    one is taken afterwards."""
    run = Run(2)
    sender, receiver = run.members[0].sender, run.members[1].receiver
    data = to_bytes(honest(0, False, run.states[:3]))
    rows = [(REQUEST, 0, data)]
    right = sender.seal(0, rows, [])
    wrong = {
        "not those that its sender signed": (right, [(REQUEST, 0, data[::-1])]),
        "goes on at token 1": (right, [(REQUEST, 1, data)]),
        "signature": (replace(right, signature=b"\0" * 64), rows),
        "expected a multiple": (right, [(REQUEST, 0, data[:-1])]),
        "not one of this link's": (replace(right, digest=replace(right.digest, epoch=3)), rows),
        "names a request twice": (right, rows * 2),
    }
    for why, (signed, what) in wrong.items():
        with pytest.raises(BadHop, match=why):
            receiver.take(signed, what)
    receipt = receiver.take(right, rows)
    assert isinstance(receipt, Receipt) and sender.unconfirmed() == [0]
    assert not sender.confirm(replace(receipt, signature=b"\0" * 64), verify) and sender.confirm(receipt, verify)
    with pytest.raises(BadHop, match="message 0 came where 1 is expected"):
        receiver.take(right, rows)
    receiver.forget(REQUEST)
    assert receiver.defence(REQUEST) == []


def test_equivocation_convicts_and_repetition_does_not():
    """Two signed digests of one message that differ; the same one twice is a resend. The sender itself refuses to sign
    a second one."""
    run = Run(2)
    key, sender = KEYS[0], run.members[0].sender
    data = to_bytes(honest(0, False, run.states[:2]))
    a = sender.seal(0, [(REQUEST, 0, data)], [])
    assert sender.seal(0, [(REQUEST, 0, data)], []) == a
    with pytest.raises(ValueError, match="would convict us"):
        sender.seal(0, [(REQUEST, 0, data[::-1])], [])
    other = replace(a.digest, root=root_of([]))
    b = SignedDigest(other, key.sign(other.content()))
    assert settle_equivocation(a, b, verify).culprit == key.public_key
    assert settle_equivocation(a, a, verify).on == "none"
    later = replace(other, epoch=1)
    assert settle_equivocation(a, SignedDigest(later, key.sign(later.content())), verify).on == "none"
    assert settle_equivocation(a, replace(b, signature=a.signature), verify).on == "none"


def test_a_stage_that_tells_the_verifier_something_else_is_blamed():
    """Its successor holds what it signed on the link; both words are its own."""
    run = Run(3).run()
    key = (REQUEST, 1)
    lie = run.members[0].stated[(REQUEST, 0)].commitment
    run.members[0].stated[key] = replace(run.members[0].stated[key], commitment=lie)
    result = run.judge()
    assert result.blamed == (0,) and result.paid == (1, 2)


# -------------------------------------------------------------------------------------------------- the group's verdict
def test_a_right_final_answer_clears_the_group_without_replay():
    """The policy: rows before the last are not looked at when the last agrees."""
    result = judge_group(3, deviates=[[True], [True], [False]], members=["a", "b", "c"])
    assert result.accepted and result.paid == (0, 1, 2) and not result.blamed


def test_no_verdict_is_no_blame():
    """Crashed or unknown is no verdict; noise with a clean trial blames nobody."""
    crashed = judge_group(2, deviates=None, members=["a", "b"])
    assert not crashed.decided and not crashed.blamed and not crashed.paid
    noise = judge_group(2, deviates=[[False], [True]], members=["a", "b"], follows=lambda stage: True)
    assert noise.decided and not noise.accepted and not noise.blamed and noise.paid == (0, 1)


@pytest.mark.parametrize(
    ("deviates", "stage"),
    [
        ([[False, False], [False, False]], None),
        ([[False, True], [True, True]], 0),
        ([[False, False], [True, False]], 1),
        ([[False], [False], [True]], 2),
        ([[], []], None),
    ],
)
def test_first_deviating_stage(deviates, stage):
    assert first_deviating_stage(deviates) == stage


def test_trial_stops_at_the_first_that_cannot_be_explained():
    assert trial(3, lambda stage: stage != 1) == 1
    assert trial(3, lambda stage: False) == 3
    assert trial(3, lambda stage: True) is None
