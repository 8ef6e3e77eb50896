"""The published package's roles, for `shardcast.py`: run with an interpreter that has shardcast 0.3.2.

    origin FOLDER            prints its port; reads paths from standard input and broadcasts each
    relay FOLDER ORIGIN      prints its port
    client FOLDER RELAY      prints "ready"; fetches every version that is listed, and says when it is verified

The package keeps two scratch files at fixed places that several nodes of one machine would share; the caller gives
each node a copy of the package of its own.
"""

from __future__ import annotations

import logging
import sys
import time

import shardcast
from shardcast.client_node import ClientNode
from shardcast.middle_node import MiddleNode
from shardcast.origin_server import OriginServer

POLL_S = 0.2


def main() -> None:
    logging.getLogger("shardcast.utils").setLevel(logging.ERROR)
    role, folder, *where = sys.argv[1:]
    if role == "origin":
        origin = OriginServer(folder, 0)
        print(origin.http_server.server_address[1], flush=True)
        for line in sys.stdin:
            print("out", origin.broadcast(line.strip()), flush=True)
    elif role == "relay":
        relay = MiddleNode(where, folder, port=0, check_interval=1)
        print(relay.http_server.server_address[1], flush=True)
        time.sleep(1e6)
    else:
        client, have = ClientNode(where, folder), set()
        print("ready", flush=True)
        while True:
            for version in client.list_available_versions():
                if version not in have:
                    path = client.download_version(version, f"{folder}/{version}.bin")
                    have.add(version)
                    print("verified" if path else "failed", version, path, flush=True)
            time.sleep(POLL_S)


assert shardcast.__version__ == "0.3.2"
main()
