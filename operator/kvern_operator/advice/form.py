"""The form of an advice, and phrases that several share."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Advice:
    """`where`: the conditions that carry the reason, or whose word it is. `short`: what to do, in one sentence without
    a full stop. `steps`: the same with commands, the likeliest first."""

    kind: Literal["fine", "passing", "trouble"]
    where: str
    meaning: str
    short: str = ""
    steps: tuple[str, ...] = ()


LOGS = "`kvern logs {name} --previous` shows the whole of what it said before it ended"
APPLY = "change the manifest and apply it again; replicas that answer stay until the new ones do"
IMAGE = (
    "compare the name in the message with spec.engine.image (where that is not set, with the chart's images.engine)",
    "a private registry needs a pull secret: the chart's value images.pullSecrets",
    "the registry's own words: `{k} describe pod {pod}`",
)
