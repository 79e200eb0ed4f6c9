"""Which engine gets a request: the least loaded one, unless another has seen the prompt's beginning and is not much
busier. Pure: no sockets, no clock.

Load counts tokens: the prompt's and the most that may be generated, over this API server's requests in flight. A prefix
is known by hashes of its first 1, 2, 4, ... blocks; the longest one seen decides. The bound keeps one hot prefix from
filling one engine while others idle (consistent hashing with bounded loads, Mirrokni et al., arXiv 1608.01350).
"""

from collections import OrderedDict
from collections.abc import Sequence

MAX_KEYS = 65_536
MAX_PREFIX_BLOCKS = 64


def prefix_keys(token_ids: Sequence[int], block_size: int, salt: str = "") -> list[int]:
    """Hashes of the first 1, 2, 4, ... full blocks, shortest first. Local to this process, so any hash will do."""
    keys, blocks = [], 1
    while blocks <= MAX_PREFIX_BLOCKS and blocks * block_size <= len(token_ids):
        keys.append(hash((salt, tuple(token_ids[: blocks * block_size]))))
        blocks *= 2
    return keys


class Balancer:
    """Remembers which engine saw which prefix (LRU) and how many tokens each engine has in flight."""

    def __init__(self, num_engines: int, factor: float = 1.25, slack: int = 8192) -> None:
        self.load = [0] * num_engines  # tokens in flight
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._factor, self._slack = factor, slack
        self._turn = 0

    def choose(self, alive: Sequence[int], keys: Sequence[int]) -> int:
        """One of `alive` (not empty); notes the prefix as seen there."""
        least = min(self.load[e] for e in alive)
        bound = least * self._factor + self._slack
        chosen = None
        for key in reversed(keys):
            engine = self._seen.get(key)
            if engine is not None and engine in alive and self.load[engine] <= bound:
                chosen = engine
                break
        if chosen is None:
            # Ties go round, so that an idle pod spreads its first requests.
            ties = [e for e in alive if self.load[e] == least]
            chosen = ties[self._turn % len(ties)]
            self._turn += 1
        for key in keys:
            self._seen[key] = chosen
            self._seen.move_to_end(key)
        while len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)
        return chosen

    def add(self, engine: int, tokens: int) -> None:
        self.load[engine] += tokens

    def remove(self, engine: int, tokens: int) -> None:
        self.load[engine] = max(0, self.load[engine] - tokens)

    def forget(self, engine: int) -> None:
        """The engine is gone, and its cache with it."""
        self.load[engine] = 0
        for key in [k for k, e in self._seen.items() if e == engine]:
            del self._seen[key]
