"""A hub in miniature on this machine, which knows nothing of this package.

It speaks as much of the protocol of the Hugging Face hub as the client of `huggingface_hub` needs
to make a dataset, to upload files to it in one commit, to list them and to download them.
"""

import base64
import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote

TOKEN = "hf_right"
COMMIT = "a" * 40


class Hub(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, status, body=b"", **headers):
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_POST(self):
        size = int(self.headers.get("Content-Length") or 0)
        lines = [json.loads(line) for line in self.rfile.read(size).decode().splitlines() if line]
        datasets, parts = self.server.datasets, self.path.strip("/").split("/")
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "wrong token"})
        elif self.path == "/api/repos/create":
            owner = lines[0].get("organization") or "me"
            repo = f"{owner}/{lines[0]['name']}"
            status = 409 if repo in datasets else 200
            datasets[repo] |= {}
            self.answer(status, {"url": f"{self.server.address}/datasets/{repo}"})
        elif "preupload" in parts:
            paths = [each["path"] for each in lines[0]["files"]]
            modes = [
                {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
            ]
            self.answer(200, {"files": modes})
        elif "commit" in parts:
            repo = "/".join(parts[2:4])
            for each in lines:
                if each["key"] == "file":
                    value = each["value"]
                    datasets[repo][value["path"]] = base64.b64decode(value["content"])
            url = f"{self.server.address}/datasets/{repo}/commit/{COMMIT}"
            self.answer(200, {"success": True, "commitUrl": url, "commitOid": COMMIT})
        elif self.path == "/api/validate-yaml":
            self.answer(200, {"errors": [], "warnings": []})
        else:
            self.answer(404)

    def do_GET(self):
        parts = unquote(self.path).split("?")[0].strip("/").split("/")
        datasets = self.server.datasets
        repo = "/".join(parts[2:4] if parts[0] == "api" else parts[1:3])
        if repo not in datasets:
            self.answer(404, {"error": "not found"}, X_Error_Code="RepoNotFound")
        elif parts[0] == "api":
            files = [
                {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}
                for name, content in datasets[repo].items()
            ]
            known = {
                "id": repo,
                "sha": COMMIT,
                "siblings": [{"rfilename": f["path"]} for f in files],
            }
            self.answer(200, files if "tree" in parts else known)
        else:
            name = "/".join(parts[5:])
            if name in datasets[repo]:
                content = datasets[repo][name]
                self.answer(200, content, ETag=f'"{_digest(content)}"', X_Repo_Commit=COMMIT)
            else:
                self.answer(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)

    def do_HEAD(self):
        self.do_GET()


def _digest(content):
    return hashlib.sha1(content).hexdigest()


@contextmanager
def hub() -> Iterator[tuple[str, dict[str, dict[str, bytes]]]]:
    """The address of a hub, and its datasets: the bytes of their files by name."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.datasets = defaultdict(dict)
    server.address = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.address, server.datasets
    finally:
        server.shutdown()
        server.server_close()
