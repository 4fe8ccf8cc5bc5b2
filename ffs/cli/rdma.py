"""`ffs rdma devices`: what this host has for RDMA. docs/rdma.md, Looking at a host."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from ffs.cli.parsing import Commands, command, print_json

if TYPE_CHECKING:
    from ffs.cli.host.rdma import Port, RdmaDevice
    from ffs.cli.host.verbs import Verbs


def add_commands(commands: Commands) -> None:
    rdma = commands.add_parser(
        "rdma", help="look at this host's RDMA devices", description="RDMA on this host, without a cluster."
    )
    rdma.set_defaults(run=lambda args: _usage(rdma))
    verbs = rdma.add_subparsers(dest="verb", metavar="VERB")
    command(
        verbs,
        "devices",
        run_devices,
        "devices, ports, links, GIDs and MTUs",
        json_option=True,
        epilog="exit status: 0, also where there are none",
    )


def _usage(parser: argparse.ArgumentParser) -> int:
    parser.print_help()
    return 2


def run_devices(args: argparse.Namespace) -> int:
    from ffs.cli.host.rdma import read_devices
    from ffs.cli.host.verbs import query

    devices, verbs = read_devices(), query()
    if args.json:
        print_json(device_fields(devices, verbs))
    else:
        print("\n".join(device_lines(devices, verbs)))
    return 0


def device_fields(devices: tuple[RdmaDevice, ...], verbs: Verbs) -> dict[str, object]:
    """All of it. `mtu` is null where verbs didn't say; `mtu_by_netdev` is reckoned from the interface's."""
    opened = {each.name: each for each in verbs.devices}
    out = []
    for device in devices:
        seen = opened.get(device.name)
        out.append(
            {
                "name": device.name,
                "firmware": device.firmware,
                "node_guid": device.node_guid,
                "board": device.board,
                "numa": device.numa,
                "uverbs": device.uverbs,
                "verbs_error": seen.error if seen else None,
                "max_qp": seen.max_qp if seen and not seen.error else None,
                "max_mr_size": seen.max_mr_size if seen and not seen.error else None,
                "ports": [
                    {
                        "port": port.number,
                        "state": port.state,
                        "physical": port.physical,
                        "link_layer": port.link_layer,
                        "rate": port.rate,
                        "mtu": (seen.mtu(port.number) or None) if seen else None,
                        "mtu_by_netdev": port.mtu_by_netdev or None,
                        "netdev": port.netdev,
                        "netdev_mtu": port.netdev_mtu,
                        "losses": dict(port.losses),
                        "gids": [
                            {"index": g.index, "gid": g.gid, "kind": g.kind, "netdev": g.netdev}
                            for g in port.gids
                        ],
                    }
                    for port in device.ports
                ],
            }
        )
    return {"verbs": verbs.state, "verbs_reason": verbs.reason, "devices": out}


def device_lines(devices: tuple[RdmaDevice, ...], verbs: Verbs) -> list[str]:
    if not devices:
        return [f"no RDMA devices: data goes over TCP and local sockets ({verbs.reason})"]
    opened = {each.name: each for each in verbs.devices}
    lines = []
    for device in devices:
        numa = f", NUMA node {device.numa}" if device.numa >= 0 else ""
        lines.append(f"{device.name}: {device.board or 'unknown board'}, firmware {device.firmware}{numa}")
        seen = opened.get(device.name)
        if seen is not None and seen.error:
            lines.append(f"  can't be opened: {seen.error}")
        elif verbs.state == "ok" and seen is None:
            lines.append("  verbs don't list it: install its provider (ibverbs-providers)")
        for port in device.ports:
            lines.extend(_port_lines(port, seen.mtu(port.number) if seen else 0))
    if verbs.state != "ok":
        lines.append(f"({verbs.reason})")
    return lines


def _port_lines(port: Port, mtu: int) -> list[str]:
    where = f" on {port.netdev} (MTU {port.netdev_mtu})" if port.netdev else ""
    if mtu:
        size = f", MTU {mtu}"
    else:
        size = f", MTU {port.mtu_by_netdev} by the interface's" if port.mtu_by_netdev else ""
    lines = [f"  port {port.number}: {port.state}, {port.link_layer} {port.rate}{size}{where}"]
    lines += [f"    gid {gid.index}: {gid.gid} ({gid.kind or 'unknown kind'})" for gid in port.gids]
    if port.losses:
        lines.append("    " + ", ".join(f"{name} {count}" for name, count in port.losses))
    return lines
