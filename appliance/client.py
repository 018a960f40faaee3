"""A client of the daemon for the command line and the screens: what they show comes through here."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

import httpx

TIMEOUT = httpx.Timeout(600.0, connect=5.0)  # the first token may have a load and a queue before it


class NotRunning(Exception):
    """Nobody answers at that address."""


class Refused(Exception):
    """The daemon answered with an error."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Client:
    """`address`: "http://127.0.0.1:4633". Every method raises `NotRunning` or `Refused`."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._http = httpx.Client(base_url=address, timeout=TIMEOUT, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()

    def version(self) -> str:
        return str(self._get("/version")["version"])

    def model_ids(self) -> list[str]:
        """The loaded ones first."""
        return [card["id"] for card in self._get("/v1/models")["data"]]

    def chat(self, model: str, messages: list[dict[str, str]]) -> Generator[str, None, None]:
        """The answer's text, piece by piece. Closing the iterator ends the generation."""
        body = {"model": model, "messages": messages, "stream": True}
        with self._errors(), self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise _refused(response)
            for line in lines(response.iter_bytes()):
                if not line.startswith(b"data: ") or line == b"data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix(b"data: "))
                if "error" in chunk:
                    raise _broken_off(chunk["error"])
                for choice in chunk["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    def _get(self, path: str) -> Any:
        with self._errors():
            response = self._http.get(path)
            if response.is_error:
                raise _refused(response)
            return response.json()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise NotRunning(f"no daemon answers at {self._address}; start it with `inferd serve`") from None
        except httpx.TransportError as error:
            raise Refused(503, f"the daemon at {self._address} ended its answer early: {error}", None) from None
        except (ValueError, KeyError, TypeError) as error:
            raise NotRunning(f"what answers at {self._address} is not inferd: {error!r}") from None


def lines(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """Without their line feeds. Only those end a line: the text of an answer may hold what Unicode calls line ends."""
    rest = b""
    for piece in pieces:
        *whole, rest = (rest + piece).split(b"\n")
        yield from whole
    if rest:
        yield rest


def _broken_off(error: dict[str, Any]) -> Refused:
    """The error event of a stream, with the status that it would have had before the first byte."""
    status = 503 if error["code"] in ("engine_dead", "draining", "model_loading") else 500
    return Refused(status, str(error["message"]), error["code"])


def _refused(response: httpx.Response) -> Refused:
    try:
        error = response.json()["error"]
        return Refused(response.status_code, str(error["message"]), error.get("code"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return Refused(response.status_code, f"the daemon answered with status {response.status_code}", None)
