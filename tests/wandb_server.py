"""As much of a wandb server as a run needs: it takes the history and refuses artifacts; it can stop answering."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

BUCKET = {
    "id": "b",
    "name": "run",
    "displayName": "run",
    "description": None,
    "config": None,
    "sweepName": None,
    "historyLineCount": 0,
    "project": {"id": "p", "name": "gnnpar", "entity": {"id": "e", "name": "me"}},
}
ANSWERS = {
    "Viewer": {"viewer": {"id": "1", "entity": "me", "username": "me", "email": "", "flags": "{}"}},
    "UpsertBucket": {"upsertBucket": {"bucket": BUCKET, "inserted": True}},
    "ServerFeaturesQuery": {"serverInfo": {"features": []}},
}


class Server:
    """`history`: the rows received. `exit_codes`: how runs ended. `hang`: set it, and nothing is answered any more."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.exit_codes: list[int] = []
        self.hang, self.over = threading.Event(), threading.Event()
        self.url = ""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        if path.endswith("file_stream"):
            sent = json.loads(body)
            lines = sent.get("files", {}).get("wandb-history.jsonl", {}).get("content", [])
            self.history += map(json.loads, lines)
            self.exit_codes += [sent["exitcode"]] if sent.get("complete") else []
            return {}
        if not path.startswith("/graphql"):
            return {}
        operation = re.search(r"(?:query|mutation)\s+(\w+)", json.loads(body)["query"])
        data = ANSWERS.get(operation[1]) if operation else None
        return {"data": data} if data else {"data": None, "errors": [{"message": "not here"}]}


@contextmanager
def serve() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            if server.hang.is_set():
                server.over.wait()
                return
            data = json.dumps(server.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listener:
        listener.daemon_threads, listener.block_on_close = True, False
        server.url = f"http://127.0.0.1:{listener.server_port}"
        threading.Thread(target=listener.serve_forever, daemon=True).start()
        try:
            yield server
        finally:
            server.over.set()
            listener.shutdown()
