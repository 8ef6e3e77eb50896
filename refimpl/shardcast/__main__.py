"""`python -m refimpl.shardcast origin|relay|pull|push`: broadcast files or checkpoint folders for real."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from refimpl.shardcast.choice import POLICIES
from refimpl.shardcast.cli import commands
from refimpl.shardcast.disk import StoreError

EPILOG = """example, on one machine:

  python -m refimpl.shardcast origin model.safetensors --run demo --store /tmp/o --key origin.key --port 8000
  python -m refimpl.shardcast relay http://127.0.0.1:8000 --origin-key origin.key.pub --store /tmp/r --port 8001
  python -m refimpl.shardcast pull http://127.0.0.1:8001 --origin-key origin.key.pub --store /tmp/c
  python -m refimpl.shardcast push other.safetensors --origin http://127.0.0.1:8000 --key origin.key
"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m refimpl.shardcast", description=__doc__, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    sub = top.add_subparsers(dest="command", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        made = sub.add_parser(name, help=text, description=text, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        made.add_argument("--journal", type=Path, help="append what happens to this file, as JSON lines")
        made.add_argument("--quiet", action="store_true", help="say nothing but errors")
        made.add_argument("--bar", action=argparse.BooleanOptionalAction, help="progress bar (default: on a terminal)")
        return made

    def serving(made: argparse.ArgumentParser) -> None:
        made.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0: all of this machine")
        made.add_argument("--port", type=int, default=0, help="0: any free one, printed")
        made.add_argument("--keep", type=int, default=5, help="versions to keep")
        made.add_argument("--compat", choices=["blake3", "sha256"], help="serve shardcast 0.3.2's layout, too")
        made.add_argument("--client-mb-s", type=float, default=1250.0, help="MB/s that one client may take")
        made.add_argument(
            "--clients-per-address", type=float, default=8.0, help="what one address may take, in clients' worth"
        )

    def pulling(made: argparse.ArgumentParser) -> None:
        made.add_argument("sources", nargs="+", help="http://HOST:PORT of relays, or of the origin")
        made.add_argument("--origin-key", default="", help="the origin's public key, or the file that holds it")
        made.add_argument("--origin", default="", help="URL of the origin, to complain to (default: through relays)")
        made.add_argument("--policy", choices=list(POLICIES), default="expected-finish", help="how relays are chosen")
        made.add_argument("--connections", type=int, default=10, help="transfers at once")
        made.add_argument("--stall-s", type=float, default=15.0, help="a transfer without a byte so long is cut off")
        made.add_argument("--full-only", action="store_true", help="take no increments")
        made.add_argument("--poll-s", type=float, help="ask every so often, instead of waiting for word at the source")

    def store(made: argparse.ArgumentParser, *, required: bool = True) -> None:
        made.add_argument("--store", type=Path, required=required, help="folder for versions; what is there is resumed")
        made.add_argument("--reserve-gb", type=float, default=0.0, help="GB (10^9 bytes) to leave free on the disk")
        made.add_argument("--durable", action="store_true", help="wait for the disk before a version is published")
        made.add_argument("--workers", type=int, default=0, help="threads that cut, compare and apply; 0: all cores")

    origin = command("origin", "Cut, sign and serve versions.")
    origin.add_argument("paths", nargs="*", type=Path, help="files or checkpoint folders to broadcast, in this order")
    origin.add_argument("--run", required=True, help="run id: versions of one run follow one another")
    origin.add_argument("--key", type=Path, required=True, help="the origin's key; made if it does not exist")
    origin.add_argument("--shard-mb", type=float, default=50.0, help="MB (10^6 bytes) per shard")
    origin.add_argument("--increments", type=int, default=0, help="make increments from so many earlier versions")
    origin.add_argument(
        "--link", action="store_true", help="link the files instead of copying; do not change them then"
    )
    store(origin)
    serving(origin)

    relay = command("relay", "Fetch versions, and serve each shard on as soon as it is verified.")
    pulling(relay)
    relay.add_argument(
        "--neighbour", action="append", default=[], metavar="URL",
        help="a relay that may become the parent instead of the first source, when it is better (may be repeated)",
    )  # fmt: skip
    relay.add_argument("--look-s", type=float, default=10.0, help="how often neighbours are asked and measured")
    relay.add_argument("--slots", type=int, default=8, help="relays that may hang below this one")
    store(relay)
    serving(relay)

    pull = command("pull", "Fetch the newest version: STORE/newest is it, whole and verified.")
    pulling(pull)
    store(pull, required=False)
    pull.add_argument("--follow", action="store_true", help="go on with every newer version")
    pull.add_argument("--version", type=int, default=0, help="wait for this version or a newer one")
    pull.add_argument("--out", type=Path, help="let the file (of a version with one) appear here as well")
    pull.add_argument("--keep", type=int, default=2, help="versions to keep")
    pull.add_argument(
        "--compat",
        choices=["blake3", "sha256"],
        help="the sources are shardcast 0.3.2's: the file goes to --out, without --store",
    )
    pull.add_argument("--patience-s", type=float, default=600.0, help="give up when nothing has come for so long")

    push = command("push", "Tell a running origin to broadcast a file or folder (by a path that it sees, too).")
    push.add_argument("path", type=Path)
    push.add_argument("--origin", required=True, help="URL of the origin")
    push.add_argument("--key", type=Path, required=True, help="the origin's own key")
    return top


def main(arguments: list[str]) -> int:
    """Exit codes: 0 done; 1 it could not be done, and standard error says why; 2 usage."""
    reader = parser()
    options = reader.parse_args(arguments)
    if options.command == "pull" and options.store is None and not options.compat:
        reader.error("pull needs --store")
    try:
        return commands.COMMANDS[options.command](options)
    except (ValueError, StoreError, OSError) as error:
        print(f"shardcast {options.command}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
