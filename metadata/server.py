"""The process `ffs-meta`: wiring only. docs/operations.md, ffs-meta."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence

import ffs
from ffs.errors import NotPermitted
from ffs.proto import checks, locking, meta
from ffs.proto.cluster import GetRouting, GetStatus, Ping
from ffs.proto.commands import GetCluster, GetSpaces
from ffs.proto.common import Message, encode_capability
from ffs.rpc.address import format_address
from ffs.rpc.handshake import Peer
from ffs.rpc.ready import announce_ready
from ffs.rpc.secret_file import read_secret
from ffs.rpc.server import Server
from metadata.auth.keys import Signer
from metadata.auth.users import Users, end_sessions_of_gone_tokens
from metadata.cluster.chain_port import StorageControl
from metadata.cluster.clock import ManagerClock
from metadata.cluster.identity import cluster_id
from metadata.cluster.lease import Lease
from metadata.cluster.manager import Manager
from metadata.cluster.routing import RoutingCache
from metadata.config import MetaConfig, parse_config
from metadata.fs.collector import Collector
from metadata.fs.core import Core
from metadata.fs.namespace import Namespace
from metadata.fs.quota_sweep import QuotaSweeper
from metadata.fs.sessions import SessionSweeper, end_session
from metadata.fs.spaces import keep_complete
from metadata.kv import Store, open_store

log = logging.getLogger("ffs.meta")

PROGRAM = "ffs-meta"


class MetaService:
    """Hands each request to the namespace or to the manager (ffs.rpc.server.Service)."""

    # What a user may ask beyond the namespace; the rest is for administrators, who have the cluster secret.
    OF_USERS = (GetRouting, GetStatus, GetSpaces, GetCluster, Ping)
    # And what they mayn't in the namespace.
    OF_ADMINISTRATORS = (checks.FsckScan, checks.FsckRepair)

    def __init__(self, namespace: Namespace, manager: Manager, users: Users) -> None:
        self._users = users
        self._namespace = namespace
        self._manager = manager
        self._namespace_now = namespace.try_handle_now
        self._of_namespace = frozenset(meta.REPLY_OF)

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        if peer.token and not self._allow_now(peer, request):
            return None
        if type(request) in self._of_namespace:
            return self._namespace_now(request)
        if isinstance(request, Users.REQUESTS):
            return None
        return self._manager.handle_now(peer, request)

    async def handle(self, peer: Peer, request: Message) -> Message:
        if peer.token and not self._allow_now(peer, request):
            await self._users.check_owner(peer.token, request.client)  # type: ignore[attr-defined]
        if type(request) in self._of_namespace:
            reply = await self._namespace.handle(request)
            if peer.token and isinstance(reply, meta.SessionOpened):
                await self._users.bind(peer.token, reply.client)
            return reply
        if isinstance(request, Users.REQUESTS):
            return await self._users.handle(request)
        return await self._manager.handle(peer, request)

    def _allow_now(self, peer: Peer, request: Message) -> bool:
        """Makes a user's request one under that user's own ids, whatever it claims. False: whether the
        session that it names is the user's must be looked up. Unauthenticated (revoked), NotPermitted."""
        creds = self._users.creds(peer.token)
        if isinstance(request, meta.Request) and not isinstance(request, self.OF_ADMINISTRATORS):
            request.creds = creds
            return self._users.owns_now(peer.token, request.client)
        if isinstance(request, self.OF_USERS):
            return True
        raise NotPermitted(
            "this is for administrators: connect with the cluster secret (FFS_CLUSTER_SECRET_FILE) in place "
            f"of the token of user {peer.user}"
        )

    def cancellable(self, request: Message) -> bool:
        return type(request) is locking.Lock or self._manager.cancellable(request)


async def serve(config: MetaConfig, stop: asyncio.Event) -> None:
    """Runs until `stop`. Raises FfsError when it can't start."""
    secret = read_secret(config.secret_file, refuse_exposed=True) if config.secret_file else None
    store = open_store(config.store)
    try:
        await _serve_store(config, store, secret, stop)
    finally:
        await store.close()


async def _serve_store(config: MetaConfig, store: Store, secret: bytes | None, stop: asyncio.Event) -> None:
    cluster = await cluster_id(store, f"ffs {ffs.__version__}")
    clock = ManagerClock()
    lease = Lease(store, clock, duration_ms=config.lease_ms, grants_ms=config.failure_timeout_ms)
    signer = Signer(store) if secret is not None else None
    if signer is not None:
        await signer.ensure_first()
    routing = RoutingCache(store, clock)
    await routing.refresh()
    manager = Manager(
        store,
        lease,
        clock,
        routing,
        cluster=cluster,
        failure_timeout_s=config.failure_timeout_ms / 1000.0,
        signer=signer,
        key_period_ms=config.key_rotation_s * 1000,
    )
    control = StorageControl(
        routing,
        cluster=cluster,
        secret=secret,
        name=PROGRAM,
        failure_timeout_s=config.failure_timeout_ms / 1000.0,
    )
    sign = encode_capability if signer is None else signer.sign
    core = Core(store, routing, control, cluster_id=cluster, sign=sign)
    users = Users(store, core.now_ns)
    await users.refresh()
    service = MetaService(Namespace(core), manager, users)
    async with Server(
        service, config.listen, cluster=cluster, secret=secret, name=PROGRAM, users=users.grant
    ) as server:
        lease.address = config.advertise or format_address(server.address)
        async with asyncio.TaskGroup() as group:
            tasks = [
                group.create_task(lease.run()),
                group.create_task(routing.poll()),
                group.create_task(manager.run()),
                group.create_task(_while_primary(lease, Collector(core).run)),
                group.create_task(_while_primary(lease, SessionSweeper(core).run)),
                group.create_task(_while_primary(lease, lambda: keep_complete(store))),
                group.create_task(_while_primary(lease, QuotaSweeper(store).run)),
                group.create_task(users.poll()),
                group.create_task(
                    _while_primary(
                        lease,
                        lambda: end_sessions_of_gone_tokens(
                            store, users, lambda client: end_session(core, client)
                        ),
                    )
                ),
            ]
            if signer is not None:
                tasks.append(group.create_task(signer.poll()))
            announce_ready(PROGRAM, lease.address, config.ready_file, {"cluster": cluster.hex()})
            await stop.wait()
            for task in tasks:
                task.cancel()
        control.close()


async def _while_primary(lease: Lease, work: Callable[[], Awaitable[None]]) -> None:
    """Runs `work` while this process is the primary; starts it anew with each term."""
    term = lease.term
    while True:
        if term == 0:
            term = await lease.changed_from(0)
        async with asyncio.TaskGroup() as group:
            running = group.create_task(_run(work))
            term = await lease.changed_from(term)
            running.cancel()


async def _run(work: Callable[[], Awaitable[None]]) -> None:
    await work()


def install_stop_signals(stop: asyncio.Event) -> None:
    """SIGTERM and SIGINT ask for a clean stop; a second one is the system's."""
    loop = asyncio.get_running_loop()

    def asked(number: signal.Signals) -> None:
        stop.set()
        loop.remove_signal_handler(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked, number)


async def _main(config: MetaConfig) -> None:
    stop = asyncio.Event()
    install_stop_signals(stop)
    await serve(config, stop)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `ffs-meta`. An error at start is one line on stderr and exit status 1."""
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


if __name__ == "__main__":
    sys.exit(main())
