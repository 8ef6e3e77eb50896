"""The trainer's origin over a crash: what was published is neither published twice nor forgotten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from refimpl.identity import Identity, verify
from refimpl.shardcast.disk_store import DiskStore, layout_of
from refimpl.shardcast.manifest import Manifest
from refimpl.shardcast.serving import ServingConfig
from refimpl.shardcast.shelf import Store
from refimpl.training.weights import Broadcast
from tests.worlds import sim_fabric

KEY = Identity.from_seed(0, "trainer")


def test_a_publication_whose_entry_a_crash_swallowed_is_noted_and_not_made_again(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "model.bin").write_bytes(b"w" * 10_000)

    def life(name: str) -> list[tuple[str, Any]]:
        """A trainer's process: begins, and publishes checkpoint 4."""
        entries: list[tuple[str, Any]] = []
        fabric = sim_fabric(run_seed=0)
        world, store = fabric.node(name), DiskStore(tmp_path / "store")

        def journal(kind: str, /, **fields: Any) -> None:
            entries.append((kind, fields.get("checkpoint")))

        def checkpoint_of(store: Store, manifest: Manifest) -> int:
            return 4

        broadcast = Broadcast(
            world,
            "run",
            KEY,
            ServingConfig(),
            store,
            journal,
            cut=lambda version, folder: layout_of(folder, 4096),
            checkpoint_of=checkpoint_of,
            found=store.found(verify, KEY.public_key),
        )
        broadcast.begin()
        fabric.run(broadcast.publish(4, tmp_path / "weights"))
        return [entry for entry in entries if entry[0].startswith("out")]

    assert life("first") == [("out", 4)]  # an entry that dies with its process
    assert life("second") == [("out_before", 4)]
