"""Hello: versions, clusters, the cluster secret; both sides joined in memory."""

from __future__ import annotations

import pytest

from ffs.errors import InvalidArgument, ProtocolError, Unauthenticated, VersionMismatch, WrongCluster
from ffs.proto.cluster import Ping
from ffs.proto.common import AuthProof, Hello, Message
from ffs.rpc import address
from ffs.rpc.codec import decode_message, encode_message
from ffs.rpc.handshake import AskerHandshake, ServerHandshake

CLUSTER = bytes(range(16))
SECRET = b"s" * 32


def join(asker: AskerHandshake, server: ServerHandshake, meddle=lambda body: body) -> None:  # type: ignore[no-untyped-def]
    body: bytes | None = asker.hello
    while body is not None:
        body = meddle(body)
        reply: Message = server.receive(body, decode_message(body))
        body = asker.receive(decode_message(encode_message(reply)))
    assert asker.done


def server(secret: bytes | None = None, cluster: bytes = CLUSTER) -> ServerHandshake:
    return ServerHandshake(cluster=cluster, secret=secret, name="test")


def test_open_cluster() -> None:
    end = server()
    asker = AskerHandshake(role="storage", name="n1", node=4, incarnation=9)
    join(asker, end)
    assert asker.reply is not None
    assert asker.reply.cluster == CLUSTER
    assert end.peer is not None
    assert (end.peer.role, end.peer.name, end.peer.node, end.peer.incarnation) == ("storage", "n1", 4, 9)
    assert not end.peer.authenticated


def test_with_secret() -> None:
    end = server(SECRET)
    join(AskerHandshake(role="client", secret=SECRET, cluster=CLUSTER), end)
    assert end.peer is not None
    assert end.peer.authenticated


def test_asker_with_another_secret() -> None:
    with pytest.raises(Unauthenticated, match="another cluster secret"):
        join(AskerHandshake(role="client", secret=b"x" * 32), server(SECRET))


def test_server_with_another_secret_learns_nothing_and_serves_nothing() -> None:
    """The asker notices first: it never sends its own proof to a server that proves another secret."""
    sent = []

    def note(body: bytes) -> bytes:
        sent.append(decode_message(body))
        return body

    with pytest.raises(Unauthenticated, match="the server has another"):
        join(AskerHandshake(role="client", secret=SECRET), server(b"y" * 32), note)
    assert [type(message) for message in sent] == [Hello]


def test_asker_without_secret_is_told_what_to_do() -> None:
    with pytest.raises(Unauthenticated, match="FFS_CLUSTER_SECRET_FILE or FFS_TOKEN_FILE"):
        join(AskerHandshake(role="client"), server(SECRET))


def test_no_downgrade_to_a_server_without_secret() -> None:
    with pytest.raises(Unauthenticated, match="without a cluster secret"):
        join(AskerHandshake(role="client", secret=SECRET), server(None))


def test_requests_before_the_proof_are_refused() -> None:
    end = server(SECRET)
    asker = AskerHandshake(role="client", secret=SECRET)
    end.receive(asker.hello, decode_message(asker.hello))
    with pytest.raises(Unauthenticated, match="before anything else"):
        end.receive(b"", Ping())
    assert end.peer is None


def test_a_proof_is_good_for_one_connection_only() -> None:
    """Replay: hello and proof of one connection, sent on another."""
    proofs = []

    def note(body: bytes) -> bytes:
        proofs.append(body)
        return body

    join(AskerHandshake(role="client", secret=SECRET), server(SECRET), note)
    hello, proof = proofs
    again = server(SECRET)
    again.receive(hello, decode_message(hello))
    assert type(decode_message(proof)) is AuthProof
    with pytest.raises(Unauthenticated):
        again.receive(proof, decode_message(proof))


def test_a_changed_hello_breaks_the_proof() -> None:
    """Someone in between turns a client into a storage node."""

    def meddle(body: bytes) -> bytes:
        message = decode_message(body)
        if type(message) is Hello:
            message.role = "storage"
            return encode_message(message)
        return body

    with pytest.raises(Unauthenticated):
        join(AskerHandshake(role="client", secret=SECRET), server(SECRET), meddle)


def test_wrong_cluster_names_both() -> None:
    other = b"o" * 16
    with pytest.raises(WrongCluster) as caught:
        join(AskerHandshake(role="client", cluster=other), server())
    assert other.hex() in str(caught.value)
    assert CLUSTER.hex() in str(caught.value)


def test_versions() -> None:
    body = encode_message(Hello(protocol_min=7, protocol_max=9, name="newer"))
    with pytest.raises(VersionMismatch, match="update the older side"):
        server().receive(body, decode_message(body))
    body = encode_message(Hello(protocol_min=1, protocol_max=9))
    reply = server().receive(body, decode_message(body))
    assert reply.protocol == 1  # type: ignore[attr-defined]


def test_first_message_must_be_hello() -> None:
    with pytest.raises(ProtocolError, match="begins with hello"):
        server().receive(b"", Ping())


def test_addresses() -> None:
    assert address.parse_addresses("ffs://a:1,b:2,a:1") == (("a", 1), ("b", 2))
    assert address.parse_addresses("[::1]:7550") == (("::1", 7550),)
    assert address.format_address(("::1", 7550)) == "[::1]:7550"
    for bad in ("", "ffs://", "host", "host:", ":1", "host:0", "host:70000", "a:1,,b:2", "::1:5", "h:\uff11"):
        with pytest.raises(InvalidArgument):
            address.parse_addresses(bad)
    assert [address.is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "h")] == [
        True,
        True,
        True,
        False,
        False,
    ]
