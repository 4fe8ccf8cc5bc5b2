"""A cluster with a secret: forged capabilities, rotation of keys under load, users. Real processes."""

from __future__ import annotations

import fcntl
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("ffs._native._ffs", reason="the native library isn't built")

from real_cluster import Cluster, form, until

import ffs
from ffs import errors
from ffs._native.iov import Iov
from ffs._native.ring import OP_CREATE, OP_READ, OP_WRITE, WAIT_NEEDS_CAPABILITY, Ring, error_of_cqe
from ffs.cli import main
from ffs.client.client import Client
from ffs.kv import Space
from ffs.layout import file_chunk_key
from ffs.proto import checks, meta
from ffs.proto.auth import KeysReply, ListUsers, RotateKeys, Token, UsersReply, parse_token
from ffs.proto.common import CAPABILITY_BYTES, RIGHT_READ, RIGHT_WRITE, Creds

SECRET = b"correct horse battery staple"
# struct Capability (docs/wire_format.md): where each field begins.
FIELDS = {
    "version": 0,
    "kind": 1,
    "reserved": 2,
    "rights": 4,
    "client": 8,
    "space": 16,
    "epoch": 24,
    "expiry_ms": 32,
    "id": 40,
    "key_id": 48,
    "reserved2": 52,
    "mac": 56,
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    root = tmp_path_factory.mktemp("secure")
    secret = root / "secret"
    secret.write_bytes(SECRET + b"\n")
    secret.chmod(0o600)
    made = Cluster(root, secret)
    try:
        form(made, 2)
        with ffs.connect(made.address, secret=SECRET) as admin:
            admin.mkdir("/open")
            admin.chmod("/open", 0o777)
        yield made
        assert all(node.popen.poll() is None for node in made.nodes.values())
    finally:
        made.end()


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with ffs.connect(cluster.address, secret=SECRET) as connected:
        yield connected


class Forger:
    """Sends requests for one file under capabilities of its own making, as another program could."""

    def __init__(self, client: Client, ino: int, chain: int, epoch: int, genuine: bytes) -> None:
        self._native = client.core.session().native
        self._capability = self._native.add_capability(genuine)
        self._ring = Ring(self._native, 4)
        self._iov = Iov(4096)
        self._at = (ino, chain, epoch)

    def refusal(self, op: int, capability: bytes, *, key: bytes | None = None) -> str:
        """ "": it was done; else the name of the error, or "renew" where the server wants a newer one."""
        ino, chain, epoch = self._at
        self._native.renew_capability(self._capability, capability)
        place = ino.to_bytes(8, "big") + (file_chunk_key(0) if key is None else key)
        self._ring.prepare_one(
            op, chain, self._capability, place, 0, 4, self._iov[0:4], 7, space_epoch=epoch, timeout_ms=20_000
        )
        done, events = self._ring.wait(1, 30.0)
        if events & WAIT_NEEDS_CAPABILITY and not len(done):
            self._ring.cancel(7)
            done, _ = self._ring.wait(1, 30.0)
            assert len(done) == 1
            return "renew"
        assert len(done) == 1
        if int(done[0]["result"]) >= 0:
            return ""
        error = error_of_cqe(done[0])
        assert error.errno == errors.AccessDenied.code, error
        return type(error).__name__

    def close(self) -> None:
        self._ring.close()
        self._native.drop_capability(self._capability)


def flipped(capability: bytes, at: int) -> bytes:
    forged = bytearray(capability)
    forged[at] ^= 1 << at % 8
    return bytes(forged)


def wanted(forged: bytes) -> str:
    """A key that the server doesn't know may have been rotated away: a client renews."""
    key_id = int.from_bytes(forged[FIELDS["key_id"] : FIELDS["reserved2"]], "little")
    return "renew" if key_id > 1 else "AccessDenied"


def test_a_forged_capability_gives_nothing(client: Client) -> None:
    with client.open("/forged", "w+b", buffering=0) as file:
        file.write(b"data")
        file.fsync()
        handle = file._open_file
        grant = handle._grant[0]
        assert len(grant) == CAPABILITY_BYTES
        assert grant[FIELDS["key_id"]] == 1
        assert any(grant[FIELDS["mac"] :])
        forger = Forger(client, handle.ino, handle.placement.chain_of_index(0), handle.epoch, grant)
        for op in (OP_READ, OP_WRITE):
            assert forger.refusal(op, grant) == ""
            places = range(CAPABILITY_BYTES) if op == OP_READ else FIELDS.values()
            for at in places:
                forged = flipped(grant, at)
                assert forger.refusal(op, forged) == wanted(forged), f"byte {at}"
        unsigned = grant[: FIELDS["key_id"]] + bytes(40)
        assert forger.refusal(OP_READ, unsigned) == "AccessDenied"
        # Genuine, and for another file.
        with client.open("/other", "w+b", buffering=0) as other:
            other.write(b"x")
            assert forger.refusal(OP_READ, other._open_file._grant[0]) == "AccessDenied"
        # Genuine, and for reading only.
        with client.open("/forged", "rb", buffering=0) as reader:
            reader.read(1)
            assert forger.refusal(OP_READ, reader._open_file._grant[0]) == ""
            assert forger.refusal(OP_WRITE, reader._open_file._grant[0]) == "AccessDenied"
        assert forger.refusal(OP_WRITE, grant) == ""
        forger.close()


def test_a_forged_capability_opens_no_kv_space(client: Client) -> None:
    with Space.create(client, "/kv-forged", block_bytes=4096) as space:
        block = bytes(range(32))
        space.put([block], [b"v" * 4096])
        handle = space._handle
        session = client.core.session()
        reply = client.core.ask(
            meta.CapabilityRenew(ino=handle.ino, rights=RIGHT_READ | RIGHT_WRITE, client=session.client_id),
            meta.CapabilityReply,
        )
        placement = handle.placement
        forger = Forger(client, handle.ino, placement.chains[0], handle.epoch, reply.capability)
        for op in (OP_READ, OP_CREATE):
            for name, at in FIELDS.items():
                forged = flipped(reply.capability, at)
                assert forger.refusal(op, forged, key=block[:16]) == wanted(forged), name
        forger.close()


def test_keys_rotate_while_clients_read_and_write(cluster: Cluster, client: Client) -> None:
    stop = threading.Event()
    failures: list[BaseException] = []
    done = [0, 0]

    def work(number: int) -> None:
        data = os.urandom(50_000)
        try:
            with ffs.connect(cluster.address, secret=SECRET) as mine:
                kept = mine.open(f"/rotated-{number}", "w+b")  # its capability is of the first key
                while not stop.is_set():
                    kept.seek(0)
                    kept.write(data)
                    kept.flush()
                    kept.seek(0)
                    assert kept.read() == data
                    with mine.open(f"/rotated-new-{number}", "wb") as fresh:
                        fresh.write(data)
                    done[number] += 1
                kept.close()
        except BaseException as error:
            failures.append(error)

    def further(steps: int) -> Callable[[], bool]:
        before = list(done)
        return lambda: bool(failures) or all(n >= b + steps for n, b in zip(done, before, strict=True))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    try:
        caller = client.core.caller
        first = caller.call(RotateKeys(look=True), KeysReply)
        for _ in range(4):  # more than are valid at a time: the first key is long gone at the end
            until(further(1), "work")
            caller.call(RotateKeys(), KeysReply)
            until(lambda: not caller.call(RotateKeys(look=True), KeysReply).rotating, "the new key signs")
        until(further(3), "work goes on")
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not failures, failures
    last = caller.call(RotateKeys(look=True), KeysReply)
    assert len(last.keys) == 2
    assert {key.id for key in last.keys}.isdisjoint({key.id for key in first.keys})
    assert sum(not key.retired_ms for key in last.keys) == 1


def test_rotate_keys_by_command(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("FFS_CLUSTER", cluster.address)
    monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(cluster.root / "secret"))
    assert main(["cluster", "rotate-keys"]) == 0
    said = capsys.readouterr()
    assert "signs since" in said.out
    assert "signs nothing more" in said.out
    assert main(["status"]) == 0
    assert "authentication is OFF" not in capsys.readouterr().out
    logs = "".join(process.stderr() for process in cluster.all)
    assert SECRET.decode() not in logs


# --- users ----------------------------------------------------------------------------------------


@pytest.fixture
def run(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("FFS_CLUSTER", cluster.address)
    monkeypatch.setenv("FFS_CLUSTER_SECRET_FILE", str(cluster.root / "secret"))

    def command(*line: str) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main(list(line))
        said = capsys.readouterr()
        return status, said.out, said.err

    return command


Run = Callable[..., tuple[int, str, str]]


def test_a_user_acts_under_the_ids_of_the_record(cluster: Cluster, run: Run, client: Client) -> None:
    assert run("user", "add", "alice", "--uid", "1001", "--gid", "1002", "--groups", "5,6")[0] == 0
    assert run("user", "add", "alice", "--uid", "1001", "--gid", "1002", "--groups", "5,6")[0] == 0  # again
    assert "already" in run("user", "add", "alice", "--uid", "7", "--gid", "7")[2]
    assert "1 to 64" in run("user", "add", "no/name", "--uid", "7", "--gid", "7")[2]
    status, out, err = run("user", "token", "alice", "--label", "laptop")
    assert status == 0
    assert "isn't shown again" in err
    token = parse_token(out)
    listed = run("user", "list")[1]
    assert token.id.hex() in listed
    assert token.secret.hex() not in listed
    with ffs.connect(cluster.address, token=out) as alice:
        alice.core.creds = Creds(0, 0, ())  # what a client claims counts for nothing
        with alice.open("/open/hers", "wb") as file:
            file.write(b"hers" * 1000)
        with alice.open("/open/hers", "rb") as file:
            assert file.read() == b"hers" * 1000
        found = client.stat("/open/hers")
        assert (found.st_uid, found.st_gid) == (1001, 1002)
        client.mkdir("/private")
        client.chmod("/private", 0o700)
        with pytest.raises(errors.AccessDenied):
            alice.mkdir("/private/hers")
        # Of the cluster, a user sees how it is, and changes nothing.
        assert alice.cluster_status().signed
        for request, reply in ((RotateKeys(), KeysReply), (ListUsers(), UsersReply)):
            with pytest.raises(errors.NotPermitted, match="administrators"):
                alice.core.caller.call(request, reply)
        alice.core.creds = Creds(0, 0, ())
        for request, reply in (
            (checks.FsckScan(what=checks.SCAN_ENTRIES), checks.FsckPage),
            (checks.FsckRepair(finding=checks.FsckFinding(kind="orphan-inode")), checks.FsckRepaired),
        ):
            with pytest.raises(errors.NotPermitted, match="administrators"):
                alice.core.caller.call(request, reply)
        # Another's session gives neither its outcomes nor its capabilities.
        ino = client.stat("/open/hers").st_ino
        stolen = meta.CapabilityRenew(ino=ino, rights=RIGHT_READ, client=client.core.session().client_id)
        with pytest.raises(errors.NotPermitted, match="isn't of this token"):
            alice.core.caller.call(stolen, meta.CapabilityReply)


def test_a_user_goes_by_inode_only_where_a_path_has_led_him(cluster: Cluster, run: Run) -> None:
    """Open files, listings, locks, spaces, forks and pickles name inodes by their ids: with the tickets
    that opening gave. Who guesses an id has none (docs/metadata.md, Tickets)."""
    assert run("user", "add", "dora", "--uid", "1005", "--gid", "1005")[0] == 0
    assert run("user", "add", "eve", "--uid", "1006", "--gid", "1006")[0] == 0
    dora_token, eve_token = run("user", "token", "dora")[1], run("user", "token", "eve")[1]
    with (
        ffs.connect(cluster.address, token=dora_token) as dora,
        ffs.connect(cluster.address, token=eve_token) as eve,
    ):
        dora.mkdir("/open/dora", 0o777)
        with dora.open("/open/dora/f", "w+b", buffering=0) as file:
            file.write(b"0123456789")
            file.flush()
            assert file.pread(100, 0) == b"0123456789"
            assert file.read(1) == b""  # at the end, by a look
            assert file.seek(0, os.SEEK_END) == 10
            file.truncate(5)
            file.allocate(0, 8)
            file.flock(fcntl.LOCK_EX)
            file.flock(fcntl.LOCK_UN)
        dora.chmod("/open/dora/f", 0o644)
        with dora.open("/open/dora/atomic", "wb", atomic=True) as file:
            file.write(b"whole")
        dora.create_many([f"/open/dora/many{at}" for at in range(1100)])
        assert len(dora.listdir("/open/dora")) == 1102  # two pages
        with dora.lock_directory("/open/dora", timeout=0):
            pass
        with dora.open("/open/dora/f", "rb", buffering=0) as reader, dora.open("/open/dora/f") as text:
            again, text_again = pickle.loads(pickle.dumps(reader)), pickle.loads(pickle.dumps(text))
            assert again.read() == b"01234" + bytes(3)
            assert text_again.read(5) == "01234"
            again.close()
            text_again.close()
            child = os.fork()
            if not child:
                code = 1
                try:
                    code = 0 if reader.pread(5, 0) == b"01234" else 2
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            # The renewal of what is open.
            session = dora.core.session()
            session.renew_capability(reader.capability)
        with Space.create(dora, "/open/dora/kv", block_bytes=4096) as space:
            session.renew_capability(space._handle._capability)

        dora.chmod("/open/dora", 0o700)
        ino = dora.stat("/open/dora/f").st_ino
        _, ticket = dora.ticket("/open/dora/f")
        asks = [
            (meta.Stat(ino=ino), meta.StatReply),
            (meta.Open(ino=ino), meta.Opened),
            (meta.CapabilityRenew(ino=ino), meta.CapabilityReply),
        ]
        for request, reply in asks:
            request.client = eve.core.session().client_id
            for tried in (b"", ticket, bytes(16)):
                request.ticket = tried
                with pytest.raises(errors.AccessDenied, match="by its id"):
                    eve.core.ask(request, reply)
            request.client = session.client_id
            request.ticket = ticket
            dora.core.ask(request, reply)
        with pytest.raises(errors.AccessDenied):
            eve.open("/open/dora/f", "rb")


def test_a_revoked_token_ends_what_runs_under_it(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    assert run("user", "add", "bob", "--uid", "1003", "--gid", "1003")[0] == 0
    kept = str(tmp_path / "token")
    assert run("user", "token", "bob", "--output", kept)[0] == 0
    assert os.stat(kept).st_mode & 0o777 == 0o600
    tokens = run("user", "list", "--json")[1]
    status, _, err = run("user", "token", "bob", "--output", kept)
    assert (status, "File exists" in err) == (1, True)
    assert run("user", "list", "--json")[1] == tokens  # no token that nobody has seen
    absent = str(tmp_path / "none")
    assert run("user", "token", "nobody", "--output", absent)[0] == 1
    assert not os.path.exists(absent)
    with open(kept, encoding="ascii") as text:
        kept_token = text.read()
    other = run("user", "token", "bob")[1]
    with ffs.connect(cluster.address, token=kept_token, request_timeout=20.0) as bob:
        file = bob.open("/open/bobs", "wb", buffering=0)
        file.write(b"before")
        ident = parse_token(kept_token).id.hex()
        assert run("user", "revoke", "bob", ident)[0] == 0
        with pytest.raises(errors.Unauthenticated):
            until(lambda: bob.exists("/open/bobs") and False, "the metadata service refuses")

        def refused() -> bool:
            try:
                file.write(b"after")
            except OSError:
                return True
            return False

        until(refused, "storage servers refuse its session")
        with pytest.raises(OSError, match=r"."):
            file.close()
    with pytest.raises(errors.Unauthenticated, match="revoked token"):
        ffs.connect(cluster.address, token=kept_token)
    with ffs.connect(cluster.address, token=other) as still:
        assert still.exists("/open/bobs")
    assert run("user", "remove", "bob")[0] == 0
    until(lambda: _refused(cluster, other), "a token of a removed user")
    assert "no user bob" in run("user", "remove", "bob")[2]


def _refused(cluster: Cluster, token: str) -> bool:
    try:
        ffs.connect(cluster.address, token=token).close()
    except errors.Unauthenticated:
        return True
    return False


def test_a_wrong_token_is_refused_and_never_repeated(cluster: Cluster, run: Run) -> None:
    assert run("user", "add", "carol", "--uid", "1004", "--gid", "1004")[0] == 0
    token = parse_token(run("user", "token", "carol")[1])
    wrong = Token(token.id, bytes(32))
    with pytest.raises(errors.Unauthenticated) as caught:
        ffs.connect(cluster.address, token=wrong.text())
    assert wrong.secret.hex() not in str(caught.value)
    with pytest.raises(errors.InvalidArgument) as misspelt:
        ffs.connect(cluster.address, token="ffs1-abc-" + token.secret.hex())
    assert token.secret.hex() not in str(misspelt.value)
    logs = "".join(process.stderr() for process in cluster.all)
    assert token.secret.hex() not in logs
