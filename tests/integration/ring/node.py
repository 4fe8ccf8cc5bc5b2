"""One storage node as a process, told what to do by JSON lines: the native server without a manager.

Usage: python node.py DIRECTORY NODE CLUSTER_HEX TARGET... Prints its shard, then one answer a line.
FFS_NODE_POOL is the size of its pool of buffers, in bytes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

from ffs._native.device import device_format
from ffs._native.routes import ChainRoute, TargetRoute
from ffs._native.server import NativeServer, clock_ms


def main() -> None:
    directory, node, cluster = Path(sys.argv[1]), int(sys.argv[2]), bytes.fromhex(sys.argv[3])
    device = directory / f"device-{node}"
    if not device.exists():
        device_format(
            device, cluster=cluster, targets=[int(t) for t in sys.argv[4:]], size_bytes=6 << 30, sparse=True
        )
    pool = int(os.environ.get("FFS_NODE_POOL", "0"))
    with NativeServer(node, 1, cluster, socket_dir=directory, pool_bytes=pool) as server:
        shard = server.add_device(device)
        server.start()
        print(json.dumps({"port": shard.port, "socket_path": shard.socket_path}), flush=True)
        for line in sys.stdin:
            order = json.loads(line)
            answer: object = None
            if order["do"] == "configure":
                server.configure(
                    order["epoch"],
                    order["manager_ms"],
                    [
                        ChainRoute(
                            **{**c, "members": tuple(c["members"]), "incarnations": tuple(c["incarnations"])}
                        )
                        for c in order["chains"]
                    ],
                    [TargetRoute(**t) for t in order["targets"]],
                )
            elif order["do"] == "report":
                answer = [report._asdict() for report in server.report()]
            elif order["do"] == "metrics":
                answer = dataclasses.asdict(server.metrics(0))
            elif order["do"] == "lease":
                server.lease(clock_ms() + order["for_ms"])
            elif order["do"] == "fence":
                server.fence(order["client"])
            print(json.dumps(answer), flush=True)
        server.stop()


main()
