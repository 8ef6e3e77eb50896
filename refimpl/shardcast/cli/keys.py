"""The origin's key as a file: made once, read by nobody else; its public half is what everybody checks against."""

from __future__ import annotations

import os
from pathlib import Path

from refimpl.identity import Identity, is_public_key


def load_or_make_key(path: Path) -> Identity:
    """The key in `path`; a fresh one, and PATH.pub beside it, when there is none. Raises ValueError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return load_key(path)
    private = os.urandom(32)
    with os.fdopen(descriptor, "w") as file:
        file.write(private.hex() + "\n")
    identity = Identity(private)
    path.with_name(path.name + ".pub").write_text(identity.public_key + "\n")
    return identity


def load_key(path: Path) -> Identity:
    """The key in `path`. Raises ValueError when there is none, or when others may read it."""
    try:
        text = path.read_text().strip()
        mode = path.stat().st_mode & 0o077
    except OSError as error:
        raise ValueError(f"the key {path} cannot be read: {error.strerror}") from None
    if not is_public_key(text):  # a private key is written the same way
        raise ValueError(f"{path} holds no key: 64 lower-case hex digits were expected")
    if mode:
        raise ValueError(f"{path} may be read by others (mode {path.stat().st_mode & 0o777:o}): chmod 600 it")
    return Identity(bytes.fromhex(text))


def read_public_key(text: str) -> str:
    """A public key as 64 hex digits, or the file that holds it. Raises ValueError."""
    key = text
    if not is_public_key(text):
        try:
            key = Path(text).read_text().strip()
        except OSError:
            raise ValueError(f"{text!r} is neither a public key (64 hex digits) nor a file with one") from None
    if not is_public_key(key):
        raise ValueError(f"{text} holds no public key: 64 lower-case hex digits were expected")
    return key
