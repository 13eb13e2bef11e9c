"""What rounds look up in the members: it is kept up to date, because a search at each push would
cost more with each worker.
"""

from psserver.core.workers.members import Member, WorkerState
from psserver.core.workers.smallest import Smallest

REGISTERED = (WorkerState.ACTIVE, WorkerState.IDLE)


class MemberIndex:
    """Changes state, clock and awaited loop of members, and keeps what depends on them.

    Attributes:
        registered: The active and idle members in worker order; None: not known.
        waiting: The members that wait for data, by loop and number.
        revision: Changes with the state, clock or awaited loop of any member.
        changed: Members whose state or clock has changed, by number; the reader clears it.
        answered: Workers whose wait for data or in a collective call has ended; the reader clears
            it.
        active_clocks: The clocks of the active members.
    """

    def __init__(self) -> None:
        self.registered: list[Member] | None = None
        self.waiting: dict[int, dict[int, Member]] = {}
        self.revision = 0
        self.changed: dict[int, Member] = {}
        self.answered: set[int] = set()
        self.active_clocks = Smallest()

    def add(self, member: Member) -> None:
        """Add a member that was a member before a restart."""
        if member.state is WorkerState.ACTIVE:
            self.active_clocks.add(member.clock)
        if member.waiting is not None:
            self.wait_for_data(member, member.waiting)
        self.changed[member.worker] = member

    def set_state(self, member: Member, state: WorkerState) -> None:
        """Change the state of a current member."""
        self.revision += 1
        if (member.state in REGISTERED) is not (state in REGISTERED):
            self.registered = None
        if member.state is WorkerState.ACTIVE:
            self.active_clocks.remove(member.clock)
        member.state = state
        if state is WorkerState.ACTIVE:
            self.active_clocks.add(member.clock)
        self.changed[member.worker] = member

    def set_clock(self, member: Member, clock: int) -> None:
        """Change the clock of a current member."""
        self.revision += 1
        if member.state is WorkerState.ACTIVE:
            self.active_clocks.remove(member.clock)
            self.active_clocks.add(clock)
        member.clock = clock
        self.changed[member.worker] = member

    def wait_for_data(self, member: Member, loop: int) -> None:
        """Record that a member waits for data of a loop."""
        if member.worker not in self.waiting.get(loop, ()):
            self.stop_waiting(member)
            self.revision += 1
            member.waiting = loop
            self.waiting.setdefault(loop, {})[member.worker] = member
        self.answered.discard(member.worker)

    def stop_waiting(self, member: Member) -> None:
        """Record that a member does not wait for data any more."""
        loop, member.waiting = member.waiting, None
        if loop is not None and loop in self.waiting:
            self.revision += 1
            self.answered.add(member.worker)
            self.waiting[loop].pop(member.worker, None)
            if not self.waiting[loop]:
                del self.waiting[loop]

    def remove(self, member: Member, state: WorkerState) -> None:
        """Let a member depart."""
        self.stop_waiting(member)
        self.set_state(member, state)
        del self.changed[member.worker]
