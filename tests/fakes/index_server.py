"""A package index with wheels made by the test."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from typing import Any

JSON = "application/vnd.pypi.simple.v1+json"


class FakeIndex:
    """Gives `server` (a `MeanServer`, maybe another one for the files) the pages and files of an index."""

    def __init__(self, server: Any, file_server: Any, reply: Any, file_reply: Any) -> None:
        self.url = f"{server.url}/simple/"
        self.server = server
        self.file_server = file_server
        self._reply = reply
        self._file_reply = file_reply
        self._pages: dict[str, list[dict[str, Any]]] = {}
        self._files: dict[str, bytes] = {}
        server.answer = self._answer
        file_server.answer = self._answer

    def add(self, name: str, version: str, wheel: bytes, *, tag: str = "py3-none-any", **fields: Any) -> str:
        """Publishes `wheel`; `fields` override those of the index page. Returns the wheel's SHA-256."""
        filename = f"{name.replace('-', '_')}-{version}-{tag}.whl"
        sha256 = hashlib.sha256(wheel).hexdigest()
        self._files[f"/files/{filename}"] = wheel
        entry = {
            "filename": filename,
            "url": f"{self.file_server.url}/files/{filename}",
            "hashes": {"sha256": sha256},
            "size": len(wheel),
            "yanked": False,
        }
        self._pages.setdefault(name, []).append(entry | fields)
        return sha256

    def _answer(self, request: Any) -> Any:
        if request.path in self._files:
            return self._file_reply(self._files[request.path])
        name = request.path.removeprefix("/simple/").strip("/")
        if name not in self._pages:
            return self._reply(404)
        page = {"meta": {"api-version": "1.0"}, "name": name, "files": self._pages[name]}
        return self._reply(200, json.dumps(page).encode(), {"content-type": JSON})


def make_wheel(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()
