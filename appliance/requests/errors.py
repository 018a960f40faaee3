"""How a request ends that somebody else ended."""

from __future__ import annotations


class RequestCancelled(Exception):
    """An administrator, or a key's owner, ended it."""

    def __init__(self, by: str) -> None:
        super().__init__(f"This request was cancelled by {by}")
