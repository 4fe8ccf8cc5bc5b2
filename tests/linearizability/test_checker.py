"""The checker itself: histories known good and known bad, and small ones against all permutations."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from lin_checker import check
from lin_history import Operation, by_key, load, save
from lin_models import Slots

MODEL = Slots(1)


def write(client: str, value: int, called: int, returned: int | None) -> Operation:
    answer = None if returned is None else "ok"
    return Operation("x", client, "write", ((0, value),), answer, called, returned)


def read(client: str, value: int | None, called: int, returned: int) -> Operation:
    return Operation("x", client, "read", (0,), (value,), called, returned)


GOOD = {
    "empty": [],
    "read of nothing": [read("a", None, 0, 1)],
    "write then read": [write("a", 1, 0, 1), read("b", 1, 2, 3)],
    "a read during the write sees the old": [write("a", 1, 0, 9), read("b", None, 2, 3)],
    "a read during the write sees the new": [write("a", 1, 0, 9), read("b", 1, 2, 3)],
    "touching operations are concurrent": [write("a", 1, 0, 5), read("b", None, 5, 6)],
    "two writers, either order": [write("a", 1, 0, 9), write("b", 2, 0, 9), read("c", 1, 10, 11)],
    "ambiguous, seen later": [write("a", 1, 0, None), read("b", None, 5, 6), read("b", 1, 90, 91)],
    "ambiguous, never seen": [write("a", 1, 0, None), read("b", None, 5, 6), read("b", None, 90, 91)],
}

BAD = {
    "stale read": [write("a", 1, 0, 1), read("b", None, 2, 3)],
    "v and then v-1": [
        write("a", 1, 0, 1),
        write("a", 2, 2, 90),
        read("b", 2, 10, 11),
        read("c", 1, 12, 13),
    ],
    "a value that nobody wrote": [write("a", 1, 0, 1), read("b", 7, 2, 3)],
    "a read before its write": [read("b", 1, 0, 1), write("a", 1, 2, 3)],
    "a lost write": [write("a", 1, 0, 1), write("b", 2, 2, 3), read("c", 1, 4, 5)],
    "two readers disagree on the order": [
        write("a", 1, 0, 50),
        write("b", 2, 0, 50),
        read("c", 1, 60, 61),
        read("d", 2, 62, 63),
    ],
    "ambiguous, seen and then gone": [
        write("a", 1, 0, None),
        read("b", 1, 5, 6),
        read("b", None, 7, 8),
    ],
    "an ambiguous write before its call": [read("b", 1, 0, 1), write("a", 1, 2, None)],
}


@pytest.mark.parametrize("history", GOOD.values(), ids=GOOD)
def test_good(history: list[Operation]) -> None:
    assert check(history, MODEL).linearizable


@pytest.mark.parametrize("history", BAD.values(), ids=BAD)
def test_bad(history: list[Operation]) -> None:
    verdict = check(history, MODEL)
    assert not verdict.linearizable
    assert verdict.stuck
    assert "can be next" in str(verdict)


def test_slots_and_absence() -> None:
    model = Slots(2)

    def op(kind: str, argument: object, answer: object, called: int, returned: int | None) -> Operation:
        return Operation("x", "a", kind, argument, answer, called, returned)

    good = [
        op("get", (), "absent", 0, 1),
        op("create", 5, "created", 2, 3),
        op("create", 6, "existed", 4, 5),
        op("write", ((1, 7),), "ok", 6, 7),
        op("get", (), (5, 7), 8, 9),
        op("remove", (), "ok", 10, 11),
        op("read", (0, 1), (None, None), 12, 13),
        op("create", 8, None, 14, None),
        op("create", 9, "existed", 20, 21),
    ]
    assert check(good, model).linearizable
    torn = [op("write", ((0, 1), (1, 1)), "ok", 0, 1), op("read", (0, 1), (1, None), 2, 3)]
    assert not check(torn, model).linearizable
    again = [op("create", 5, "existed", 0, 9), op("get", (), (5, 5), 10, 11)]
    assert check(again, model).linearizable
    twice = [op("create", 5, "created", 0, 1), op("create", 6, "created", 2, 3)]
    assert not check(twice, model).linearizable
    back = [op("create", 5, "created", 0, 1), op("remove", (), "ok", 2, 3), op("get", (), (5, 5), 4, 5)]
    assert not check(back, model).linearizable


def _possible(history: list[Operation]) -> bool:
    """By trying everything: each subset of the ambiguous ones, in each order that time allows."""
    certain = [op for op in history if op.returned_ns is not None]
    open_ended = [op for op in history if op.returned_ns is None]
    for count in range(len(open_ended) + 1):
        for chosen in itertools.combinations(open_ended, count):
            for order in itertools.permutations([*certain, *chosen]):
                if _in_time(order) and _explained(order):
                    return True
    return False


def _in_time(order: tuple[Operation, ...]) -> bool:
    return not any(
        later.returned_ns is not None and later.returned_ns < earlier.called_ns
        for at, earlier in enumerate(order)
        for later in order[at + 1 :]
    )


def _explained(order: tuple[Operation, ...]) -> bool:
    state = MODEL.initial()
    for op in order:
        after = MODEL.step(state, op)
        if after is None:
            return False
        state = after
    return True


def test_small_histories_against_all_permutations() -> None:
    rng = random.Random(7)
    verdicts = {True: 0, False: 0}
    for _ in range(1500):
        history = []
        for number in range(rng.randint(2, 6)):
            called = rng.randint(0, 12)
            returned = called + rng.randint(0, 8)
            if rng.random() < 0.5:
                history.append(write(f"c{number}", number, called, None if rng.random() < 0.3 else returned))
            else:
                history.append(read(f"c{number}", rng.choice([None, 0, 1, 2, 3, 4, 5]), called, returned))
        expected = _possible(history)
        verdicts[expected] += 1
        assert check(history, MODEL).linearizable == expected, history
    assert min(verdicts.values()) > 200, verdicts


def _atomic_history(rng: random.Random, clients: int, count: int) -> list[Operation]:
    """What clients of a perfect object see: each operation takes effect at one moment in its interval."""
    moments = []
    for client in range(clients):
        now = 0
        for number in range(count):
            called = now + rng.randint(1, 40)
            moment = called + rng.randint(0, 60)
            now = moment + rng.randint(0, 60)
            moments.append((moment, client, number, called, now))
    state: tuple[int | None, ...] = (None, None)
    history = []
    for _, client, number, called, returned in sorted(moments):
        if rng.random() < 0.5:
            slots = rng.choice([(0,), (1,), (0, 1)])
            value = client * count + number
            lost = rng.random() < 0.1
            takes_effect = not lost or rng.random() < 0.5
            if takes_effect:
                state = tuple(value if slot in slots else old for slot, old in enumerate(state))
            answer, until = (None, None) if lost else ("ok", returned)
            argument = tuple((slot, value) for slot in slots)
            history.append(Operation("x", f"c{client}", "write", argument, answer, called, until))
        else:
            history.append(Operation("x", f"c{client}", "read", (0, 1), state, called, returned))
    return history


@pytest.mark.parametrize("seed", range(10))
def test_long_histories_of_an_atomic_object_and_with_one_stale_read(seed: int) -> None:
    rng = random.Random(seed)
    history = _atomic_history(rng, clients=6, count=60)
    assert check(history, Slots(2)).linearizable
    reads = [op for op in history if op.kind == "read"]
    written = {value: op for op in history if op.kind == "write" for _, value in op.argument}
    # A read that sees what a read long before it had seen, though a later value was read in between.
    for early, late in itertools.product(reads, reads):
        if early.returned_ns is None or late.called_ns < early.returned_ns + 2000:
            continue
        if early.answer != late.answer and all(value in written for value in (*early.answer, *late.answer)):
            at = history.index(late)
            history[at] = Operation(
                "x", late.client, "read", late.argument, early.answer, late.called_ns, late.returned_ns
            )
            assert not check(history, Slots(2)).linearizable
            return
    pytest.fail("no pair of reads to break")


def test_a_history_comes_back_from_its_file(tmp_path: Path) -> None:
    history = _atomic_history(random.Random(1), 3, 20)
    save(tmp_path / "h.jsonl", history)
    assert load(tmp_path / "h.jsonl") == history
    assert by_key(history) == {"x": history}
