"""A small Hugging Face hub on this machine: the HTTP of making, committing to and reading model repositories."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

TOKEN = "hf_secretsecretsecret"
SMALL = 1 << 12  # a larger file, or one that is not text, goes to the large file storage


@dataclass
class Repository:
    """Commits of files; the last is the revision main."""

    private: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    large: set[str] = field(default_factory=set)  # paths in the large file storage

    def resolve(self, revision: str) -> str | None:
        """The commit of a revision; None if there is none."""
        if revision == "main":
            return list(self.commits)[-1]
        return revision if revision in self.commits else None

    def commit(self, files: dict[str, bytes], message: str) -> str:
        """Add files to what is there."""
        before = self.commits[list(self.commits)[-1]] if self.commits else {}
        name = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[name] = {**before, **files}
        self.messages.append(message)
        return name


class FakeHub:
    """The hub; `url` is its address. `fail` is a status that every request gets instead of an answer."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.storage: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fail = 0
        self.reason = ""
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: Any) -> None:
                pass

            def answer(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                if "chunked" in self.headers.get("Transfer-Encoding", ""):
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                else:
                    body = self.rfile.read(length)
                hub.requests.append(f"{self.command} {self.path}")
                status, headers, content = hub.respond(self.command, self.path, dict(self.headers.items()), body)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                if "Content-Length" not in headers:
                    self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.storage_url = f"http://localhost:{self.server.server_port}/storage"  # another host, as the hub's is
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop answering."""
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()

    def respond(self, method: str, target: str, headers: dict[str, str], body: bytes) -> Any:
        """The answer to a request: status, headers, content."""
        path, _, _ = target.partition("?")
        token = {name.lower(): value for name, value in headers.items()}.get("authorization")
        if self.fail:
            return _error(self.fail, "Failed", self.reason)
        for verbs, pattern, answer in self.routes():
            match = re.fullmatch(pattern, path)
            if match and method in verbs:
                return answer(token, body, *match.groups())
        return _error(404, "NotFound", f"no route {method} {path}")

    def routes(self) -> list[tuple[tuple[str, ...], str, Any]]:
        """Methods, pattern of the path, function."""
        name = r"([\w.-]+/[\w.-]+)"
        return [
            (("POST",), "/api/repos/create", self.create),
            (("POST",), "/api/validate-yaml", self.validate),
            (("POST",), rf"/api/models/{name}/preupload/(.+)", self.preupload),
            (("POST",), rf"/{name}\.git/info/lfs/objects/batch", self.batch),
            (("PUT",), r"/storage/(\w+)", self.store),
            (("POST",), rf"/api/models/{name}/commit/(.+)", self.commit),
            (("GET", "HEAD"), r"/storage/(\w+)", self.load),
            (("GET", "HEAD"), rf"/{name}/resolve/([^/]+)/(.+)", self.resolve),
            (("GET",), rf"/api/models/{name}(?:/revision/([^/]+))?", self.info),
        ]

    # ---- writing

    def create(self, token: str | None, body: bytes) -> Any:
        if token != f"Bearer {TOKEN}":
            return _error(401, "Unauthorized", "Invalid username or password.")
        table = json.loads(body)
        name = f"{table['organization']}/{table['name']}"
        if table["organization"] == "forbidden":
            return _error(403, "Forbidden", f"You don't have the rights ({TOKEN}) under this namespace")
        url = {"url": f"{self.url}/{name}"}
        if name in self.repositories:
            return _error(409, "Conflict", "You already created this model repo", url)
        self.repositories[name] = Repository(private=table.get("visibility") == "private")
        self.repositories[name].commit({".gitattributes": b""}, "initial commit")
        return _json(url)

    def validate(self, token: str | None, body: bytes) -> Any:
        content = json.loads(body)["content"]
        try:
            table = yaml.safe_load(content.split("---\n")[1])
            assert isinstance(table["tags"], list)
        except (yaml.YAMLError, IndexError, AssertionError, KeyError) as error:
            return _json({"errors": [{"message": str(error)}], "warnings": []}, 400)
        return _json({"errors": [], "warnings": []})

    def preupload(self, token: str | None, body: bytes, name: str, revision: str) -> Any:
        if problem := self.problem(token, name, True):
            return problem
        files = []
        for entry in json.loads(body)["files"]:
            binary = b"\0" in base64.b64decode(entry["sample"])
            mode = "lfs" if binary or entry["size"] > SMALL else "regular"
            files.append({"path": entry["path"], "uploadMode": mode, "shouldIgnore": False})
        return _json({"files": files})

    def batch(self, token: str | None, body: bytes, name: str) -> Any:
        if problem := self.problem(token, name, True):
            return problem
        objects = []
        for entry in json.loads(body)["objects"]:
            upload = {"href": f"{self.storage_url}/{entry['oid']}?signature=secretsignature"}
            objects.append({"oid": entry["oid"], "size": entry["size"], "actions": {"upload": upload}})
        return _json({"transfer": "basic", "objects": objects})

    def store(self, token: str | None, body: bytes, oid: str) -> Any:
        assert token is None, "the address is signed; a token must not travel there"
        assert hashlib.sha256(body).hexdigest() == oid
        self.storage[oid] = body
        return 200, {}, b""

    def commit(self, token: str | None, body: bytes, name: str, revision: str) -> Any:
        if problem := self.problem(token, name, True):
            return problem
        files, message = {}, ""
        repository = self.repositories[name]
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                message = value["summary"]
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            else:
                files[value["path"]] = self.storage[value["oid"]]
                repository.large.add(value["path"])
        oid = repository.commit(files, message)
        return _json({"commitUrl": f"{self.url}/{name}/commit/{oid}", "commitOid": oid, "success": True})

    # ---- reading

    def problem(self, token: str | None, name: str, writing: bool = False) -> Any:
        """The answer for a repository that is not there, or not for this token."""
        if writing and token != f"Bearer {TOKEN}":
            return _error(401, "Unauthorized", "Invalid credentials in Authorization header")
        repository = self.repositories.get(name)
        if repository is None or (repository.private and token != f"Bearer {TOKEN}"):
            return _error(401 if token is None else 404, "RepoNotFound", "Repository not found")
        return None

    def load(self, token: str | None, body: bytes, oid: str) -> Any:
        assert token is None, "the address is signed; a token must not travel there"
        return 200, {"ETag": f'"{oid}"'}, self.storage[oid]

    def resolve(self, token: str | None, body: bytes, name: str, revision: str, path: str) -> Any:
        if problem := self.problem(token, name):
            return problem
        repository = self.repositories[name]
        commit = repository.resolve(revision)
        if commit is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        content = repository.commits[commit].get(path)
        if content is None:
            status, headers, text = _error(404, "EntryNotFound", "Entry not found")
            return status, {**headers, "X-Repo-Commit": commit}, text
        if path in repository.large:
            oid = hashlib.sha256(content).hexdigest()
            self.storage[oid] = content  # a test may have put another content there
            linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(content)), "X-Repo-Commit": commit}
            return 302, {**linked, "Location": f"{self.storage_url}/{oid}?signature=secretsignature"}, b""
        etag = hashlib.sha1(content).hexdigest()
        return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, content

    def info(self, token: str | None, body: bytes, name: str, revision: str | None) -> Any:
        if problem := self.problem(token, name):
            return problem
        repository = self.repositories[name]
        commit = repository.resolve(revision or "main")
        if commit is None:
            return _error(404, "RevisionNotFound", "Invalid rev id")
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        return _json({"id": name, "sha": commit, "private": repository.private, "siblings": siblings, "tags": []})


def _json(value: Any, status: int = 200) -> Any:
    return status, {"Content-Type": "application/json"}, json.dumps(value).encode()


def _error(status: int, code: str, message: str, more: dict[str, Any] | None = None) -> Any:
    content = json.dumps({"error": message, **(more or {})}).encode()
    return status, {"X-Error-Code": code, "X-Error-Message": message, "Content-Type": "application/json"}, content
