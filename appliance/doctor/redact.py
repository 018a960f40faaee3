"""Takes out of a text what would let its reader in somewhere, or says who its owner is."""

from __future__ import annotations

import re
from collections.abc import Mapping

HIDDEN = "[redacted]"
KNOWN_KEYS = re.compile(r"\b(?:ifd_[a-z0-9]{4,}_[A-Za-z0-9_-]{8,}|hf_[A-Za-z0-9]{8,}|sk-[A-Za-z0-9_-]{8,})")
BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{6,}")
USER_INFO = re.compile(r"(?<=://)[^/@\s\"']+(?=@)")
NAMED = re.compile(
    r"""(?ix)
    ([\w-]*(?<![a-z])(?:token(?!s|_id|iz)|secret|password|passphrase|api_?key|authorization)[\w-]*(?:\\?["'])?\s*[=:]\s*)
    (?: \\"[^"\\]*\\" | "(?:[^"\\]|\\.)*" | '[^']*' | [^\s,;}"'\\]+ )
    """
)
SECRET_NAME = re.compile(r"(?i)(token|secret|password|passphrase|key|credential)s?$")
MIN_SECRET_CHARS = 6  # shorter values stand in too many innocent words


def make_redactor(environment: Mapping[str, str]) -> Redactor:
    """Also knows the values of the environment's own secrets, and the home folder."""
    secrets = [value for name, value in environment.items() if SECRET_NAME.search(name)]
    return Redactor([value for value in secrets if len(value) >= MIN_SECRET_CHARS], environment.get("HOME", ""))


class Redactor:
    def __init__(self, secrets: list[str], home: str) -> None:
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._home = home.rstrip("/")

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        text = KNOWN_KEYS.sub(HIDDEN, text)
        text = BEARER.sub(rf"\1 {HIDDEN}", text)
        text = USER_INFO.sub(HIDDEN, text)
        text = NAMED.sub(_hide_value, text)
        return re.sub(rf"{re.escape(self._home)}(?=[/\s\"']|$)", "~", text) if len(self._home) > 1 else text


def _hide_value(found: re.Match[str]) -> str:
    """In the quotes that it had, so that JSON stays JSON."""
    value = found[0][len(found[1]) :]
    quote = re.match(r"\\?[\"']|", value)
    return f"{found[1]}{quote[0] if quote else ''}{HIDDEN}{quote[0] if quote else ''}"
