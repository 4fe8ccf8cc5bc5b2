"""The plan of a sync in one directory: what is carried out makes both sides the same, and touches nothing
that it shouldn't."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ffs.cli.copying import plan
from ffs.cli.copying.mover import is_part, part_name
from ffs.cli.copying.plan import Node, Step, plan_directory

nodes = st.builds(
    Node,
    kind=st.sampled_from([plan.FILE, plan.DIRECTORY, plan.SYMLINK, plan.OTHER]),
    size=st.integers(0, 2),
    mtime_ns=st.integers(0, 2),
    mode=st.sampled_from([0o644, 0o600]),
)
sides = st.dictionaries(st.sampled_from("abcdefgh"), nodes)


def carry_out(steps: list[Step], source: dict[str, Node], target: dict[str, Node]) -> dict[str, Node]:
    after = dict(target)
    for step in steps:
        if step.action == plan.DELETE:
            del after[step.name]
        elif step.action not in (plan.CONFLICT, plan.SKIP, plan.KEEP):
            if step.replaces:
                del after[step.name]
            there = after.get(step.name)
            assert (
                there is None
                or plan.DIRECTORY not in (there.kind, source[step.name].kind)
                or (there.kind == source[step.name].kind)
            ), "a directory is neither replaced nor replaces anything by itself"
            after[step.name] = source[step.name]
    return after


@given(sides, sides, st.booleans())
def test_with_deletion_both_sides_are_the_same(
    source: dict[str, Node], target: dict[str, Node], checksum: bool
) -> None:
    steps = plan_directory(source, target, delete=True, checksum=checksum)
    assert [step.name for step in steps] == sorted(step.name for step in steps)
    after = carry_out(steps, source, target)
    blocked = {name for name, node in target.items() if node.kind == plan.OTHER}
    for name in source.keys() | after.keys():
        if name in blocked:
            assert after[name] == target[name]
        elif source.get(name, Node(plan.OTHER)).kind != plan.OTHER:
            ours, theirs = source[name], after[name]
            assert (ours.kind, ours.mode) == (theirs.kind, theirs.mode) or ours.kind != plan.FILE
            assert ours.kind == theirs.kind
            if ours.kind == plan.FILE:
                assert ours.size == theirs.size
    again = plan_directory(source, after, delete=True, checksum=False)
    assert {step.action for step in again} <= {
        plan.KEEP, plan.ENTER, plan.SKIP, plan.COMPARE_LINK, plan.CONFLICT, plan.DELETE
    }  # fmt: skip
    for step in again:
        if step.action == plan.DELETE:
            assert source.get(step.name, Node(plan.OTHER)).kind == plan.OTHER


@given(sides, sides)
def test_without_deletion_nothing_goes(source: dict[str, Node], target: dict[str, Node]) -> None:
    steps = plan_directory(source, target, delete=False, checksum=False)
    assert not [step for step in steps if step.action == plan.DELETE or step.replaces]
    after = carry_out(steps, source, target)
    assert target.keys() <= after.keys()
    for name, node in target.items():
        if node.kind == plan.DIRECTORY:
            assert after[name].kind == plan.DIRECTORY


@given(sides, sides, st.sets(st.sampled_from("abcdefgh")), st.booleans())
def test_what_is_excluded_is_left_alone(
    source: dict[str, Node], target: dict[str, Node], out: set[str], delete: bool
) -> None:
    steps = plan_directory(
        source, target, delete=delete, checksum=False, excluded=lambda name, is_directory: name in out
    )
    assert not [step for step in steps if step.name in out and step.action != plan.CONFLICT]


def test_leftovers_go_and_parts_that_are_needed_stay() -> None:
    file = Node(plan.FILE, 100, 7, 0o644)
    part, stale = part_name("big", 100, 7), part_name("big", 100, 6)
    assert is_part(part)
    assert is_part(stale)
    assert part != stale
    assert len(part_name("n" * 255, 1, 1)) <= 255
    steps = plan_directory(
        {"big": file, stale: file},
        {part: file, stale: file, "other": file},
        delete=False,
        checksum=False,
        leftover=is_part,
        kept=frozenset({part}),
    )
    assert steps == [Step(stale, plan.DELETE), Step("big", plan.COPY)]


def test_what_is_the_same() -> None:
    ours = {"f": Node(plan.FILE, 5, 1, 0o644)}

    def action(theirs: Node, checksum: bool = False) -> str:
        return plan_directory(ours, {"f": theirs}, delete=False, checksum=checksum)[0].action

    assert action(Node(plan.FILE, 5, 1, 0o644)) == plan.KEEP
    assert action(Node(plan.FILE, 5, 1, 0o600)) == plan.ATTRIBUTES
    assert action(Node(plan.FILE, 5, 2, 0o644)) == plan.COPY
    assert action(Node(plan.FILE, 6, 1, 0o644), checksum=True) == plan.COPY
    assert action(Node(plan.FILE, 5, 2, 0o644), checksum=True) == plan.COMPARE
    assert action(Node(plan.SYMLINK, 5, 1)) == plan.COPY
    assert action(Node(plan.DIRECTORY)) == plan.CONFLICT
