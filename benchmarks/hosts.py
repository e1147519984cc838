"""Several hosts on one Linux machine: network namespaces, wired to a bridge, with shaped links.

Each host has one interface, `eth0`, to a bridge in a namespace of its own, so nothing leaves the
machine. Both ends of each wire are shaped by a token bucket, up and down apart: full duplex. All of
it lives in a user namespace that `enter` starts this process in again; it is gone with the last
process. Needs iproute2, and a kernel that lets the user make such namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import psutil

INTERFACE = "eth0"
SWITCH = "loco-switch"
_INSIDE = "LOCO_BENCHMARK_NAMESPACE"
_UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--net", "--mount", "--pid"),
    *("--fork", "--mount-proc", "--kill-child"),
)
# ip keeps its namespaces in /run/netns, which has to be ours.
_PREPARE = 'mount -t tmpfs none /run && mkdir -p /run/netns && ip link set lo up && exec "$@"'


def host(index: int) -> str:
    """Return the namespace of a host."""
    return f"loco-host{index}"


def address(index: int) -> str:
    """Return the IPv4 address of a host."""
    return f"10.77.0.{index + 1}"


def is_inside() -> bool:
    """Whether `enter` started this process."""
    return _INSIDE in os.environ


def can_enter() -> bool:
    """Whether this machine lets us make the namespaces."""
    if not all(shutil.which(tool) for tool in ("unshare", "ip", "tc")):
        return False
    probe = [*_UNSHARE, "sh", "-c", _PREPARE, "sh", "ip", "netns", "add", SWITCH]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


def enter(command: Sequence[str]) -> None:
    """Become `command`, as root of new user, network, mount and process namespaces."""
    os.environ[_INSIDE] = "1"
    os.execvp(_UNSHARE[0], [*_UNSHARE, "sh", "-c", _PREPARE, "sh", *command])


def build(count: int) -> None:
    """Make the hosts and the bridge, not shaped yet.

    Raises: subprocess.CalledProcessError if a command fails.
    """
    _run("ip", "netns", "add", SWITCH)
    _run("ip", "-n", SWITCH, "link", "add", "bridge", "type", "bridge", "stp_state", "0")
    _run("ip", "-n", SWITCH, "link", "set", "bridge", "up")
    for index in range(count):
        name = host(index)
        _run("ip", "netns", "add", name)
        _run("ip", "-n", name, "link", "set", "lo", "up")
        peer = ("peer", "name", _port(index), "netns", SWITCH)
        _run("ip", "-n", name, "link", "add", INTERFACE, "type", "veth", *peer)
        _run("ip", "-n", SWITCH, "link", "set", _port(index), "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{address(index)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")


def shape(index: int, rate: str) -> None:
    """Give a host's link a rate in both directions, as tc writes it: "200mbit".

    The bucket holds 128 KiB: two of the largest packets that the kernel segments late, and at least
    a millisecond of 1 Gbit/s. Up to 100 ms of the rate wait in the queue.
    """
    bucket = ("root", "tbf", "rate", rate, "burst", "128kb", "latency", "100ms")
    for space, device in ((host(index), INTERFACE), (SWITCH, _port(index))):
        _run("ip", "netns", "exec", space, "tc", "qdisc", "replace", "dev", device, *bucket)


def bits_per_second(rate: str) -> float:
    """Return a rate such as 200mbit as a number.

    Raises: ValueError if it is no such rate.
    """
    for unit, factor in (("kbit", 1e3), ("mbit", 1e6), ("gbit", 1e9)):
        number = rate.removesuffix(unit)
        if number != rate and number.replace(".", "", 1).isdigit() and float(number) > 0:
            return float(number) * factor
    raise ValueError(f"a rate is a number of kbit, mbit or gbit, such as 200mbit; got {rate!r}")


def inside(index: int, command: Sequence[str]) -> list[str]:
    """Return `command` as it runs on a host."""
    return ["ip", "netns", "exec", host(index), *command]


def sent_bytes(interface: str) -> int:
    """Return the bytes that an interface of this host has sent, headers included."""
    return psutil.net_io_counters(pernic=True)[interface].bytes_sent


def _port(index: int) -> str:
    return f"port{index}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command)}: {done.stderr.strip()}", file=sys.stderr)
        done.check_returncode()
