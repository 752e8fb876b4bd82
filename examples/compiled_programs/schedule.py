"""How long kernels wait for collectives, by where XLA lets each begin and end.

Kernels run one after the other, and so do collectives, beside them: XLA gives a GPU one stream for
each. A collective begins with its ``-start``, or when the one before it ends; kernels wait at its
``-done``. One that XLA marks as synchronous is waited for where it begins. It is assumed that
neither slows the other down.
"""

import re

from examples.compiled_programs.hlo import Instruction

_SYNCHRONOUS = re.compile(r'"is_sync":true')
_CONTROL = ("while", "conditional", "call")


class Timeline:
    """The times of one computation's instructions, which are added in the order of the program."""

    def __init__(self) -> None:
        self.now = 0.0  # when the next kernel may begin
        self.free = 0.0  # when the next collective may
        self.ends: dict[str, float] = {}

    def add(self, x: Instruction, busy: float, sent: float, waited: float) -> float:
        """Adds an instruction; returns the seconds that kernels wait for collectives because of it.

        Its kernels take `busy` seconds and its collectives `sent`. In a loop or a branch, kernels
        have `waited` for these.
        """
        if x.opcode in _CONTROL:
            self.now += busy + waited
            self.free = max(self.free, self.now) if sent else self.free
            return waited
        self.now += busy
        if sent:
            self.free = max(self.free, self.now) + sent
            self.ends[x.name] = self.free
            if x.opcode.endswith("-start") and not _SYNCHRONOUS.search(x.attributes):
                return 0.0
            return self._wait(x.name)
        return self._wait(x.operands[0]) if x.opcode.endswith("-done") else 0.0

    def _wait(self, name: str) -> float:
        waited = max(0.0, self.ends.get(name, 0.0) - self.now)
        self.now += waited
        return waited
