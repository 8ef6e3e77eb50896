"""Order of versions, leases, retention, and who lags."""

from __future__ import annotations

import hashlib

import pytest

from refimpl.shardcast.document import ManifestError
from refimpl.shardcast.layout import Layout
from refimpl.shardcast.manifest import Equivocation, Header, Manifest, Ref, Stretch
from refimpl.shardcast.versions import Holders, Leases, LeaseTerms, Standing, VersionIndex

ORIGIN = "ab" * 32


def full(version: int, content: bytes | None = None, *, run_id: str = "run", previous: Ref | None = None) -> Manifest:
    content = f"weights {version}".encode() if content is None else content
    layout = Layout(names=("model",), sizes_bytes=(len(content),))
    header = Header(run_id=run_id, version=version, layout=layout, origin=ORIGIN, previous=previous)
    digest = hashlib.sha256(content).digest()
    return Manifest(header=header, shards_sha256=(digest,), signature=bytes(64))


def increment(base: Manifest, target: Manifest, content: bytes = b"delta") -> Manifest:
    layout = Layout(names=("delta",), sizes_bytes=(len(content),))
    header = Header(
        run_id="run", version=target.version, layout=layout, origin=ORIGIN, base=base.ref,
        target=Ref(target.version, target.header.id), stretch=Stretch(0, 1),
    )  # fmt: skip
    digest = hashlib.sha256(content).digest()
    return Manifest(header=header, shards_sha256=(digest,), signature=bytes(64))


def index(*versions: int) -> VersionIndex:
    made = VersionIndex("run", ORIGIN)
    for version in versions:
        made.add(full(version))
    return made


def test_a_version_number_is_never_reused() -> None:
    """H06: numbers restarted at v1 when the folder was empty, and relays kept the old bytes."""
    known = index(1, 2)
    assert not known.add(full(2))  # the same again is no news
    with pytest.raises(Equivocation, match="version 2 has content") as caught:
        known.add(full(2, b"other weights"))
    assert caught.value.first == full(2).encode()
    known.remove(full(2))
    assert known.next_version() == 3
    with pytest.raises(Equivocation):  # even after its bytes are gone
        known.add(full(2, b"other weights"))


def test_a_version_of_another_run_is_refused() -> None:
    """S07: a fresh run in a used folder ate the old run's files."""
    with pytest.raises(ManifestError, match="belongs to run 'old'"):
        index(1).add(full(2, run_id="old"))


def test_an_older_index_hides_nothing() -> None:
    """H04: an upstream hiccup made every client below go blind. A stale relay can add nothing and take nothing."""
    known = index(1, 2, 3)
    for stale in (full(1), full(2)):
        assert not known.add(stale)
    newest = known.newest()
    assert newest is not None and newest.version == 3


def test_a_chain_that_contradicts_what_is_known_is_refused() -> None:
    with pytest.raises(Equivocation, match="version 1"):
        index(1).add(full(2, previous=full(1, b"another past").ref))
    assert index(1).add(full(2, previous=full(1).ref))


def test_increments_must_join_known_versions() -> None:
    known = index(1, 2)
    assert known.add(increment(full(1), full(2)))
    assert not known.add(increment(full(1), full(2)))
    with pytest.raises(Equivocation, match="two increments"):
        known.add(increment(full(1), full(2), b"another"))
    with pytest.raises(Equivocation, match="version 1"):
        known.add(increment(full(1, b"unlike"), full(2)))
    assert known.increments() == [(1, 2, 0)]


def test_a_removed_version_is_gone_not_unknown() -> None:
    """H11: a client half through an old version is told to take the newest."""
    known = index(4, 5)
    known.remove(full(4))
    assert [known.standing(v) for v in (3, 4, 5, 6)] == [
        Standing.GONE,
        Standing.GONE,
        Standing.HERE,
        Standing.UNKNOWN,
    ]


def test_five_versions_are_kept_and_leased_ones_too() -> None:
    """F-20: the package keeps 5. S09: a reader that is slower than five updates keeps what it reads."""
    known = index(*range(1, 9))
    known.add(increment(full(1), full(2)))
    known.add(increment(full(7), full(8)))
    assert [m.label[:9] for m in known.removable(leased=())] == [
        "v00000001",
        "v00000002",
        "v00000003",
        "v00000002",  # the increment to version 2
    ]
    assert [m.version for m in known.removable(leased={2})] == [1, 3]
    with pytest.raises(ValueError, match="newest version must stay"):
        known.removable(leased=(), keep=0)


def test_a_lease_ends_when_it_is_not_renewed() -> None:
    leases = Leases(LeaseTerms(duration_s=10.0, lifetime_s_max=25.0))
    assert leases.grant(3, "alice", 0.0)
    assert leases.leased(9.9) == {3}
    assert leases.leased(10.0) == set()


def test_new_holders_are_bounded_and_forgotten() -> None:
    """And however many hold leases, few versions stay beyond the newest."""
    leases = Leases(LeaseTerms(duration_s=10.0, holders_max=3, versions_beyond_max=2))
    assert [leases.grant(number, f"10.0.0.{number}", 0.0) for number in range(5)] == [True, True, True, False, False]
    assert leases.staying(range(8), 2, 5.0) == {1, 2, 6, 7}
    assert leases.grant(5, "10.0.0.5", 15.0) and leases.holders == 1  # without anybody asking what is leased
    assert leases.staying(range(8), 2, 15.0) == {5, 6, 7}


def test_a_client_cannot_pin_versions_for_ever() -> None:
    leases = Leases(LeaseTerms(duration_s=10.0, lifetime_s_max=25.0, versions_per_holder_max=2))
    assert [leases.grant(3, "mallory", t) for t in (0.0, 9.0, 18.0)] == [True, True, True]
    assert leases.leased(24.9) == {3} and leases.leased(25.0) == set()  # not 28: the lifetime ends first
    assert not leases.grant(3, "mallory", 26.0)  # and is not to be had anew at once
    assert leases.grant(4, "mallory", 26.0) and not leases.grant(5, "mallory", 26.0)  # two at a time
    assert leases.grant(3, "bob", 26.0)
    leases.release(3, "bob")
    assert leases.leased(26.0) == {4}


def test_announcements_go_to_those_who_lag() -> None:
    holders = Holders(clients_max=3)
    for client, version in (("a", 4), ("b", 2), ("c", 3)):
        holders.report(client, version)
    assert list(holders.lagging(4).items()) == [("b", 2), ("c", 3)]
    holders.report("b", 4)
    holders.report("d", 1)  # a fourth: the longest silent, "a", is dropped
    assert holders.lagging(4) == {"d": 1, "c": 3} and holders.version("a") is None
