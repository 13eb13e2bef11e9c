"""Tests that run at the same time, and one after the other, do not get each other's ports."""

from contextlib import closing

from tests.support.ports import BLOCK, Ports, free_ports


def test_no_port_is_given_twice() -> None:
    with closing(Ports()) as one, closing(Ports()) as other:  # as two processes
        given = [
            port for _ in range(BLOCK // 4) for ports in (one, other) for port in ports.take(2)
        ]
    assert len(set(given)) == len(given)


def test_ports_follow_one_another() -> None:
    first, *rest = free_ports(4)
    assert rest == [first + 1, first + 2, first + 3]


def test_when_a_block_is_used_up_there_is_another() -> None:
    with closing(Ports()) as ports:
        before, after = ports.take(BLOCK // 2), ports.take(BLOCK // 2)
    assert not set(before) & set(after)
