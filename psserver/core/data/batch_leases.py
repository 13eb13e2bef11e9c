"""Who has which batch: dealt to a worker, sent to it, not counted yet."""

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any


class BatchLeases:
    """Numbers and their holders, in the order in which they were dealt.

    A number that was dealt lies ready until its worker asks. What was sent is kept until the
    worker says that it has got it: an answer may be lost.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        self._dealt: dict[int, deque[int]] = {}
        self._sent: dict[int, deque[tuple[int, int]]] = {}
        self._received: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def held(self, worker: int) -> list[int]:
        """A worker's numbers, in the order in which they were dealt."""
        return [number for number, holder in self._holders.items() if holder == worker]

    def holds(self, worker: int, number: int) -> bool:
        """Is this number the worker's?"""
        return self._holders.get(number) == worker

    def items(self) -> list[tuple[int, int]]:
        """Numbers and who holds them, in the order in which they were dealt."""
        return list(self._holders.items())

    def ready(self, worker: int) -> Sequence[int]:
        """What lies ready for a worker, in order."""
        return self._dealt.get(worker, ())

    def deal(self, worker: int, number: int) -> None:
        """The number is this worker's."""
        self._holders[number] = worker
        self._dealt.setdefault(worker, deque()).append(number)

    def is_late(self, worker: int, received: int) -> bool:
        """Has this worker said before that it has got more? Then the request was under way for
        long.
        """
        return received < self._received.get(worker, 0)

    def again(self, worker: int, received: int) -> list[int]:
        """What was sent to a worker after the first `received`; those have come, and are
        forgotten here.
        """
        sent = self._sent.setdefault(worker, deque())
        self._received[worker] = received
        while sent and sent[0][0] <= received:
            sent.popleft()
        return [number for _, number in sent]

    def send(self, worker: int, received: int) -> int:
        """The first number that lies ready for a worker goes to it, as its `received` + 1st."""
        number = self._dealt[worker].popleft()
        self._sent[worker].append((received + 1, number))
        return number

    def end(self, worker: int, number: int) -> bool:
        """The number is nobody's any more. False: it was not this worker's."""
        if not self.holds(worker, number):
            return False
        del self._holders[number]
        if number in self.ready(worker):
            self._dealt[worker].remove(number)
        return True

    def forget(self, worker: int) -> None:
        """The worker is gone, and holds nothing."""
        self._dealt.pop(worker, None)
        self._sent.pop(worker, None)
        self._received.pop(worker, None)

    def transfer(self, old: int, new: int) -> None:
        """All that `old` holds lies ready for `new`, in the order in which it was dealt, before
        what lies there.
        """
        mine = self.held(old)
        self.forget(old)
        self._holders.update(dict.fromkeys(mine, new))
        self._dealt[new] = deque([*mine, *self.ready(new)])

    def state(self) -> dict[str, Any]:
        """JSON-ready; `recovered` is the way back. Pairs, because JSON has only strings for
        keys.
        """
        return {
            "leases": [list(pair) for pair in self._holders.items()],
            "dealt": [
                [worker, list(numbers)]
                for worker, numbers in sorted(self._dealt.items())
                if numbers
            ],
            "sent": [
                [worker, [list(pair) for pair in sent]]
                for worker, sent in sorted(self._sent.items())
                if sent
            ],
            "received": [list(pair) for pair in sorted(self._received.items())],
        }

    @staticmethod
    def recovered(state: Mapping[str, Any]) -> "BatchLeases":
        leases = BatchLeases()
        leases._holders = dict(state["leases"])
        leases._dealt = {worker: deque(numbers) for worker, numbers in state["dealt"]}
        leases._sent = {
            worker: deque((place, number) for place, number in sent)
            for worker, sent in state["sent"]
        }
        leases._received = dict(state["received"])
        return leases
