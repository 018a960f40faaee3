"""A hub in the style of Hugging Face: repositories, commits, small files from git, large ones from elsewhere."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LFS_SUFFIXES = (".safetensors", ".gguf", ".bin")
_INFO = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
_RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")


@dataclass
class Repo:
    """`commits`: files of each commit, the last one is main. `token`: who may read it."""

    token: str | None = None
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


class FakeHub:
    """`server` and `cdn` are `MeanServer`s of different origins."""

    def __init__(self, server: Any, cdn: Any, reply: Any, file_reply: Any) -> None:
        self.server = server
        self.cdn = cdn
        self.repos: dict[str, Repo] = {}
        self.overrides: dict[str, Any] = {}  # instead of what belongs there: replies by path
        self._reply = reply
        self._file_reply = file_reply
        server.answer = self._answer
        cdn.answer = self._blob

    @property
    def url(self) -> str:
        return str(self.server.url)

    def add(self, name: str, files: Mapping[str, bytes], *, token: str | None = None) -> str:
        """A new commit that holds exactly `files`. Returns its id."""
        repo = self.repos.setdefault(name, Repo(token))
        commit = hashlib.sha1(f"{name}{len(repo.commits)}".encode()).hexdigest()
        repo.commits[commit] = dict(files)
        return commit

    def _answer(self, request: Any) -> Any:
        if request.path in self.overrides:
            return self.overrides[request.path]
        match = _INFO.fullmatch(request.path) or _RESOLVE.fullmatch(request.path)
        if match is None or match[1] not in self.repos:
            return self._error(401, "RepoNotFound")  # what the real one says to strangers
        repo = self.repos[match[1]]
        commit = repo.head if match[2] in (None, "main") else match[2]
        if repo.token is not None and request.headers.get("authorization") != f"Bearer {repo.token}":
            return self._error(401 if "authorization" not in request.headers else 403, "GatedRepo")
        if commit not in repo.commits:
            return self._error(404, "RevisionNotFound")
        if request.path.startswith("/api/"):
            return self._info(match[1], commit, repo.commits[commit])
        return self._resolve(commit, repo.commits[commit], match[3])

    def _info(self, name: str, commit: str, files: Mapping[str, bytes]) -> Any:
        body = {"id": name, "sha": commit, "siblings": [_sibling(path, data) for path, data in files.items()]}
        return self._reply(200, json.dumps(body).encode(), {"content-type": "application/json"})

    def _resolve(self, commit: str, files: Mapping[str, bytes], path: str) -> Any:
        if path not in files:
            return self._error(404, "EntryNotFound")
        if not path.endswith(LFS_SUFFIXES):
            return self._file_reply(files[path], x_repo_commit=commit)
        oid = hashlib.sha256(files[path]).hexdigest()
        return self._reply(302, b"", {"location": f"{self.cdn.url}/blobs/{oid}?signature=secret"})

    def _blob(self, request: Any) -> Any:
        for repo in self.repos.values():
            for files in repo.commits.values():
                for data in files.values():
                    if request.path == f"/blobs/{hashlib.sha256(data).hexdigest()}":
                        return self._file_reply(data)
        return self._reply(404)

    def _error(self, status: int, code: str) -> Any:
        return self._reply(status, b"{}", {"x-error-code": code, "content-type": "application/json"})


def _sibling(path: str, data: bytes) -> dict[str, Any]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry: dict[str, Any] = {"rfilename": path, "size": len(data), "blobId": blob}
    if path.endswith(LFS_SUFFIXES):
        entry["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry
