"""The process `ffs-storage`: wiring only. docs/operations.md, ffs-storage.

Order at start, so that nothing is half made when a step refuses: reach the metadata service (which
cluster?), lock the node's directory, look at all devices, format what may be formatted, register, open
the devices, announce, beat.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from typing import Final, cast

from ffs._native.device import host_id
from ffs._native.server import NativeServer, ShardInfo
from ffs.errors import InvalidArgument, Unreachable
from ffs.proto import cluster as proto
from ffs.proto.auth import peer_key
from ffs.rpc.address import format_address
from ffs.rpc.caller import Caller
from ffs.rpc.handshake import AskerHandshake
from ffs.rpc.ready import announce_ready
from ffs.rpc.secret_file import read_secret
from ffs.rpc.server import Server
from storage_server.collector import Collector
from storage_server.config import StorageConfig, parse_config
from storage_server.control import ControlService
from storage_server.devices import prepare, survey
from storage_server.identity import NodeIdentity, open_identity, socket_directory
from storage_server.metrics import MetricsServer, render
from storage_server.node import Node

log = logging.getLogger("ffs.storage")

PROGRAM = "ffs-storage"
NATIVE_LOG_LEVELS: Final = {"error": 0, "warning": 1, "info": 2, "debug": 3}  # ffs.h, ffs_server_options


async def run(config: StorageConfig, stop: asyncio.Event) -> None:
    """Serves until `stop`. Raises FfsError when it can't start, or may not go on."""
    secret = read_secret(config.secret_file, refuse_exposed=True) if config.secret_file else None
    host = _numeric_host(config)
    caller, poller = (
        Caller(
            config.metadata,
            lambda cluster: AskerHandshake(role="storage", cluster=cluster, secret=secret, name=config.name),
        )
        for _ in range(2)
    )
    try:
        await caller.call(proto.Ping(), config.start_timeout_s)
        cluster = caller.cluster
        identity = open_identity(config.directory, cluster)
        try:
            await _run_node(config, caller, poller, identity, cluster, secret, host, stop)
        finally:
            identity.release()
    finally:
        caller.close()
        poller.close()


async def _run_node(
    config: StorageConfig,
    caller: Caller,
    poller: Caller,
    identity: NodeIdentity,
    cluster: bytes,
    secret: bytes | None,
    host: str,
    stop: asyncio.Event,
) -> None:
    devices = await _devices(config, caller, identity, cluster)
    request = proto.RegisterNode(
        name=config.name,
        uuid=identity.uuid,
        host_id=host_id(),
        devices=tuple(devices),
        domain=config.domain,
        start=os.urandom(16),
    )
    registered = cast(proto.RegisterNodeReply, await caller.call(request, config.start_timeout_s))
    native = NativeServer(
        registered.node,
        registered.incarnation,
        cluster,
        bind_host=config.listen[0],
        socket_dir=socket_directory(config.socket_dir, identity) if config.local else None,
        io_backend=config.io_backend,
        tcp_congestion=config.tcp_congestion,
        zero_copy_send=config.zero_copy_send,
        rdma=config.rdma,
        rdma_traffic_class=config.rdma_traffic_class,
        pool_bytes=config.pool_bytes,
        log_level=NATIVE_LOG_LEVELS[config.log_level],
        failure_timeout_ms=registered.failure_timeout_ms,
        sync_share_percent=config.sync_share_percent,
        scrub_bytes_per_s=config.scrub_bytes_per_s,
        dedup_bytes_per_s=config.dedup_bytes_per_s,
        peer_key=peer_key(secret) if secret is not None else None,
    )
    poller.cluster = cluster
    node = Node(
        caller, poller, native, registered.node, registered.incarnation, registered.failure_timeout_ms
    )
    node.manager_ms = registered.manager_ms
    try:
        shards = []
        for device, choice in zip(devices, config.devices, strict=True):
            add = partial(
                native.add_device,
                write_cache=choice.write_cache,
                discard=choice.discard,
                null_data=choice.data == "null",
            )
            shards.append(await node.native(add, device.path))
        await node.start()
        loop = asyncio.get_running_loop()
        node.collector = Collector(
            node.id, node.incarnation, cluster, lambda: node.manager_ms, loop, node.sign
        )
        await _serve(config, node, native, shards, cluster, secret, host, stop)
    finally:
        await node.stop()


async def _devices(
    config: StorageConfig, caller: Caller, identity: NodeIdentity, cluster: bytes
) -> list[proto.DeviceInfo]:
    async def allocate(device_uuid: bytes, count: int) -> tuple[int, ...]:
        reply = await caller.call(
            proto.AllocateTargets(
                node_uuid=identity.uuid, node_name=config.name, device_uuid=device_uuid, count=count
            ),
            config.start_timeout_s,
        )
        return cast(proto.AllocateTargetsReply, reply).targets

    plans = await asyncio.to_thread(survey, config.devices, cluster, format_if_new=config.format_if_new)
    return await prepare(plans, cluster, config.targets_per_device, allocate)


async def _serve(
    config: StorageConfig,
    node: Node,
    native: NativeServer,
    shards: list[ShardInfo],
    cluster: bytes,
    secret: bytes | None,
    host: str,
    stop: asyncio.Event,
) -> None:
    def metrics_text() -> str:
        facts = {"ffs_node": float(node.id), "ffs_incarnation": float(node.incarnation)}
        facts["ffs_heartbeats"] = float(node.heartbeats)
        facts["ffs_refused_replies"] = float(node.refused_replies)
        uses = native.space_use()
        return render([native.metrics(shard.shard) for shard in shards], native.report(), facts, uses)

    assert node.collector is not None
    control = ControlService(node.collector)
    async with (
        Server(control, config.listen, cluster=cluster, secret=secret, name=config.name) as server,
        MetricsServer(config.metrics or ("127.0.0.1", 0), metrics_text) as metrics,
    ):
        control_address = format_address((host, server.address[1]))
        await node.announce(host, control_address, shards)
        facts = {
            "node": node.id,
            "incarnation": node.incarnation,
            "cluster": cluster.hex(),
            "devices": [device.path for device in config.devices],
            "metrics": format_address(metrics.address),
        }
        announce_ready(PROGRAM, control_address, config.ready_file, facts)
        await node.beat_until(stop)


def _numeric_host(config: StorageConfig) -> str:
    """The address that others reach the data ports by."""
    host = config.advertise_host or config.listen[0]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"host {host!r} has no address: {error}") from None
    numeric = str(found[0][4][0])
    if numeric in ("0.0.0.0", "::"):
        raise InvalidArgument(f"others can't connect to {numeric}: give --advertise-host")
    return numeric


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `ffs-storage`. An error at start is one line on stderr and exit status 1."""
    try:
        config = parse_config(arguments)
        logging.basicConfig(
            level=config.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        asyncio.run(_main(config))
    except OSError as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    return 0


async def _main(config: StorageConfig) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await run(config, stop)


if __name__ == "__main__":
    sys.exit(main())
