"""Concurrent and successive tests get different ports."""

from contextlib import closing

from tests.support.ports import BLOCK, Ports, free_ports


def test_each_port_is_returned_once() -> None:
    with closing(Ports()) as one, closing(Ports()) as other:  # as two processes
        given = [
            port for _ in range(BLOCK // 4) for ports in (one, other) for port in ports.take(2)
        ]
    assert len(set(given)) == len(given)


def test_ports_are_consecutive() -> None:
    first, *rest = free_ports(4)
    assert rest == [first + 1, first + 2, first + 3]


def test_a_used_block_is_followed_by_another_block() -> None:
    with closing(Ports()) as ports:
        before, after = ports.take(BLOCK // 2), ports.take(BLOCK // 2)
    assert not set(before) & set(after)
