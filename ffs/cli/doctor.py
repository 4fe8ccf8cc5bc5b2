"""`ffs doctor`: what this host lacks that ffs could use. docs/rdma.md, Looking at a host."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ffs.cli.parsing import Commands, command, print_json

if TYPE_CHECKING:
    from ffs.cli.host.findings import Finding


def add_commands(commands: Commands) -> None:
    doctor = command(
        commands,
        "doctor",
        run_doctor,
        "look at this host for what ffs needs or could use; nothing is changed",
        json_option=True,
        epilog="exit status: 0; 1 where something is bad: a part of ffs can't work here",
    )
    doctor.add_argument(
        "path", nargs="*", metavar="PATH", help="a directory or device for data: does it take O_DIRECT?"
    )


def run_doctor(args: argparse.Namespace) -> int:
    from ffs.cli.host.facts import gather
    from ffs.cli.host.findings import BAD, judge, worst

    findings = judge(gather(tuple(args.path)))
    gravest = worst(findings)
    if args.json:
        print_json({"worst": gravest, "findings": [finding_fields(finding) for finding in findings]})
    else:
        print("\n".join(line for finding in findings for line in finding_lines(finding)))
    return 1 if gravest == BAD else 0


def finding_fields(finding: Finding) -> dict[str, str]:
    return {
        "level": finding.level,
        "subject": finding.subject,
        "text": finding.text,
        "way_out": finding.way_out,
    }


def finding_lines(finding: Finding) -> list[str]:
    lines = [f"{finding.level:<5} {finding.subject:<14} {finding.text}"]
    if finding.way_out:
        lines.append(f"{'':<20} -> {finding.way_out}")
    return lines
