"""The RPC service of a storage process: pings, and work on chunks. docs/control_plane.md, Storage control."""

from __future__ import annotations

from ffs.errors import InvalidArgument, NotPermitted, ProtocolError
from ffs.proto.chain_calls import MOST_SPACES, ListChunks, RemovePage, RemoveSpaces, TruncateChunk
from ffs.proto.cluster import Ping
from ffs.proto.common import Message, OkReply
from ffs.rpc.handshake import Peer
from storage_server.chunk_work import Request
from storage_server.collector import Collector


class ControlService:
    """ffs.rpc.server.Service."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def handle_now(self, peer: Peer, request: Message) -> Message | None:
        return OkReply() if type(request) is Ping else None

    async def handle(self, peer: Peer, request: Message) -> Message:
        if not isinstance(request, Request | RemoveSpaces):
            raise ProtocolError(f"{type(request).__name__} isn't a request to a storage process")
        if peer.role not in ("meta", "admin"):
            raise NotPermitted(f"{type(request).__name__} is for the metadata service, not for {peer.role}")
        if isinstance(request, RemoveSpaces):
            if len(request.pairs) > MOST_SPACES:
                raise InvalidArgument(f"at most {MOST_SPACES} spaces at once, not {len(request.pairs)}")
            return await self._collector.remove_spaces(request)
        _check(request)
        return await self._collector.ask(request)

    def cancellable(self, request: Message) -> bool:
        return False


def _check(request: Request) -> None:
    if isinstance(request, RemovePage) and len(request.start) != 16:
        raise InvalidArgument(f"a key in a space has 16 bytes, not {len(request.start)}")
    if isinstance(request, TruncateChunk) and len(request.key) != 24:
        raise InvalidArgument(f"a chunk's key has 24 bytes, not {len(request.key)}")
    if isinstance(request, ListChunks) and (len(request.start) != 24 or request.limit < 0):
        raise InvalidArgument(f"a listing begins at a key of 24 bytes, not {len(request.start)}")
