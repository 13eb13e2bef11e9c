"""Numbers of pushes."""

from psworker.core.push_sequence import PushSequence


def test_numbers_count_from_one() -> None:
    pushes = PushSequence()
    numbers = []
    for _ in range(3):
        numbers.append(pushes.open())
        pushes.close()

    assert numbers == [(1, False), (2, False), (3, False)]


def test_a_repeated_push_keeps_its_number() -> None:
    pushes = PushSequence()
    pushes.open()
    pushes.fail(b"gradient")
    assert pushes.in_doubt
    assert pushes.open(b"gradient") == (1, True)
    pushes.fail(b"gradient")
    assert pushes.open(b"gradient") == (1, True)
    pushes.close()

    assert not pushes.in_doubt
    assert pushes.open() == (2, False)


def test_another_push_after_a_failure_gets_a_new_number() -> None:
    pushes = PushSequence()
    pushes.open()
    pushes.fail(b"gradient")

    assert pushes.open(b"another") == (2, False)
    assert not pushes.in_doubt
