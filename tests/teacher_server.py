"""An OpenAI-compatible chat endpoint for tests, over real sockets, whose model is the tracker's scripted expert."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from actors.envs.local_fleet.apps.tracker_expert import NOTHING_ASKED, call_text
from actors.envs.local_fleet.apps.tracker_tasks import Problem

KEY = "sk-teacher"
MODEL = "expert"
PROMPT_TOKENS, COMPLETION_TOKENS = 100, 10  # of every answer
NOW = {"retry-after-ms": "1"}


@dataclass
class TeacherServer:
    """What the endpoint is told, and what it saw.

    Attributes:
        problems: by prompt; the tasks it knows.
        unsolved: prompts that it gives up on at once.
        faults: status, message and headers of the next answers, which are errors.
        replies: of the next answers, message and finish reason, in place of the expert's.
        refused: a field that it does not take.
        page: answered to everything, in place of JSON.
        pause_s: before every answer.
        busy: requests that are being answered.
        seen: every chat request it has answered, without the pings, by prompt and number of the turn.
    """

    url: str = ""
    problems: dict[str, Problem] = field(default_factory=dict)
    unsolved: set[str] = field(default_factory=set)
    faults: list[tuple[int, str]] = field(default_factory=list)
    replies: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    refused: str | None = None
    page: str | None = None
    pause_s: float = 0.0
    busy: int = 0
    pings: int = 0
    seen: list[tuple[str, int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def openings(self, prompt: str) -> int:
        """How many attempts at a task have begun."""
        return self.seen.count((prompt, 0))

    def answer(self, body: dict[str, Any], key: str | None) -> tuple[int, dict[str, Any]]:
        """Status and body of the answer to a request."""
        if key != f"Bearer {KEY}":
            return _error(401, "Incorrect API key provided")
        if body["model"] != MODEL:
            return _error(404, f"The model `{body['model']}` does not exist")
        if self.refused in body:
            return _error(400, f"Unsupported parameter: '{self.refused}'")
        if body["messages"][0]["role"] != "system":
            self.pings += 1
            return 200, _completion({"role": "assistant", "content": "pong"})
        if self.faults:
            return _error(*self.faults.pop(0))
        self.bodies.append(body)
        prompt = body["messages"][1]["content"]
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        time.sleep(self.pause_s)
        self.seen.append((prompt, turn))
        if self.replies:
            return 200, _completion(*self.replies.pop(0))
        return 200, _completion(self._turn(prompt, turn, native="tools" in body))

    def _turn(self, prompt: str, turn: int, native: bool) -> dict[str, Any]:
        problem = self.problems[prompt]
        calls = () if prompt in self.unsolved else problem.calls
        if turn >= len(calls):
            answer = "I give up" if prompt in self.unsolved else problem.answer or NOTHING_ASKED
            return {"role": "assistant", "content": f"{answer}<done>"}
        call = calls[turn]
        if not native:
            return {"role": "assistant", "content": call_text(call)}
        return native_calls((call.tool, json.dumps(call.arguments)))


def _error(status: int, message: str) -> tuple[int, dict[str, Any]]:
    return status, {"error": {"message": message, "type": "error", "code": None}}


def native_calls(*calls: tuple[str, str], content: str | None = None) -> dict[str, Any]:
    """A message with calls in the endpoint's own format, each a name and its arguments as text."""
    made = [
        {"id": f"call_{number}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for number, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": content, "tool_calls": made}


def _completion(message: dict[str, Any], finish_reason: str | None = None) -> dict[str, Any]:
    tokens = {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": COMPLETION_TOKENS}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 0,
        "model": MODEL,
        "choices": [
            {
                "index": 0,
                "message": message,
                "finish_reason": finish_reason or ("tool_calls" if "tool_calls" in message else "stop"),
            }
        ],
        "usage": tokens | {"total_tokens": sum(tokens.values())},
    }


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Whoever asked may be gone: that is what some tests are about."""


@contextlib.contextmanager
def serving_teacher() -> Iterator[TeacherServer]:
    """The endpoint on a free port of this machine."""
    teacher, lock = TeacherServer(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            with lock:
                teacher.busy += 1
            try:
                status, answer = teacher.answer(body, self.headers.get("authorization"))
            finally:
                with lock:
                    teacher.busy -= 1
            content = json.dumps(answer).encode() if teacher.page is None else teacher.page.encode()
            self.send_response(status)
            kind = "application/json" if teacher.page is None else "text/html"
            headers = {"content-type": kind, "content-length": str(len(content))}
            for name, value in (headers | (NOW if status >= 400 else {})).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    server = _Server(("127.0.0.1", 0), Handler)
    teacher.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield teacher
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
