"""A crash, or a pod without a place -> a reason that says more than the kubelet's word. Pure, standard library only.

Takes an engine's last line; tests compare its sentences with those that the engine really says.
"""

import re

_CRASHED = ("CrashLoopBackOff", "Error")
_WRONG_WORDS = 2  # exit status of `kvern` where its arguments are wrong
# The same words whoever fetches, the engine or the Job before it (kvern_engine/fetching/errors.py).
_FETCHING = (
    ("ModelNotFound", r"error: (hf|s3)://\S+: not found: "),
    ("ModelAccessDenied", r"error: (hf|s3)://\S+: access denied: "),
    ("CacheFull", r"error: (hf|s3)://\S+: no room: "),
    ("DownloadFailed", r"error: (hf|s3)://\S+: download failed: "),
)
_LINES = (
    *_FETCHING,
    ("ModelNotFound", r"error: (model '|no built-in model|builtin://|hf://)"),
    ("ModelDoesNotFit", r"[Tt]o serve at least one request|too little memory for the (weights|KV cache)"),
    ("OutOfMemory", r"too little memory|out of memory"),
)
_NOT_MADE = ("CreateContainerError", "RunContainerError", "StartError")
# A runtime that knows no image volumes sees a mount without a source.
_NO_IMAGE_VOLUMES = re.compile(r'image volume|failed to (mkdir|stat) ""', re.I)
_NO_CLAIM = re.compile(r"persistentvolumeclaim", re.I)


def crash_reason(component: str, reason: str, message: str, exit_code: int | None, last_log: str) -> str:
    """The finer reason where there is one, else `reason`. `last_log` is the telling line of the container's log."""
    if reason == "Unschedulable" and _NO_CLAIM.search(message):
        return "ClaimNotBound"
    if reason in _NOT_MADE and component == "engine" and _NO_IMAGE_VOLUMES.search(message):
        return "ImageVolumesNotSupported"
    if reason not in _CRASHED or component not in ("engine", "fetch"):
        return reason
    if exit_code == _WRONG_WORDS and last_log.startswith("kvern "):
        return "BadArguments"
    return next((finer for finer, words in _LINES if re.search(words, last_log)), reason)
