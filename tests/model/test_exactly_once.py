"""Each request takes effect once, whatever becomes of its commits, and sent again it gives its first answer
(FAULTS.md, S23): conflicts, transactions too old, results that are unknown, and processes that end at a
commit or at a call to a chain, at every point of every request."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from exactly_once import NOT_REPEATABLE, READ_ONLY
from exactly_once_content import content, told
from exactly_once_world import CASES, USER, Case, World

from ffs import errors
from ffs.proto import meta
from ffs.proto.common import Message
from metadata.kv.faults import Died

FAULTS = ["conflict", "too_old", "unknown_applied", "unknown_lost", "died_applied", "died_lost"]
encode = msgspec.msgpack.encode


def test_every_request_has_its_cases() -> None:
    kinds = set(meta.REPLY_OF)
    assert set(CASES) | READ_ONLY | NOT_REPEATABLE == kinds, "see exactly_once.py"
    assert not set(CASES) & READ_ONLY


async def _asked(made: Case) -> tuple[World, meta.Request]:
    world = await World.make()
    request = world.me.prepare(await made(world))
    world.first.core.capabilities._next = world.first.core.capabilities._end  # their block is a commit too
    return world, request


async def _answers(world: World, request: meta.Request, *, alive: bool) -> list[Message]:
    """The answer, and those to the same request sent to both processes again."""
    answers = []
    try:
        answers.append(await world.first.handle(request))
        assert alive
    except Died:
        assert not alive
    return [*answers, await world.second.handle(request), await world.first.handle(request)]


def _check_same(answers: list[Message], where: str) -> None:
    if isinstance(answers[-1], meta.SessionRenewed):
        return
    assert len({encode(answer) for answer in answers}) == 1, f"{where}: {answers}"


def _name(made: Case) -> str:
    return made.__name__


@pytest.mark.parametrize("made", [c for cases in CASES.values() for c in cases], ids=_name)
def test_exactly_once(made: Case) -> None:
    async def reference() -> tuple[Any, list[Any], int, int]:
        world, request = await _asked(made)
        commits, calls = world.store.commits, world.chains.calls
        answers = [await world.first.handle(request)]
        commits, calls = world.store.commits - commits, world.chains.calls - calls
        answers += await _answers(world, request, alive=True)
        _check_same(answers, "without faults")
        return told(answers[0]), await content(world), commits, calls

    async def main() -> None:
        reply, after, commits, calls = await reference()
        assert commits
        for at in range(commits):
            for fault in FAULTS:
                world, request = await _asked(made)
                world.store.script[world.store.commits + at] = fault
                answers = await _answers(world, request, alive=not fault.startswith("died"))
                assert not world.store.script, "the fault wasn't met"
                where = f"{fault} at commit {at} of {commits}"
                _check_same(answers, where)
                assert told(answers[0]) == reply, where
                assert await content(world) == after, where
        for at in range(calls):
            world, request = await _asked(made)
            world.chains.die_at = world.chains.calls + at
            answers = await _answers(world, request, alive=False)
            _check_same(answers, f"end at call {at} of {calls}")
            assert told(answers[0]) == reply
            assert await content(world) == after, f"end at call {at} of {calls}"

    asyncio.run(main())


# What fails, what makes it possible meanwhile, and what undoes it: the failed request comes once more.
LATE: dict[str, tuple[list[meta.Request], meta.Request, list[meta.Request]]] = {
    "unlink": ([], meta.Unlink(path=b"/x"), [meta.SymLink(path=b"/x", target=b"t")]),
    "rename": ([], meta.Rename(source=b"/x", target=b"/y"), [meta.SymLink(path=b"/x", target=b"t")]),
    "link": ([], meta.Link(source=b"/x", target=b"/y"), [meta.SymLink(path=b"/x", target=b"t")]),
    "mkdir": ([meta.MkDir(path=b"/x")], meta.MkDir(path=b"/x"), [meta.RmDir(path=b"/x")]),
    "rmdir": ([], meta.RmDir(path=b"/x"), [meta.MkDir(path=b"/x")]),
    "open": (
        [meta.MkDir(path=b"/x")],
        meta.Open(path=b"/x", flags=meta.OPEN_CREATE | meta.OPEN_WRITE),
        [meta.RmDir(path=b"/x")],
    ),
    "setattr": ([], meta.SetAttr(path=b"/x", what=meta.SET_MODE), [meta.MkDir(path=b"/x")]),
    "remove_tree": ([], meta.RemoveTree(path=b"/x"), [meta.MkDir(path=b"/x")]),
    "remove_tree of another's": (
        [meta.MkDir(path=b"/x/y", parents=True, parent_mode=0o755)],
        meta.RemoveTree(path=b"/x", creds=USER),
        [meta.SetAttr(path=b"/x", what=meta.SET_UID, uid=USER.uid)],
    ),
}


@pytest.mark.parametrize("name", list(LATE))
def test_what_was_refused_doesnt_happen_later(name: str) -> None:
    """A request is held up in one process. Sent again to another it fails, and the client goes on: what was
    in its way goes. When the first process wakes up, the request must not take effect any more."""
    before, request, change = LATE[name]

    async def main() -> None:
        world = await World.make()
        for earlier in before:
            await world.other(msgspec.structs.replace(earlier))
        creds = request.creds
        late = world.me.prepare(msgspec.structs.replace(request))
        late.creds = creds
        refused = await world.second.handle(late)
        assert told(refused)[1], refused
        for step in change:
            await world.other(msgspec.structs.replace(step))
        after = await content(world)
        assert encode(await world.first.handle(late)) == encode(refused)
        assert await content(world) == after

    asyncio.run(main())


def test_what_asks_to_be_sent_again_isnt_noted() -> None:
    """An overload isn't an answer: the same identity must be judged anew."""
    from metadata.fs.retry import stands

    for error in (errors.Overloaded(), errors.OutcomeUnknown(), errors.ShutDown(), errors.Fenced()):
        assert not stands(error)
    assert stands(errors.NotFound())
    assert stands(errors.ChainUnavailable())


def test_a_session_opened_twice_is_one_too_many_and_no_more() -> None:
    """Its answer was lost: a second session is opened, the first ends by itself. Within one attempt an
    unknown result makes no second one."""

    async def main() -> None:
        world = await World.make()
        world.first.core.clients._next = world.first.core.clients._end - 1
        before = len(await world.store.read(lambda snap: snap.range(b"s", b"t")))
        world.store.script[world.store.commits] = "unknown_applied"
        await world.first.handle(meta.SessionOpen())
        assert len(await world.store.read(lambda snap: snap.range(b"s", b"t"))) == before + 1

    asyncio.run(main())
