"""What the adapters of engines have in common (ffs.kv.serving), without a cluster and without an engine."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffs.errors import InvalidArgument, Unreachable
from ffs.kv.results import Results, Status
from ffs.kv.serving import BlockStore, Breaker, Lanes, Regions, Settings, State, block_keys, namespace
from ffs.kv.serving.jobs import Finished
from ffs.kv.serving.verdicts import Verdicts

FIELDS = {"model": "m", "tp": 8, "portable": False}

# --- names --------------------------------------------------------------------------------------------


def test_names_are_what_the_page_says() -> None:
    # docs/kv_keys.md, Blocks of engines: put together here by itself.
    import blake3

    def field(name: str, value: bytes) -> bytes:
        return len(name).to_bytes(2, "little") + name.encode() + len(value).to_bytes(8, "little") + value

    root = blake3.blake3(
        field("engine", b"vllm")
        + field("field.model", b"sm")
        + field("field.portable", b"u" + bytes(8))
        + field("field.tp", b"u" + (8).to_bytes(8, "little")),
        derive_key_context="ffs 2026 kv engine: namespace",
    ).digest()
    assert namespace("vllm", FIELDS) == root
    key = blake3.blake3(
        field("namespace", root)
        + field("block", b"abc")
        + field("part", (1).to_bytes(8, "little"))
        + field("bytes", (4096).to_bytes(8, "little")),
        derive_key_context="ffs 2026 kv engine: block",
    ).digest()
    keys = block_keys(root, [b"", b"abc"], [8192, 4096])
    assert keys.shape == (4, 32)
    assert bytes(keys[3]) == key


scalar = st.one_of(st.text(max_size=4), st.binary(max_size=4), st.integers(0, 2**64 - 1))


@given(
    st.dictionaries(st.text(max_size=3), scalar, max_size=3),
    st.dictionaries(st.text(max_size=3), scalar, max_size=3),
)
def test_only_equal_fields_share_a_namespace(one: dict[str, Any], other: dict[str, Any]) -> None:
    # With their types: b"x" and "x", 1 and "1" are different things.
    same = [(k, type(v), v) for k, v in sorted(one.items())] == [
        (k, type(v), v) for k, v in sorted(other.items())
    ]
    assert (namespace("vllm", one) == namespace("vllm", other)) == same
    assert namespace("vllm", one) != namespace("sglang", one)


def test_numbers_that_no_field_holds_are_refused() -> None:
    for wrong in (-1, 1 << 64, 1.5, None):
        with pytest.raises(InvalidArgument, match="field x"):
            namespace("vllm", {"x": wrong})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgument, match="32 bytes"):
        block_keys(b"short", [b"a"], [1])


# --- the breaker ---------------------------------------------------------------------------------------


def test_a_breaker_opens_tries_and_closes() -> None:
    now = [0.0]
    breaker = Breaker(failures=2, pause_s=1, longest_s=3, clock=lambda: now[0])
    assert breaker.allow()
    breaker.failed()
    assert breaker.allow()
    assert breaker.state is State.CLOSED
    breaker.failed()
    assert breaker.state is State.OPEN
    assert not breaker.allow()
    breaker.failed()  # who had asked before it opened: no longer pause for that
    now[0] = 1.0
    assert breaker.allow()
    assert breaker.state is State.TRYING
    assert not breaker.allow()  # one at a time
    breaker.failed()
    now[0] = 2.9
    assert not breaker.allow()  # twice the pause
    now[0] = 3.0
    assert breaker.allow()
    breaker.failed()
    now[0] = 6.0  # and 3, the longest
    assert breaker.allow()
    breaker.succeeded()
    assert breaker.state is State.CLOSED
    breaker.failed()
    assert breaker.state is State.CLOSED  # counted anew
    assert breaker.opened == 1


def test_a_call_from_before_says_nothing_of_the_try() -> None:
    """It fails late, while another thread tries: neither is the pause doubled nor may a second one try."""
    now = [0.0]
    breaker = Breaker(failures=1, pause_s=1, longest_s=8, clock=lambda: now[0])
    assert breaker.allow()  # of a slow call; another one fails meanwhile
    breaker.failed()
    now[0] = 1.0

    def elsewhere(work: Callable[[], object]) -> None:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

    tried: list[bool] = []
    elsewhere(lambda: tried.append(breaker.allow()))
    assert tried == [True]
    breaker.failed()  # the slow one
    now[0] = 3.5
    assert breaker.state is State.TRYING
    assert not breaker.allow()
    assert breaker.opened == 1


# --- verdicts: K12, K13, K18 ---------------------------------------------------------------------------


def test_a_step_asks_once_for_each_block() -> None:
    verdicts = Verdicts(1)
    assert verdicts.ask(b"a", "r") is None
    assert verdicts.ask(b"a", "s") is None
    assert verdicts.ask(b"b", "r") is None
    assert verdicts.take() == [b"a", b"b"]
    assert verdicts.take() == []
    verdicts.answer([b"a", b"b"], [True, False])
    assert verdicts.ask(b"a", "r") is True
    assert verdicts.ask(b"b", "r") is False


def test_k12_a_failed_load_is_a_miss_for_who_asked_and_is_looked_up_anew_by_others() -> None:
    verdicts = Verdicts(1)
    verdicts.ask(b"a", "r")
    verdicts.answer(verdicts.take(), [True])
    verdicts.missing([b"a", b"never asked for"])
    assert [verdicts.ask(b"a", "r") for _ in range(3)] == [False] * 3
    assert verdicts.take() == []
    verdicts.forget("r")
    assert verdicts.ask(b"a", "s") is None
    assert verdicts.take() == [b"a"]


def test_k13_an_answer_that_does_not_come_is_a_miss() -> None:
    now = [0.0]
    verdicts = Verdicts(2, clock=lambda: now[0])
    assert verdicts.ask(b"a", "r") is None
    taken = verdicts.take()
    now[0] = 2.5
    assert verdicts.ask(b"a", "r") is False
    verdicts.answer(taken, [True])  # too late: the request computes it already
    assert verdicts.ask(b"a", "r") is False
    assert verdicts.late == 1


@given(
    st.lists(st.tuples(st.sampled_from("aftmx"), st.sampled_from([b"1", b"2"]), st.sampled_from(["r", "s"])))
)
def test_k18_nothing_is_left_when_requests_are_over(steps: list[tuple[str, bytes, str]]) -> None:
    verdicts = Verdicts(1)
    taken: list[bytes] = []
    for what, key, request in steps:
        if what == "a":
            verdicts.ask(key, request)
        elif what == "f":
            verdicts.forget(request)
        elif what == "t":
            taken += verdicts.take()
        elif what == "m":
            verdicts.missing([key])
        else:
            verdicts.answer(taken, [True] * len(taken))
    verdicts.forget("r")
    verdicts.forget("s")
    verdicts.answer(taken, [True] * len(taken))
    assert len(verdicts) == 0


# --- memory ---------------------------------------------------------------------------------------------


def test_places_are_found_by_address_and_never_outside() -> None:
    first, second = np.zeros(8192, np.uint8), np.zeros(4096, np.uint8)
    begins = [int(array.ctypes.data) for array in (first, second)]
    regions = Regions()
    with pytest.raises(InvalidArgument, match="registered"):
        regions.blocks([begins[0]], [1])
    regions.add(begins[0], 8192)
    regions.add(begins[1], 4096)
    regions.add(begins[0] + 100, 10)  # known already
    blocks = regions.blocks([begins[0] + 4096, begins[1]], [4096, 4096])
    assert blocks.offsets.tolist() == [4096, 0]
    assert blocks.handles[0] != blocks.handles[1]
    for begin, size in ((begins[0] + 4096, 4097), (begins[0] - 1, 1), (begins[1], 4097)):
        with pytest.raises(InvalidArgument, match="registered"):
            regions.blocks([begin], [size])
    with pytest.raises(InvalidArgument, match="other bounds"):
        regions.add(begins[0] + 1, 8192)
    regions.close()
    regions.close()


# --- lanes ----------------------------------------------------------------------------------------------


def test_lanes_go_on_after_work_that_raises_and_drain_waits(caplog: pytest.LogCaptureFixture) -> None:
    lanes = Lanes("test", {"one": 1, "two": 1})
    held, done = threading.Event(), []

    def wrong() -> None:
        raise ValueError("wrong")

    lanes.submit("one", held.wait)
    lanes.submit("one", wrong)
    lanes.submit("one", lambda: done.append("one"))
    lanes.submit("two", lambda: done.append("two"))  # isn't held up
    while done != ["two"]:
        threading.Event().wait(0.001)
    held.set()
    lanes.drain()
    assert done == ["two", "one"]
    assert "wrong" in caplog.text
    lanes.close()
    lanes.close()
    with pytest.raises(RuntimeError):
        lanes.submit("one", wrong)


def test_an_end_is_told_through_a_descriptor() -> None:
    import select

    finished: Finished[str] = Finished()
    readable = lambda: bool(select.select([finished.fileno()], [], [], 0)[0])  # noqa: E731
    assert not readable()
    finished.put(1, "a")
    finished.put(2, "b")
    assert readable()
    finished.quiet()
    assert not readable()
    assert finished.pop(1) == "a"
    assert finished.pop(1) is None
    assert finished.pop_all() == {2: "b"}
    finished.quiet()
    finished.close()
    finished.put(3, "late")
    finished.close()


# --- the store: K5, K17 ---------------------------------------------------------------------------------


class Answers:
    """A space that answers as it is told: a list of statuses by call, or an error."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, int]] = []

    def _answer(self, what: str, count: int) -> Results:
        self.asked.append((what, count))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        status = np.array(answer, dtype=np.uint8)
        errors = {at: Unreachable("silent") for at in np.flatnonzero(status == Status.ERROR).tolist()}
        return Results(status, np.where(status == Status.HIT, 4096, 0).astype(np.int64), errors)

    def exists_many(self, keys: Any, **_: Any) -> Results:
        return self._answer("look", len(keys))

    def get_many(self, keys: Any, into: Any, **_: Any) -> Results:
        return self._answer("load", len(keys))

    def put_many(self, keys: Any, values: Any, **_: Any) -> Results:
        return self._answer("store", len(keys))

    def close(self) -> None:
        pass


KEYS = block_keys(namespace("test", {}), [b"a", b"b", b"c"], [4096])
H, M, E = Status.HIT, Status.MISS, Status.ERROR


def three_blocks() -> Any:
    memory = np.zeros(3 * 4096, np.uint8)
    begin = int(memory.ctypes.data)
    regions = Regions()
    regions.add(begin, len(memory))
    return regions.blocks(begin + 4096 * np.arange(3), [4096] * 3)


def store_of(*answers: Any, **settings: Any) -> tuple[BlockStore, Answers]:
    space = Answers(*answers)
    return BlockStore(Settings(**settings), opened=lambda: space), space  # type: ignore[arg-type, return-value]


def test_k5_each_block_has_its_own_answer_and_doubt_is_asked_for_once_more() -> None:
    store, space = store_of([H, E, M], [H])
    assert store.load(KEYS, three_blocks()).tolist() == [True, True, False]
    assert space.asked == [("load", 3), ("load", 1)]
    store, space = store_of([H, E, E], [E, E])
    assert store.load(KEYS, three_blocks()).tolist() == [True, False, False]
    assert space.asked == [("load", 3), ("load", 2)]  # and no third time


def test_k7_a_block_of_another_length_is_a_miss() -> None:
    memory = np.zeros(3 * 8192, np.uint8)
    regions = Regions()
    regions.add(int(memory.ctypes.data), len(memory))
    longer = regions.blocks(int(memory.ctypes.data) + 8192 * np.arange(3), [8192] * 3)
    store, space = store_of([H, H, H], [H, H, H])
    assert not store.load(KEYS, longer).any()
    assert not store.load(KEYS, longer, unsure=True).any()
    assert space.asked == [("load", 3), ("look", 3)]  # not even read


def test_k17_a_cluster_that_is_down_is_left_alone_and_comes_back() -> None:
    now = itertools.count()
    down = [Unreachable("nobody answers")] * 3
    store, space = store_of(*down, [H, H, H], failures=2, pause_s=0.001, longest_pause_s=0.001)
    assert not store.look(KEYS).any()
    assert store.healthy
    assert not store.store(KEYS, three_blocks()).any()
    assert not store.healthy
    asked = len(space.asked)
    while not store.look(KEYS).all():  # one try fails, the next has an answer
        assert next(now) < 1_000_000
    assert store.healthy
    assert len(space.asked) == asked + 2
    assert store.counts.refused % 3 == 0
    store.close()
    assert not store.look(KEYS).any()


def test_blocks_that_are_all_silent_count_as_a_failure_and_full_ones_do_not() -> None:
    store, _ = store_of([E, E, E], [E, E, E], [E, E, H], failures=2)
    assert not store.look(KEYS).any()
    assert not store.look(KEYS).any()
    assert store.breaker.state is State.OPEN
    store, _ = store_of([E, E, E], [E, E, H], [E, E, E], failures=2)
    for _ in range(3):
        store.look(KEYS)
    assert store.breaker.state is State.CLOSED  # never two in a row


def test_settings_that_there_are_not_are_named() -> None:
    assert Settings.of({"cluster": "h:1", "load_timeout_s": 2}).load_timeout_s == 2
    with pytest.raises(InvalidArgument, match="loadtimeout: no such setting"):
        Settings.of({"loadtimeout": 2})


def test_adapters_are_there_without_their_engines() -> None:
    from ffs.kv import lmcache_l2, sglang_storage, vllm_tier

    for make in (
        lambda: vllm_tier.FfsTier(None, memoryview(b""), "t"),
        lambda: sglang_storage.FfsHiCache(None),
        lambda: lmcache_l2.FfsL2Adapter({}),
    ):
        with pytest.raises(ImportError, match="can't be imported here"):
            make()


# --- what prefixes pools can restore: K6, K11 -------------------------------------------------------------


@given(st.lists(st.booleans(), max_size=12), st.one_of(st.none(), st.integers(1, 5)))
def test_k11_prefixes_at_every_boundary(there: list[bool], window: int | None) -> None:
    from ffs.kv.sglang_storage import restorable

    expected = {
        length
        for length in range(1, len(there) + 1)
        if all(there[0 if window is None else max(0, length - window) : length])
    }
    assert restorable(np.array(there, dtype=np.bool_), window) == expected


def test_golden_names() -> None:
    # Stored blocks must be found by every release.
    root = namespace("vllm", FIELDS)
    assert root.hex() == "be59e8892964628c902c1f344c1d768bed3e466afc0429218aae3fb87e021ba2"
    assert bytes(block_keys(root, [b"x"], [1])[0]).hex() == (
        "d959981cb5e0f3a74a9b394b28ce47e1911db27df2716b57ec4d64f1325eef8a"
    )
