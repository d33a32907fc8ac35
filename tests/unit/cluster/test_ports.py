from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tools.cluster import ports
from tools.cluster.errors import NoFreePortError
from tools.cluster.ports import PortReservations, is_free


@pytest.fixture
def four_ports() -> range:
    """A range of four ports that are free on this machine."""
    first = next(p for p in range(32100, 32700) if all(is_free(p + i) for i in range(4)))
    return range(first, first + 4)


def test_ports_differ_and_lie_outside_the_ephemeral_range(tmp_path: Path) -> None:
    """No port is given out twice, and none where the kernel places outgoing connections."""
    with PortReservations(tmp_path) as reservations:
        got = [reservations.reserve() for _ in range(50)]
    assert len(set(got)) == 50
    ephemeral = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii")
    assert max(got) < int(ephemeral.split()[0])


def test_consecutive_ports_are_reserved_together(tmp_path: Path, four_ports: range) -> None:
    """A run of ports is reserved whole: what is left does not overlap it."""
    with PortReservations(tmp_path, four_ports) as reservations:
        first = reservations.reserve(3)
        left = reservations.reserve()
    assert {first, first + 1, first + 2, left} == set(four_ports)


def test_port_with_a_listener_is_not_given_out(tmp_path: Path, four_ports: range) -> None:
    """A port that somebody listens on, on one address only, is passed over."""
    with (
        socket.create_server(("127.0.0.1", four_ports[1])),
        PortReservations(tmp_path, four_ports) as reservations,
    ):
        got = {reservations.reserve() for _ in range(3)}
        with pytest.raises(NoFreePortError, match=str(four_ports[0])):
            reservations.reserve()
    assert got == set(four_ports) - {four_ports[1]}


def test_other_process_cannot_reserve_the_same_port(tmp_path: Path, four_ports: range) -> None:
    """Two processes share the ports between them, and a killed one's are free again."""
    program = (
        "import pathlib, sys, time\n"
        "from tools.cluster.ports import PortReservations\n"
        "folder, first, end = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])\n"
        "mine = PortReservations(folder, range(first, end))\n"
        "print(mine.reserve(), mine.reserve(), flush=True); time.sleep(600)\n"
    )
    arguments = [str(tmp_path), str(four_ports.start), str(four_ports.stop)]
    with (
        subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(ports.__file__).parents[2],
        ) as other,
        PortReservations(tmp_path, four_ports) as reservations,
    ):
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        try:
            assert {reservations.reserve(), reservations.reserve()} == set(four_ports) - theirs
            with pytest.raises(NoFreePortError):
                reservations.reserve()
        finally:
            other.kill()
        other.wait()
        assert {reservations.reserve(), reservations.reserve()} == theirs


def test_released_ports_can_be_reserved_again(tmp_path: Path, four_ports: range) -> None:
    """Leaving the block gives every port back."""
    with PortReservations(tmp_path, four_ports) as first:
        first.reserve(4)
    with PortReservations(tmp_path, four_ports) as second:
        assert second.reserve(4) == four_ports[0]
