"""A client of the daemon for the command line and the screens: what they show comes through here."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import quote

import httpx

TIMEOUT = httpx.Timeout(600.0, connect=5.0)  # the first token may have a load and a queue before it
WARNING_HEADER = "x-inferd-warning"
MODELS_PATH = "/admin/v1/models"  # /NAME


class NotRunning(Exception):
    """Nobody answers at that address."""


class Refused(Exception):
    """The daemon answered with an error."""

    def __init__(self, status: int, message: str, code: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class Client:
    """`address`: "http://127.0.0.1:4633". Every method raises `NotRunning` or `Refused`.

    What only administrators may do goes over the daemon's `socket` on this machine, where the system says who asks.
    """

    def __init__(self, address: str, socket: Path | None = None) -> None:
        self._address = address
        self._http = httpx.Client(base_url=address, timeout=TIMEOUT, trust_env=False)
        self._admin = self._http
        if socket is not None and socket.exists():
            transport = httpx.HTTPTransport(uds=str(socket))
            self._admin = httpx.Client(base_url=address, timeout=TIMEOUT, transport=transport, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._http.close()
        self._admin.close()

    def version(self) -> str:
        return str(self._get("/version")["version"])

    def model_ids(self) -> list[str]:
        """The loaded ones first."""
        return [card["id"] for card in self._get("/v1/models")["data"]]

    def check_model(self, name: str) -> None:
        """Raises `Refused` (404) unless `name` is a model's id or alias."""
        self._get(f"/v1/models/{quote(name)}")

    @contextmanager
    def chat(
        self, model: str, messages: list[dict[str, str]], params: Mapping[str, float | int] | None = None
    ) -> Iterator[Answer]:
        """Leaving the context ends the generation. `params` are fields of the request: temperature, max_tokens, …"""
        body = {"model": model, "messages": messages, "stream": True, **(params or {})}
        with ExitStack() as stack:
            with self._errors():
                response = stack.enter_context(self._http.stream("POST", "/v1/chat/completions", json=body))
                if response.is_error:
                    response.read()
                    raise _refused(response)
            yield Answer(response, self._errors)

    def admin(self, method: str, path: str, **options: Any) -> Any:
        """Asks the admin API; `path` is what follows its prefix."""
        return self._ask(method, f"/admin/v1{quote(path)}", **options)

    def remove_model(self, name: str, home: str) -> dict[str, Any]:
        """What was removed. `home` is the library that is meant: a daemon of another one refuses."""
        return self._ask("DELETE", f"{MODELS_PATH}/{quote(name)}", params={"home": home})  # type: ignore[no-any-return]

    def _get(self, path: str) -> Any:
        return self._ask("GET", path)

    def _ask(self, method: str, path: str, **options: Any) -> Any:
        with self._errors():
            http = self._admin if path.startswith("/admin/") else self._http
            response = http.request(method, path, **options)
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


class Answer:
    """A streamed answer. Iterate once: its text, piece by piece; raises `Refused` where it breaks off.

    `warnings` are what the daemon changed about the request; `finish_reason` is known at the end.
    """

    def __init__(self, response: httpx.Response, errors: Callable[[], AbstractContextManager[None]]) -> None:
        self.warnings = tuple(filter(None, response.headers.get(WARNING_HEADER, "").split("; ")))
        self.finish_reason: str | None = None
        self._response = response
        self._errors = errors

    def __iter__(self) -> Iterator[str]:
        events = (line for line in lines(self._response.iter_bytes()) if line.startswith(b"data: {"))
        while True:
            with self._errors():  # not around the `yield`: what fails there is the caller's
                event = next(events, None)
                text = None if event is None else self._text_of(json.loads(event.removeprefix(b"data: ")))
            if text is None:
                return
            if text:
                yield text

    def _text_of(self, chunk: dict[str, Any]) -> str:
        if "error" in chunk:
            raise _broken_off(chunk["error"])
        text = ""
        for choice in chunk["choices"]:
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            text += choice["delta"].get("content") or ""
        return text


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
