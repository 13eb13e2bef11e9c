"""The smallest of a changing collection of numbers."""

import random

from psserver.core.workers.smallest import SPARE_COUNT, Smallest


def test_it_is_the_smallest_of_the_numbers_that_remain() -> None:
    rng, numbers, smallest = random.Random(1), list[int](), Smallest()
    for _ in range(5000):
        if numbers and rng.random() < 0.5:
            number = numbers.pop(rng.randrange(len(numbers)))
            smallest.remove(number)
        else:
            numbers.append(rng.randrange(50))
            smallest.add(numbers[-1])
        if rng.random() < 0.2:
            assert smallest.value == min(numbers, default=None)
        assert smallest.count == len(numbers)


def test_removed_numbers_take_no_memory_if_the_smallest_is_never_read() -> None:
    smallest = Smallest()
    smallest.add(0)
    for number in range(1, 10_000):
        smallest.add(number)
        smallest.remove(number)

    assert len(smallest._heap) <= SPARE_COUNT + 3
    assert smallest.value == 0
