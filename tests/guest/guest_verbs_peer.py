"""A client of the data plane over RDMA that shares nothing with ffs but the page docs/wire_format.md.

Frames are made and read by the layouts of tests/unit/wire_layouts.py (known from the prose only); queue
pairs, memory and work requests are pyverbs' (Debian's python3-pyverbs). One thread; what waits gives up after
LIMIT_S, which is only for a broken program.
"""

from __future__ import annotations

import ipaddress
import select
import socket
import struct
import sys
import time
from types import ModuleType
from typing import Any

from wire_layouts import CAPABILITY, HEADER, LAYOUTS, Value, decode_field, encode_field, size_of

from ffs.cli.host.verbs import DEBIAN

LIMIT_S = 60.0
RECEIVES, MESSAGE_BYTES = 8, 1024  # fewer and smaller than the server's own: both sides' counts matter
SEND_SLOTS = 16
GRANULE = 64 << 10
BULK_INLINE, BULK_RDMA = 1, 3
WANT_CHECKSUMS = 2
UPDATE_WRITE = 1
FEATURE_RDMA = 8
NAMES = {number: name for name, (number, _) in LAYOUTS.items() if not name.startswith(("server_", "open_si"))}
CRC_TABLE = []
for each in range(256):
    for _ in range(8):
        each = (each >> 1) ^ (0x82F63B78 if each & 1 else 0)
    CRC_TABLE.append(each)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = (crc >> 8) ^ CRC_TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def pyverbs(*names: str) -> list[Any]:
    """Its modules, of Debian's package: a virtual environment doesn't see those by itself."""
    import importlib

    sys.path.append(DEBIAN)
    try:
        modules: list[ModuleType] = [importlib.import_module(f"pyverbs.{name}") for name in names]
    finally:
        sys.path.remove(DEBIAN)
    return modules


addr, cq, device, enums, mr, pd, qp, wr = pyverbs("addr", "cq", "device", "enums", "mr", "pd", "qp", "wr")


def pack(fields: list[tuple[str, str]], values: dict[str, Value]) -> bytes:
    """What isn't named is zero."""
    unknown = set(values) - {name for name, _ in fields}
    assert not unknown, unknown
    return b"".join(
        encode_field(kind, values.get(name, "00" * size_of(kind) if kind.startswith("b") else 0))
        for name, kind in fields
    )


def unpack(fields: list[tuple[str, str]], raw: bytes) -> dict[str, Value]:
    values: dict[str, Value] = {}
    at = 0
    for name, kind in fields:
        values[name] = decode_field(kind, raw[at : at + size_of(kind)])
        at += size_of(kind)
    return values


def make_frame(name: str, request_id: int, values: dict[str, Value], variable: bytes = b"") -> bytes:
    number, fields = LAYOUTS[name]
    fixed = pack(fields, values)
    head: dict[str, Value] = {
        "magic": 0x31534646,
        "version": 1,
        "type": number,
        "fixed_bytes": len(fixed),
        "var_bytes": len(variable),
        "request_id": request_id,
    }
    head["frame_crc"] = crc32c(pack(HEADER, head) + fixed + variable)
    return pack(HEADER, head) + fixed + variable


class Frames:
    """A stream of frames that comes in pieces."""

    def __init__(self) -> None:
        self._bytes = b""

    def add(self, piece: bytes) -> None:
        self._bytes += piece

    def next(self) -> tuple[str, int, dict[str, Value], bytes, bytes] | None:
        """(its name, request id, fixed part, variable part, payload), or None: it isn't all there."""
        if len(self._bytes) < 32:
            return None
        head = {name: int(value) for name, value in unpack(HEADER, self._bytes).items()}
        assert (head["magic"], head["version"]) == (0x31534646, 1), head
        fixed_end = 32 + head["fixed_bytes"]
        var_end = fixed_end + head["var_bytes"]
        end = var_end + head["payload_bytes"]
        if len(self._bytes) < end:
            return None
        raw, self._bytes = self._bytes[:end], self._bytes[end:]
        assert crc32c(raw[:20] + bytes(4) + raw[24:var_end]) == head["frame_crc"]
        name = NAMES[head["type"]]
        fixed = unpack(LAYOUTS[name][1], raw[32:fixed_end])
        return name, head["request_id"], fixed, raw[fixed_end:var_end], raw[var_end:]


Answer = tuple[str, dict[str, Value], bytes]


class VerbsPeer:
    """A connection to a shard that has gone over to RDMA. `memory`: what the server may read and write."""

    def __init__(self, port: int, cluster: bytes, client: int, *, memory_bytes: int) -> None:
        self.client = client
        self._last_id = 0
        self._socket_frames, self._frames = Frames(), Frames()
        self._socket = self._say_hello(port, cluster)
        self._open_device(memory_bytes)
        self._queue = self._make_queue()
        self._receive_memory = mr.MR(self._pd, RECEIVES * MESSAGE_BYTES, enums.IBV_ACCESS_LOCAL_WRITE)
        self._send_memory = mr.MR(self._pd, SEND_SLOTS * MESSAGE_BYTES, enums.IBV_ACCESS_LOCAL_WRITE)
        for buffer in range(RECEIVES):
            self._post_receive(buffer)
        theirs = self._exchange_ends()
        self._connect(theirs)
        self._message_bytes = min(MESSAGE_BYTES, int(theirs["message_bytes"]))
        self._credits = int(theirs["receives"])  # buffers that the server has ready
        self._owed = 0  # buffers that were posted anew here and that the server doesn't know of
        self._free_slots = list(range(SEND_SLOTS))
        self._answers: dict[int, Answer] = {}
        self.sent = self.received = self.told = 0  # messages; credits that the server gave back
        self.broken = ""
        self.holds = False  # what came keeps its buffer, and the server is told of none
        self._held: list[int] = []

    # --- setting up -------------------------------------------------------------------------------

    def _say_hello(self, port: int, cluster: bytes) -> socket.socket:
        """Until the server has registered its memory it offers no RDMA."""
        limit = time.monotonic() + LIMIT_S
        values: dict[str, Value] = {"cluster": cluster.hex(), "client": self.client, "role": 1}
        values |= {"version_min": 1, "version_max": 1}
        while True:
            connected = socket.create_connection(("127.0.0.1", port), LIMIT_S)
            connected.sendall(make_frame("hello", 0, values))
            _, _, said, _, _ = self._from_socket(connected)
            assert said["status"] == 0, said
            if int(said["features"]) & FEATURE_RDMA:
                return connected
            connected.close()
            assert time.monotonic() < limit, "the server never offered RDMA"
            time.sleep(0.05)

    def _from_socket(self, connected: socket.socket) -> tuple[str, int, dict[str, Value], bytes, bytes]:
        while (frame := self._socket_frames.next()) is None:
            piece = connected.recv(65536)
            assert piece, "the server closed the connection without a word"
            self._socket_frames.add(piece)
        return frame

    def _open_device(self, memory_bytes: int) -> None:
        self._context = device.Context(name="rxe0")
        self._pd = pd.PD(self._context)
        access = enums.IBV_ACCESS_LOCAL_WRITE | enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
        self.memory = mr.MR(self._pd, memory_bytes, access)
        self._events = cq.CompChannel(self._context)
        self._completions = cq.CQ(self._context, RECEIVES + SEND_SLOTS + 1, None, self._events)

    def _make_queue(self) -> Any:
        room = qp.QPCap(max_send_wr=SEND_SLOTS, max_recv_wr=RECEIVES, max_send_sge=1, max_recv_sge=1)
        wanted = qp.QPInitAttr(
            qp_type=enums.IBV_QPT_RC, scq=self._completions, rcq=self._completions, cap=room, sq_sig_all=1
        )
        made = qp.QP(self._pd, wanted)
        state = qp.QPAttr(qp_state=enums.IBV_QPS_INIT, port_num=1)
        state.qp_access_flags = enums.IBV_ACCESS_REMOTE_WRITE | enums.IBV_ACCESS_REMOTE_READ
        wants = enums.IBV_QP_STATE | enums.IBV_QP_PKEY_INDEX | enums.IBV_QP_PORT | enums.IBV_QP_ACCESS_FLAGS
        made.modify(state, wants)
        return made

    def _exchange_ends(self) -> dict[str, Value]:
        gid = ipaddress.ip_address(self._context.query_gid(1, 1).gid)
        ours: dict[str, Value] = {
            "queue_pair": self._queue.qp_num,
            "first_packet": 4711,
            "gid": gid.packed.hex(),
            "mtu": 3,
            "ethernet": 1,
            "reads_in": 4,
            "reads_out": 4,
            "receives": RECEIVES,
            "message_bytes": MESSAGE_BYTES,
        }
        self._socket.sendall(make_frame("rdma_open", 0, ours))
        name, _, theirs, _, _ = self._from_socket(self._socket)
        assert (name, theirs["status"]) == ("rdma_open_reply", 0), theirs
        return theirs

    def _connect(self, theirs: dict[str, Value]) -> None:
        gid = ipaddress.IPv6Address(bytes.fromhex(str(theirs["gid"]))).exploded
        route = addr.GlobalRoute(dgid=addr.GID(gid), sgid_index=1, hop_limit=64)
        state = qp.QPAttr(qp_state=enums.IBV_QPS_RTR)
        state.path_mtu = min(3, int(theirs["mtu"]))
        state.dest_qp_num = int(theirs["queue_pair"])
        state.rq_psn = int(theirs["first_packet"])
        state.max_dest_rd_atomic = 4
        state.min_rnr_timer = 12
        state.ah_attr = addr.AHAttr(gr=route, is_global=1, port_num=1)
        self._queue.modify(
            state,
            enums.IBV_QP_STATE | enums.IBV_QP_AV | enums.IBV_QP_PATH_MTU | enums.IBV_QP_DEST_QPN
            | enums.IBV_QP_RQ_PSN | enums.IBV_QP_MAX_DEST_RD_ATOMIC | enums.IBV_QP_MIN_RNR_TIMER,
        )  # fmt: skip
        state = qp.QPAttr(qp_state=enums.IBV_QPS_RTS)
        state.sq_psn = 4711
        state.timeout, state.retry_cnt, state.rnr_retry, state.max_rd_atomic = 15, 6, 0, 4
        self._queue.modify(
            state,
            enums.IBV_QP_STATE | enums.IBV_QP_TIMEOUT | enums.IBV_QP_RETRY_CNT | enums.IBV_QP_RNR_RETRY
            | enums.IBV_QP_SQ_PSN | enums.IBV_QP_MAX_QP_RD_ATOMIC,
        )  # fmt: skip

    # --- messages ---------------------------------------------------------------------------------

    def _post_receive(self, buffer: int) -> None:
        place = self._receive_memory.buf + buffer * MESSAGE_BYTES
        piece = wr.SGE(place, MESSAGE_BYTES, self._receive_memory.lkey)
        self._queue.post_recv(wr.RecvWR(wr_id=buffer, num_sge=1, sg=[piece]))

    def _send(self, data: bytes) -> None:
        slot = self._free_slots.pop()
        place = slot * MESSAGE_BYTES
        if data:
            self._send_memory.write(data, len(data), place)
        pieces = [wr.SGE(self._send_memory.buf + place, len(data), self._send_memory.lkey)]
        told, self._owed = self._owed, 0
        request = wr.SendWR(
            wr_id=1000 + slot,
            num_sge=len(pieces),
            sg=pieces,
            opcode=enums.IBV_WR_SEND_WITH_IMM,
            imm_data=socket.htonl(told),  # pyverbs takes and gives it as it is on the wire
        )
        self._credits -= 1
        self.sent += 1
        self._queue.post_send(request)

    def look(self) -> None:
        """What has come and ended."""
        _, found = self._completions.poll(RECEIVES + SEND_SLOTS)
        for each in found:
            if each.status != enums.IBV_WC_SUCCESS:
                self.broken = self.broken or f"status {each.status}"
            elif each.wr_id >= 1000:
                self._free_slots.append(each.wr_id - 1000)
            else:
                self.received += 1
                told = socket.ntohl(each.imm_data)
                self.told += told
                self._credits += told
                if each.byte_len:
                    place = each.wr_id * MESSAGE_BYTES
                    self._frames.add(self._receive_memory.read(each.byte_len, place))
                self._held.append(each.wr_id)
        if not self.holds:
            for buffer in self._held:
                self._post_receive(buffer)
            self._owed += len(self._held)
            self._held.clear()
        while (frame := self._frames.next()) is not None:
            name, request_id, fixed, variable, payload = frame
            self._answers[request_id] = (name, fixed, variable + payload)
        if self._owed * 2 >= RECEIVES and self._credits > 0 and self._free_slots and not self.broken:
            self._send(b"")  # the last one is for this

    def _until(self, condition: Any, what: str) -> None:
        limit = time.monotonic() + LIMIT_S
        self.look()
        while not condition():
            assert not self.broken, f"{what}: {self.broken}"
            assert not select.select([self._socket], [], [], 0)[0], f"{what}: the server ends the connection"
            assert time.monotonic() < limit, f"never came: {what}"
            time.sleep(0.0005)
            self.look()

    def send(self, name: str, values: dict[str, Value], variable: bytes = b"") -> int:
        """A frame, as messages; its request id."""
        self._last_id += 1
        data = make_frame(name, self._last_id, values, variable)
        for at in range(0, len(data), self._message_bytes):
            self._until(lambda: self._credits > 1 and self._free_slots, "credits")
            self._send(data[at : at + self._message_bytes])
        return self._last_id

    def take_until_none_is_left(self) -> None:
        """With `holds`: of the buffers that the server knows of all but one, which is to tell of credits."""
        self._until(lambda: len(self._held) == RECEIVES - self._owed - 1, "the last message before it stops")

    def wait(self, request_id: int) -> Answer:
        self._until(lambda: request_id in self._answers, "an answer over the queue pair")
        return self._answers.pop(request_id)

    def wait_beside(self, request_id: int) -> Answer:
        """What the server says over the socket of a request that broke the queue pair; then it closes."""
        self._socket.settimeout(LIMIT_S)
        name, answered, fixed, variable, _ = self._from_socket(self._socket)
        assert answered == request_id
        assert self._socket.recv(1) == b"", "it says no more"
        return name, fixed, variable

    # --- operations -------------------------------------------------------------------------------

    def open(self, space: int, rights: int = 7) -> None:
        capability: dict[str, Value] = {"version": 1, "rights": rights, "client": self.client, "space": space}
        variable = pack(CAPABILITY, capability)
        name, fixed, _ = self.wait(self.send("open_capability", {"handle": 1}, variable))
        assert (name, fixed["status"]) == ("open_capability_reply", 0), fixed

    def ping(self, value: int) -> None:
        name, fixed, _ = self.wait(self.send("ping", {"value": value}))
        assert (name, fixed["value"]) == ("pong", value)

    def send_write(
        self, context: dict[str, Value], key: str, data: bytes, *, address: int, remote_key: int
    ) -> int:
        """`data` is what stands at `address`, for its checksums."""
        pieces = [data[at : at + GRANULE] for at in range(0, len(data), GRANULE)]
        values = context | {
            "key": key,
            "kind": UPDATE_WRITE,
            "length": len(data),
            "bulk.kind": BULK_RDMA,
            "bulk.length": len(data),
            "bulk.region": remote_key,
            "bulk.address": address,
        }
        return self.send("update", values, b"".join(struct.pack("<I", crc32c(piece)) for piece in pieces))

    def send_read(
        self, context: dict[str, Value], key: str, length: int, *, address: int, remote_key: int
    ) -> int:
        values = context | {
            "key": key,
            "length": length,
            "flags": WANT_CHECKSUMS,
            "bulk.kind": BULK_RDMA,
            "bulk.length": length,
            "bulk.region": remote_key,
            "bulk.address": address,
        }
        return self.send("read", values)

    def close(self) -> None:
        for each in (self._queue, self._completions, self._events, self.memory):
            each.close()
        for each in (self._receive_memory, self._send_memory, self._pd, self._context, self._socket):
            each.close()
