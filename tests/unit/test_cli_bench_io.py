"""The matrix of `ffs bench io`: its names, what is selected, how a line's figure comes about, the plot."""

from __future__ import annotations

from errno import ENOMEM
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ffs.cli.benchmark import io_cases
from ffs.cli.benchmark.io_floors import Floors, result_of
from ffs.cli.benchmark.io_matrix import CASES, COMPARED, GOALS, NAMES, IoCase, Wanted, select
from ffs.cli.benchmark.plot import check_name, panels, svg, write_plot
from ffs.cli.benchmark.protocol import Round, Slice
from ffs.cli.benchmark.report import Result
from ffs.errors import FfsError, InvalidArgument

OTHERS = ("meta-create", "meta-stat")


def test_the_matrix_has_every_combination_once() -> None:
    assert len(set(NAMES)) == len(NAMES)
    for op in ("read", "write"):
        for size in ("4k", "64k", "1m", "4m"):
            for depth in (1, 16, 128):
                for place in ("local-disk", "tcp-tmpfs", "local-null", "tcp-disk-r3"):
                    assert f"{op}-{size}-qd{depth}-{place}" in NAMES
    assert set(GOALS) <= set(NAMES)
    assert set(COMPARED) <= set(NAMES)


def test_the_cases_of_a_device_follow_each_other() -> None:
    devices = [case.device for case in CASES]
    assert devices == sorted(devices, key=["disk", "tmpfs", "null"].index)


def test_without_a_choice_the_cases_with_goals_are_run() -> None:
    cases, beside = select(Wanted(), OTHERS)
    assert {case.name for case in cases} == {*GOALS, *COMPARED}
    assert beside == frozenset(OTHERS)
    assert all((case.goal is not None) == (case.name in GOALS) for case in cases)


@pytest.mark.parametrize(
    ("wanted", "names", "beside"),
    [
        (Wanted(only=("read-4m-qd1-*-null",)), {"read-4m-qd1-local-null", "read-4m-qd1-tcp-null"}, set()),
        (Wanted(only=("meta-c*",)), set(), {"meta-create"}),
        (
            Wanted(devices=("tmpfs",), sizes=("64k",)),
            {"read-64k-qd16-tcp-tmpfs"},
            set(),
        ),
        (
            Wanted(all=True, ops=("write",), sizes=("4k",), depths=(128,), replicas=(3,), devices=("disk",)),
            {"write-4k-qd128-local-disk-r3", "write-4k-qd128-tcp-disk-r3"},
            set(),
        ),
        (
            Wanted(only=("*-1m-*",), transports=("tcp",), checksums=(False,), devices=("null",)),
            {"read-1m-qd16-tcp-null-plain", "write-1m-qd16-tcp-null-plain"},
            set(),
        ),
    ],
)
def test_selection(wanted: Wanted, names: set[str], beside: set[str]) -> None:
    cases, others = select(wanted, OTHERS)
    assert {case.name for case in cases} == names
    assert others == beside


def test_all_is_all() -> None:
    cases, beside = select(Wanted(all=True), OTHERS)
    assert cases == CASES
    assert beside == frozenset(OTHERS)


@pytest.mark.parametrize(
    ("wanted", "word"),
    [
        (Wanted(only=("read-1m-qd16-local-disk", "swim-*")), "swim"),
        (Wanted(sizes=("4m",)), "--all"),
        (Wanted(all=True, ops=("latency",), sizes=("1m",)), "no case"),
    ],
)
def test_what_names_no_case_is_refused(wanted: Wanted, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        select(wanted, OTHERS)


@pytest.mark.parametrize(
    ("name", "floors", "crc", "share"),
    [
        ("read-1m-qd16-local-disk", ("device",), True, 1),
        ("read-4k-qd128-local-disk", ("device",), False, 1),
        ("read-64k-qd16-tcp-tmpfs", ("device", "socket"), True, 1),
        ("read-1m-qd16-tcp-null", ("socket",), True, 1),
        ("read-1m-qd16-local-null", ("message",), True, 1),
        ("read-1m-qd16-local-disk-plain", ("device",), False, 1),
        ("write-4k-qd16-tcp-disk", ("device", "socket"), True, 1),
        ("write-1m-qd16-local-disk-r3", ("device",), True, 1 / 3),
        ("latency-4k-qd1-tcp-disk", ("device", "message"), False, 1),
    ],
)
def test_floors(name: str, floors: tuple[str, ...], crc: bool, share: float) -> None:
    case = CASES[NAMES.index(name)]
    assert (case.floors, case.crc, case.share) == (floors, crc, share)


def _floors(case: IoCase, count: int) -> Floors:
    return Floors((*case.floors, *case.floors)[:count], (), len(case.floors))


def test_the_figure_is_against_the_slowest_floor_and_the_plain_one_is_beside() -> None:
    case = IoCase("read", "1m", 16, "tcp", "tmpfs")
    gigabyte = 1e9
    rounds = [Round(Slice(4 * gigabyte, 1), tuple(Slice(n * gigabyte, 1) for n in (8, 5, 16, 10)))] * 3
    result = result_of(case, rounds, _floors(case, 4), {"client_us": 2.0}, noisy=False)
    assert (result.ffs, result.floor) == (4, 5)
    assert result.ratio == pytest.approx(0.8)
    assert result.more["plain_ratio"] == 0.4
    assert (result.more["device_floor"], result.more["socket_floor"]) == (8, 5)
    assert (result.more["client_us"], result.more["size_bytes"], result.goal) == (2.0, 1 << 20, 0.90)
    assert not result.ok


def test_a_latency_may_have_the_devices_and_some_round_trips() -> None:
    case = IoCase("latency", "4k", 1, "local", "disk")

    def taking(us: float) -> Slice:
        return Slice(case.block_bytes * 1000, us * 1000 / 1e6)

    slow = Round(taking(220), (taking(50), taking(50)))  # 50 + 1.2 * 50 = 110
    result = result_of(case, [slow] * 3, _floors(case, 2), {}, noisy=False)
    assert result.ffs == pytest.approx(220)
    assert result.floor == pytest.approx(110)
    assert result.ratio == pytest.approx(0.5)
    assert not result.ok
    fast = Round(taking(100), (taking(50), taking(50)))
    assert result_of(case, [fast], _floors(case, 2), {}, noisy=False).ok


def test_requests_are_counted_by_number() -> None:
    case = CASES[NAMES.index("requests-4k-qd4096-local-null")]
    rounds = [Round(Slice(4096 * 2e6, 1), (Slice(4096 * 4e6, 1),))]
    result = result_of(case, rounds, _floors(case, 1), {}, noisy=False)
    assert (result.ffs, result.unit, result.goal_of, result.ok) == (2e6, "op/s", "ffs", True)


def test_memory_is_in_huge_pages_only_if_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, bool]] = []

    def iov(size: int, hugepages: bool = False) -> int:
        asked.append((size, hugepages))
        if hugepages and size > 2 << 20:
            raise FfsError("none", errno=ENOMEM)
        return size

    monkeypatch.setattr(io_cases, "Iov", iov)
    io_cases.memory(5, huge_pages=False)
    io_cases.memory(5, huge_pages=True)
    with pytest.raises(FfsError, match="none"):
        io_cases.memory(3 << 20, huge_pages=True)
    assert asked == [(5, False), (2 << 20, True), (4 << 20, True)]


def _measured() -> list[Result]:
    rows = []
    for name, ratio in (
        ("read-4k-qd16-local-disk", 0.5),
        ("read-1m-qd16-local-disk", 0.7),
        ("write-1m-qd16-local-disk-r3", 0.9),
        ("read-1m-qd16-tcp-null-plain", 4.5),
    ):
        case = CASES[NAMES.index(name)]
        rounds = [Round(Slice(ratio * case.share, 1), (Slice(1, 1),) * len(case.floors))]
        rows.append(result_of(case, rounds, _floors(case, len(case.floors)), {}, noisy=False))
    return [Result("noise", 1, 1, 1, "GB/s", 3, None), *rows, Result("meta-stat", 1, 1, 1, "op/s", 3, 9)]


def test_the_plot_has_a_panel_a_place_a_line_a_series_and_rings_what_is_below() -> None:
    found = panels(_measured())
    assert list(found) == [("disk", "local"), ("null", "tcp")]
    assert [line.label for line in found["disk", "local"]] == ["read QD16", "write QD16, 3 copies"]
    assert found["disk", "local"][0].points == ((4096, 0.5, None), (1 << 20, 0.7, 0.95))
    drawing = svg(_measured())
    tree = ElementTree.fromstring(drawing)
    names = [element.tag.rpartition("}")[2] for element in tree.iter()]
    assert names.count("polyline") == 1
    assert names.count("title") == 4
    assert drawing.count('r="7"') == 1 + 1  # the read of 1 MiB, and the legend's
    assert "4.500" in drawing
    height = float(tree.attrib["height"])
    for circle in tree.iter("{http://www.w3.org/2000/svg}circle"):
        assert 0 < float(circle.attrib["cy"]) < height  # what is beyond the scale stays at its edge


def test_a_plot_is_a_page_or_a_drawing(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"\.svg or \.html"):
        check_name(tmp_path / "plot.png")
    for name, begin in (("a.svg", "<svg "), ("a.html", "<!doctype html>")):
        check_name(tmp_path / name)
        write_plot(tmp_path / name, _measured())
        text = (tmp_path / name).read_text()
        assert text.startswith(begin)
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")  # nothing is fetched


def test_a_plot_of_nothing_is_empty_and_whole() -> None:
    ElementTree.fromstring(svg([]))


@pytest.mark.parametrize(
    ("depth", "block_bytes", "held"),
    [(1, 1 << 20, 1), (16, 64 << 10, 32), (128, 4 << 10, 256), (128, 1 << 20, 192), (128, 4 << 20, 144)],
)
def test_a_ring_holds_twice_what_is_in_flight_in_bounded_memory(
    depth: int, block_bytes: int, held: int
) -> None:
    assert io_cases.held_at(depth, block_bytes) == held
