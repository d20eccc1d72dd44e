"""An S3 server for tests, over real sockets: moto's, behind a door that can fail requests; and a silent one."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from moto.core import DEFAULT_ACCOUNT_ID
from moto.moto_api._internal import moto_api_backend
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from moto.s3.models import s3_backends
from werkzeug.serving import WSGIRequestHandler, make_server

REGION = "eu-central-1"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": REGION,
    # Nothing of the developer's own set-up may decide a test, or be reached by one.
    "AWS_CONFIG_FILE": "/dev/null",
    "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
    "AWS_EC2_METADATA_DISABLED": "true",
}


@dataclass
class Fault:
    """The next ``count`` requests of ``method`` are answered with this error instead."""

    status: int
    code: str
    count: int = 1
    method: str | None = None
    partial_body: bool = False  # the real answer, cut off in the middle


@dataclass
class S3Server:
    url: str = ""
    requests: list[str] = field(default_factory=list)  # "METHOD /path?query" in the order they came
    faults: list[Fault] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        method = environ["REQUEST_METHOD"]
        with self._lock:
            self.requests.append(f"{method} {environ['PATH_INFO']}?{environ['QUERY_STRING']}")
            fault = self._take(method)
        if fault is None:
            return self._app(environ, start_response)
        if fault.partial_body:
            body = b"".join(self._app(environ, start_response))
            return [body[: len(body) // 2]]
        start_response(f"{fault.status} {fault.code}", [("Content-Type", "application/xml")])
        text = f"<Error><Code>{fault.code}</Code><Message>injected</Message></Error>"
        return [] if method == "HEAD" else [text.encode()]

    def count(self, start: str) -> int:
        """Requests that begin with ``start``."""
        return sum(request.startswith(start) for request in self.requests)

    def arm(self, *faults: Fault) -> None:
        """These faults and no others; forget the requests seen."""
        self.faults, self.requests = list(faults), []

    @property
    def backend(self) -> Any:
        """moto's model of S3, to fill it quickly."""
        return s3_backends[DEFAULT_ACCOUNT_ID]["aws"]

    def _take(self, method: str) -> Fault | None:
        for fault in self.faults:
            if fault.count and fault.method in (None, method):
                fault.count -= 1
                return fault
        return None

    def __post_init__(self) -> None:
        self._app = DomainDispatcherApplication(create_backend_app)


class _QuietHandler(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *args: Any) -> None:
        return None


@contextlib.contextmanager
def serving_s3() -> Iterator[S3Server]:
    """A server on a free port of this machine, without any bucket."""
    moto_api_backend.reset()
    server = S3Server()
    listener = make_server("127.0.0.1", 0, server, threaded=True, request_handler=_QuietHandler)
    server.url = f"http://127.0.0.1:{listener.server_port}"
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


@contextlib.contextmanager
def serving_bucket(name: str) -> Iterator[S3Server]:
    """The same with a bucket, and with this process's S3 client led to it; pauses between attempts are short."""
    with serving_s3() as server, pytest.MonkeyPatch.context() as patch:
        for variable, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            patch.setenv(variable, value)
        patch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
        server.backend.create_bucket(name, ENVIRONMENT["AWS_DEFAULT_REGION"])
        yield server
        server.arm()


@contextlib.contextmanager
def silent_server() -> Iterator[socket.socket]:
    """A listening socket that takes every connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def url_of(listener: socket.socket) -> str:
    return f"http://127.0.0.1:{listener.getsockname()[1]}"
