"""How a router ends: until when it takes connections, which idle ones it closes, when it goes. Pure.

Two things let a client meet a closed door though another router is there. Nodes forget a router some time after it was
told to end, one later than the other: what still arrives says that one has not. And who has a connection to it may use
that again at any moment, until told otherwise by `Connection: close`; answers that had begun before could not say so.
"""

from __future__ import annotations

from dataclasses import dataclass

# Who still connects then has this router's own address and would never stop. What is taken must have time to finish.
ACCEPT_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Ending:
    """What was set, in seconds. A delay of 0: nobody sends clients elsewhere, so there is nothing to wait for but
    requests."""

    delay: float  # shutdown-delay: at least for so long connections are taken
    timeout: float  # drain-timeout: of all of it
    idle: float  # drain-idle: a connection that nobody has used for so long is taken to be forgotten by its client

    @property
    def idle_seconds(self) -> float:
        """For how long a connection must have been idle to be closed."""
        return self.idle if self.delay else 0.0

    def accepts(self, age: float) -> bool:
        """Whether new connections are taken, and kept ones stay open after an answer, so many seconds after the
        signal."""
        return self.delay > 0 and age < max(self.delay, min(ACCEPT_SECONDS, self.timeout / 2))

    def over(self, age: float, quiet: float, connections: int) -> bool:
        """Whether the router may go. `quiet`: seconds since the last request; `connections`: open ones, idle or not."""
        if age >= max(self.timeout, self.delay):
            return True
        forgotten = quiet >= self.delay or not self.accepts(age)
        return age >= self.delay and forgotten and connections == 0
