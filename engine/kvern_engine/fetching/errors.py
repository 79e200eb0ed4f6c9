"""What goes wrong with a download, in words that the operator tells apart (kvern_operator/crashes.py reads them)."""

from typing import Literal

Reason = Literal["NotFound", "AccessDenied", "NoRoom", "Failed"]

_WORDS: dict[Reason, str] = {
    "NotFound": "not found",
    "AccessDenied": "access denied",
    "NoRoom": "no room",
    "Failed": "download failed",
}


class FetchError(ValueError):
    """A model could not be brought here, or what came is not what was asked for; the text is for the user."""


class SourceError(FetchError):
    """The same for hf:// and s3://, with a reason. Asking again at once will not do."""

    def __init__(self, reason: Reason, uri: str, text: str) -> None:
        super().__init__(f"{uri}: {_WORDS[reason]}: {text}")
        self.reason = reason


class PassingError(Exception):
    """The network or the server failed in a way that passes: worth asking again after `wait` seconds, if given.
    `restart`: from the first byte, since those that are here are none of the server's."""

    def __init__(self, text: str, wait: float | None = None, *, restart: bool = False) -> None:
        super().__init__(text)
        self.wait, self.restart = wait, restart
