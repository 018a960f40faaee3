"""What one look at the machine has found."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "failure"]


class Finding(msgspec.Struct, frozen=True):
    """`remedy` is one sentence that says what to do; empty where nothing is to be done."""

    check: str
    status: Status
    text: str
    remedy: str = ""


def fine(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def warning(check: str, text: str, remedy: str) -> Finding:
    """Something works worse than it could, or may surprise."""
    return Finding(check, "warning", text, remedy)


def failure(check: str, text: str, remedy: str) -> Finding:
    """Something does not work, or will not for long."""
    return Finding(check, "failure", text, remedy)
