"""A real HTTP server on the loopback that speaks OpenAI's completions protocol, and fails on demand.

In a thread of the test (`CompletionServer`), or as a process of its own that may die:

    python completion_server.py PORT_FILE [--die-after N] [--delay SECONDS]

No torch: the process is up at once. Its answer to a prompt is a function of the prompt's ids alone (`reply_ids`).
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import struct
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

EOS = 1
LETTER_A = 68  # of the tiny tokenizer: a to z are 68 to 93
FAULTS = ("500", "503", "429", "slow", "broken", "truncated", "reset", "abort", "not-an-object")


def reply_ids(prompt: Sequence[int]) -> list[int]:
    """Up to seven letters, then the stop token."""
    state = sum((index + 1) * token for index, token in enumerate(prompt))
    return [*(LETTER_A + (state * (step + 3)) % 26 for step in range(2 + state % 6)), EOS]


class CompletionServer:
    """Start with `with`; the address is `url`. Attributes may be changed while it runs."""

    def __init__(
        self,
        *,
        fault: Callable[[list[int], int], str | None] = lambda _prompt, _attempt: None,
        reply: Callable[[list[int]], Sequence[int]] = reply_ids,
        port: int = 0,
        delay_s: float = 0.0,
        die_after: int | None = None,
    ) -> None:
        self.fault, self.reply = fault, reply  # fault: (prompt ids, attempt 0, 1, .. of this prompt) -> one of FAULTS
        self.delay_s, self.die_after = delay_s, die_after
        self.slow_s = 2.0
        self.retry_after = "0.05"
        self.models = [{"id": "tiny", "object": "model", "max_model_len": 400}]
        self.api_key: str | None = None
        self.tells_ids = True
        self.extra: dict[str, Any] = {}  # put over the reply's only choice
        self.extra_usage: dict[str, Any] = {}
        self.render: Callable[[list[dict[str, Any]], dict[str, Any]], list[int]] | None = None  # of chats; None: 404
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []  # bodies of completions, as they came
        self.times: list[float] = []
        self.attempts: Counter[tuple[int, ...]] = Counter()
        self.answered: Counter[tuple[int, ...]] = Counter()
        self.under_way = self.most_under_way = 0
        self.http = _HTTPServer(("127.0.0.1", port), _Handler)
        self.http.daemon_threads = True
        self.http.owner = self  # type: ignore[attr-defined]
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1"

    def __enter__(self) -> CompletionServer:
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


class _Reset(Exception):
    """The connection is gone, as asked: the handler has nothing more to do."""


class _HTTPServer(ThreadingHTTPServer):
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), _Reset):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> CompletionServer:
        return self.server.owner  # type: ignore[attr-defined,no-any-return]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self._wrong_key():
            return
        if self.path == "/v1/models":
            self._send(200, {"object": "list", "data": self.owner.models})
        else:
            self._send(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self._wrong_key():
            return
        if self.path == "/v1/completions":
            with self.owner.lock:
                self.owner.under_way += 1
                self.owner.most_under_way = max(self.owner.most_under_way, self.owner.under_way)
            try:
                self._complete(body)
            finally:
                with self.owner.lock:
                    self.owner.under_way -= 1
        elif self.path == "/v1/chat/completions" and self.owner.render is not None:
            ids = self.owner.render(body["messages"], body["chat_template_kwargs"])
            self._send(200, {"choices": [{"index": 0}], "prompt_token_ids": ids})
        else:
            self._send(404, {"error": "no such page"})

    def _wrong_key(self) -> bool:
        wanted = self.owner.api_key
        if wanted is None or self.headers.get("authorization") == f"Bearer {wanted}":
            return False
        self._send(401, {"error": "wrong key"})
        return True

    def _complete(self, body: dict[str, Any]) -> None:
        owner, prompt = self.owner, body["prompt"]
        key = tuple(prompt)
        with owner.lock:
            owner.requests.append(body)
            owner.times.append(time.monotonic())
            attempt = owner.attempts[key]
            owner.attempts[key] += 1
        if (fault := owner.fault(prompt, attempt)) is not None:
            self._fail(fault)
            return
        time.sleep(owner.delay_s)
        ids = list(owner.reply(prompt))
        finish = "stop" if ids[-1] == EOS else "length"
        letters = "".join(chr(97 + token - LETTER_A) for token in ids if LETTER_A <= token < LETTER_A + 26)
        choice: dict[str, Any] = {"index": 0, "text": letters, "finish_reason": finish}
        if owner.tells_ids and body.get("return_token_ids"):
            choice |= {"token_ids": ids, "prompt_token_ids": prompt}
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        self._send(200, {"choices": [choice | owner.extra], "usage": usage | owner.extra_usage})
        with owner.lock:
            owner.answered[key] += 1
            if owner.die_after is not None and owner.answered.total() >= owner.die_after:
                os._exit(9)

    def _fail(self, fault: str) -> None:
        if fault == "slow":
            time.sleep(self.owner.slow_s)
            self._send(200, {})
        elif fault == "broken":
            self._send_bytes(200, b'{"choices": [{"text": "ab')
        elif fault == "truncated":
            self._send_bytes(200, b'{"choices": [', promised=400)
        elif fault == "reset":
            # Linger 0: close() sends RST instead of FIN.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            for end in (self.rfile, self.wfile, self.connection):
                end.close()
            raise _Reset
        elif fault == "abort":
            self._send(200, {"choices": [{"index": 0, "text": "a", "finish_reason": "abort", "token_ids": [LETTER_A]}]})
        elif fault == "not-an-object":
            self._send_bytes(200, b"[1, 2]")
        else:
            headers = {"Retry-After": self.owner.retry_after} if fault == "429" else {}
            self._send(int(fault), {"error": f"as asked: {fault}"}, headers)

    def _send(self, status: int, value: Any, headers: dict[str, str] | None = None) -> None:
        self._send_bytes(status, json.dumps(value).encode(), headers or {})

    def _send_bytes(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, promised: int | None = None
    ) -> None:
        try:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(promised or len(body)))
            self.end_headers()
            self.wfile.write(body)
        except OSError:  # the client has left
            self.close_connection = True
        if promised is not None:
            self.close_connection = True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("port_file")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--delay", type=float, default=0.0)
    given = parser.parse_args()
    with CompletionServer(port=given.port, delay_s=given.delay, die_after=given.die_after) as server:
        aside = given.port_file + ".tmp"
        with open(aside, "w") as file:
            file.write(server.url)
        os.replace(aside, given.port_file)
        server.thread.join()


if __name__ == "__main__":
    main()
