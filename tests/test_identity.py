"""A node is its key."""

from __future__ import annotations

from refimpl.identity import Identity, address_of, is_public_key, verify


def test_a_signature_holds_for_its_key_content_and_domain_only() -> None:
    alice, bob = Identity.from_seed(1, "alice"), Identity.from_seed(1, "bob")
    signature = alice.sign(b"content", domain="submission")
    assert verify(alice.public_key, b"content", signature, domain="submission")
    assert not verify(bob.public_key, b"content", signature, domain="submission")
    assert not verify(alice.public_key, b"kontent", signature, domain="submission")
    assert not verify(alice.public_key, b"content", signature, domain="registration")
    # the border between domain and content cannot be moved
    assert not verify(alice.public_key, b"ncontent", signature, domain="submissio")


def test_malformed_keys_and_signatures_are_not_valid_and_do_not_raise() -> None:
    alice = Identity.from_seed(1, "alice")
    signature = alice.sign(b"x")
    for key in ("", "zz" * 32, alice.public_key.upper(), alice.public_key[:-2], " " + alice.public_key):
        assert not verify(key, b"x", signature)
    for bad in (b"", b"\0" * 64, signature[:-1], signature + b"\0"):
        assert not verify(alice.public_key, b"x", bad)


def test_keys_are_reproducible_per_run_and_name_and_fresh_otherwise() -> None:
    assert Identity.from_seed(1, "a").public_key == Identity.from_seed(1, "a").public_key
    keys = {Identity.from_seed(seed, name).public_key for seed in (1, 2) for name in ("a", "b")}
    assert len(keys) == 4
    assert Identity.generate().public_key != Identity.generate().public_key
    assert is_public_key(keys.pop())


def test_an_address_is_twenty_bytes_of_the_key() -> None:
    key = Identity.from_seed(1, "a").public_key
    assert len(address_of(key)) == 40 and int(address_of(key), 16) > 0
