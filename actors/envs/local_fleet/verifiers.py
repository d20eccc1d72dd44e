"""Verifiers over the Fleet API: bundles are kept by digest, arguments are decoded without running anything, and the
code runs in the sandbox against copies of the instance's databases."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import pickle
import pickletools
import secrets
import zipfile
from collections import Counter, OrderedDict
from typing import Any

from pydantic import BaseModel, Field
from starlette.requests import Request
from starlette.responses import Response

from actors.envs.local_fleet.instances import InstanceTable
from actors.envs.local_fleet.verifier_sandbox import Verdict, Verification, VerifierSandbox
from actors.envs.local_fleet.wire import ApiError, JsonReply, checked_body

MAX_SOURCE_BYTES = 1 << 20
MAX_STORED_BYTES = 64 << 20
MAX_ARGUMENT_VALUES = 100_000


class ExecuteBody(BaseModel):
    key: str | None = None
    sha256: str
    args: str | None = None
    args_array: list[Any] = Field(default_factory=list)
    function_name: str = "verify"
    timeout: float | None = Field(None, gt=0)
    bundle: str | None = None


class BundleStore:
    """Verifier sources by the SHA-256 of the bundle they came in. The least recently used leave when it is full: the
    SDK makes a new bundle, with a new digest, for every task object, so a long run never stops adding."""

    def __init__(self, max_bytes: int = MAX_STORED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._sources: OrderedDict[str, str] = OrderedDict()
        self._bytes = 0

    def __contains__(self, sha256: str) -> bool:
        return sha256 in self._sources

    def add(self, sha256: str, encoded: str) -> None:
        """Take in a base64-coded zip with a ``verifier.py``.

        Raises:
            ApiError: 400, in one sentence.
        """
        try:
            bundle = base64.b64decode(encoded, validate=True)
        except binascii.Error as error:
            raise ApiError(400, f"bundle: not base64: {error}") from None
        if hashlib.sha256(bundle).hexdigest() != sha256:
            raise ApiError(400, "bundle: its SHA-256 is not the one given as 'sha256'")
        if sha256 in self._sources:
            return
        self._sources[sha256] = source = _read_source(bundle)
        self._bytes += len(source)
        while self._bytes > self._max_bytes and len(self._sources) > 1:
            self._bytes -= len(self._sources.popitem(last=False)[1])

    def get(self, sha256: str) -> str:
        """The source.

        Raises:
            ApiError: 400. Not 404, which the SDK's transport would repeat for seconds; the words make it upload again.
        """
        if sha256 not in self._sources:
            raise ApiError(400, f"bundle not found: {sha256}")
        self._sources.move_to_end(sha256)
        return self._sources[sha256]


def _read_source(bundle: bytes) -> str:
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive, archive.open("verifier.py") as file:
            source = file.read(MAX_SOURCE_BYTES + 1)
    except (zipfile.BadZipFile, KeyError, NotImplementedError, RuntimeError, EOFError) as error:
        raise ApiError(400, f"bundle: no readable zip archive with a verifier.py: {error}") from None
    if len(source) > MAX_SOURCE_BYTES:
        raise ApiError(400, f"bundle: verifier.py is larger than {MAX_SOURCE_BYTES} bytes")
    try:
        return source.decode()
    except UnicodeDecodeError as error:
        raise ApiError(400, f"bundle: verifier.py is not UTF-8: {error}") from None


# -------------------------------------------------------------------------------------------------- arguments

# Opcodes that build plain data. Others could import, call or restore an object, or claim memory that was never sent.
_PLAIN_OPCODES = frozenset(
    "PROTO FRAME STOP MARK MEMOIZE BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 "
    "BINFLOAT SHORT_BINUNICODE BINUNICODE BINUNICODE8 EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS "
    "EMPTY_DICT SETITEM SETITEMS".split()
)
_PLAIN_TYPES = (type(None), bool, int, float, str)


class _PlainUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def decode_arguments(encoded: str | None) -> tuple[list[Any], dict[str, Any]]:
    """Decode ``args``, a base64-coded pickle of ``{"args": (None, …, {"env": id}), "kwargs": {…}}`` that may hold plain
    data only. The first argument stands for the environment and the last names it: both are left out.

    Raises:
        ApiError: 400, without anything having been imported or called.
    """
    if not encoded:
        return [], {}
    try:
        raw = base64.b64decode(encoded, validate=True)
        for opcode, argument, _ in pickletools.genops(raw):
            if opcode.name not in _PLAIN_OPCODES:
                raise pickle.UnpicklingError(f"it uses {opcode.name}{f' {argument}' if argument else ''}")
        payload = _PlainUnpickler(io.BytesIO(raw)).load()
        positional, keywords = payload["args"], payload["kwargs"]
        if not isinstance(positional, tuple) or not isinstance(keywords, dict):
            raise TypeError("'args' must be a tuple and 'kwargs' a dict")
        _check_plain([positional, keywords])
    except (ValueError, TypeError, LookupError, EOFError, pickle.UnpicklingError, RecursionError) as error:
        raise ApiError(400, f"args: only a pickle of plain data is accepted here: {error}") from None
    return list(positional[1:-1]), keywords


def _check_plain(root: Any) -> None:
    # A few bytes of pickle can refer to one list a million times over: count what would be sent on, not what is stored.
    todo, seen = [root], 0
    while todo:
        value = todo.pop()
        seen += 1
        if seen > MAX_ARGUMENT_VALUES:
            raise ValueError(f"more than {MAX_ARGUMENT_VALUES} values")
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise TypeError("the keys of a dict must be strings")
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)
        elif not isinstance(value, _PLAIN_TYPES):
            raise TypeError(f"{type(value).__name__} is not plain data")


# ----------------------------------------------------------------------------------------------------- routes


class Verifiers:
    """Route handlers."""

    def __init__(self, table: InstanceTable, sandbox: VerifierSandbox, timeout_s: float, stats: Counter[str]) -> None:
        """``timeout_s``: the longest that a verifier may run, whatever the request asks for."""
        self._table = table
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._stats = stats
        self._bundles = BundleStore()

    async def check(self, request: Request) -> Response:
        # Always 200: the SDK's transport would repeat a 404 for seconds.
        return JsonReply({"success": request.query_params.get("sha256") in self._bundles})

    async def execute(self, request: Request) -> Response:
        body = await checked_body(request, ExecuteBody)
        cached = body.bundle is None
        if body.bundle is not None:
            self._bundles.add(body.sha256, body.bundle)
        code = self._bundles.get(body.sha256)
        args, kwargs = decode_arguments(body.args)
        crash = getattr(request.state, "crash_verifier", False)  # set by an injected fault
        verdict = await self._run(_instance_id(body), code, body, args, kwargs, crash)
        self._stats["verifications"] += 1
        self._stats["verifications_failed"] += not verdict.success
        self._stats["verifier_cpu_us"] += round(verdict.cpu_s * 1e6)
        return JsonReply(
            {
                "key": body.key,
                "success": verdict.success,
                "result": verdict.result,
                "error": verdict.error,
                "stdout": verdict.stdout,
                "execution_id": f"exec-{secrets.token_hex(6)}",
                "execution_time_ms": round(verdict.seconds * 1000),
                "bundle_cache_hit": cached,
            }
        )

    async def _run(
        self, instance_id: str, code: str, body: ExecuteBody, args: list[Any], kwargs: dict[str, Any], crash: bool
    ) -> Verdict:
        try:
            instance = self._table.get(instance_id)
        except ApiError as error:
            raise ApiError(400, error.detail) from None  # see `check`
        if not instance.running:
            raise ApiError(400, f"Instance '{instance_id}' is stopped ({instance.end_reason})")
        snapshot = instance.snapshot()
        try:
            return await self._sandbox.run(
                Verification(
                    code=code,
                    function_name=body.function_name,
                    args=args,
                    kwargs=kwargs,
                    databases={"seed": str(instance.seed_path), "current": str(snapshot)},
                    instance_id=instance_id,
                    env_key=instance.application.env_key,
                    env_variables=instance.env_variables,
                    timeout_s=min(body.timeout or self._timeout_s, self._timeout_s),
                ),
                crash,
            )
        finally:
            snapshot.unlink(missing_ok=True)


def _instance_id(body: ExecuteBody) -> str:
    for argument in reversed(body.args_array):
        if isinstance(argument, dict) and isinstance(argument.get("env"), str):
            return argument["env"]
    raise ApiError(400, 'args_array: no {"env": instance id}')
