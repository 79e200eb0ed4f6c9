"""What can keep a command from looking at a service. Texts are for people: what is wrong, what would be right."""

from typing import Literal

Kind = Literal["unreachable", "unauthorized", "forbidden", "missing", "no-kind", "gone", "refused"]


class LookError(Exception):
    """The base of all of them."""


class NotFound(LookError):
    """There is no such service where it was looked for."""


class KubeconfigError(LookError):
    """There is no way to a cluster in what was given."""


class KubeError(LookError):
    """The API server said no, or nothing."""

    def __init__(self, kind: Kind, text: str) -> None:
        super().__init__(text)
        self.kind = kind
