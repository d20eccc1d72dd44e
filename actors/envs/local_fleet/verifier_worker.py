"""The program of one sandbox worker. It is started as a plain script and uses the standard library only.

The worker itself never runs a verifier. It forks a child, which confines itself for good (resource limits, a seccomp
filter, Landlock, no open file but one socket) and then runs verifiers one after the other. The worker watches the clock
and kills a child that is late. A child is also replaced when a verifier failed in it or left a thread behind, and after
MAX_USES, so that little of one verifier can meet another; a new child for each would cost 5 ms instead of 1.

Frames on stdin and stdout, and between worker and child: four bytes of length, big-endian, then JSON. The first frame
out says that the worker is ready. When stdin ends, the server is gone: the worker kills its child, removes the server's
folder in case nobody else could, and ends.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import re
import resource
import select
import shutil
import signal
import socket
import sqlite3
import struct
import sys
import threading
import time
import traceback
from contextlib import redirect_stdout
from typing import Any

MAX_USES = 64
MAX_FRAME_BYTES = 32 << 20
MAX_STDOUT_CHARS = 1 << 16

# ------------------------------------------------------------------------------------------------ confinement

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_ALLOW, _DENY, _UNKNOWN_CALL = 0x7FFF0000, 0x00050000 | 1, 0x00050000 | 38  # allow; refuse with EPERM; with ENOSYS
_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_OFFSET_NUMBER, _OFFSET_ARCH, _OFFSET_ARGUMENTS = 0, 4, 16
_WRITE_FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

# What a verifier may not do is reach the network or other processes, or change files. Call numbers by kernel name, on
# (x86_64, aarch64); None where the architecture has no such call.
_DENIED: dict[str, tuple[int | None, int | None]] = {
    # the network
    "socket": (41, 198), "socketpair": (53, 199), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "listen": (50, 201), "sendto": (44, 206), "sendmsg": (46, 211),
    # other processes
    "fork": (57, None), "vfork": (58, None), "execve": (59, 221),
    "execveat": (322, 281), "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424), "setpgid": (109, 154), "setsid": (112, 157),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    # changes to files, where the flags of an open do not show them
    "creat": (85, None), "openat2": (437, 437), "open_by_handle_at": (304, 265), "unlink": (87, None),
    "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38), "renameat2": (316, 276), "mkdir": (83, None),
    "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None), "linkat": (265, 37), "symlink": (88, None),
    "symlinkat": (266, 36), "mknod": (133, None), "mknodat": (259, 33), "truncate": (76, 45), "ftruncate": (77, 46),
    "fallocate": (285, 47), "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452),
    "chown": (92, None), "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None),
    "utimes": (235, None), "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5),
    "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15),
    "fremovexattr": (199, 16),
    # shared memory and queues
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "memfd_create": (319, 279),
    # the limits and the machine itself
    "setrlimit": (160, 164), "prlimit64": (302, 261), "setuid": (105, 146), "setgid": (106, 144), "setns": (308, 268),
    "unshare": (272, 97), "mount": (165, 40), "umount2": (166, 39), "mount_setattr": (442, 442),
    "move_mount": (429, 429), "fsopen": (430, 430), "open_tree": (428, 428), "pivot_root": (155, 41),
    "chroot": (161, 51), "bpf": (321, 280), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "io_uring_setup": (425, 425), "reboot": (169, 142),
    "swapon": (167, 224), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294),
}  # fmt: skip

# machine: (column above, the kernel's name for it, the opening calls as (number, argument that holds the flags))
_MACHINES: dict[str, tuple[int, int, tuple[tuple[int, int], ...]]] = {
    "x86_64": (0, 0xC000003E, ((2, 1), (257, 2))),
    "aarch64": (1, 0xC00000B7, ((56, 2),)),
}
_CLONE, _CLONE3, _CLONE_THREAD = (56, 220), 435, 0x00010000


def seccomp_program(machine: str) -> bytes | None:
    """The filter for this machine as the kernel reads it, or None where it has none."""
    if machine not in _MACHINES or sys.platform != "linux":
        return None
    column, architecture, opens = _MACHINES[machine]
    denied = [numbers[column] for numbers in _DENIED.values() if numbers[column] is not None]
    # (code, jump if true, jump if false, operand); a jump to "deny" is resolved below.
    lines: list[tuple[int, Any, Any, int]] = [
        (_LOAD, 0, 0, _OFFSET_ARCH),
        (_JUMP_EQUAL, 0, "deny", architecture),
        (_LOAD, 0, 0, _OFFSET_NUMBER),
        (_JUMP_GREATER_EQUAL, "deny", 0, 0x40000000),  # x32: the same calls under other numbers
        *((_JUMP_EQUAL, "deny", 0, number) for number in denied),
    ]
    for number, argument in opens:
        lines += [
            (_JUMP_EQUAL, 0, 3, number),
            (_LOAD, 0, 0, _OFFSET_ARGUMENTS + 8 * argument),
            (_JUMP_ANY_BIT, "deny", 0, _WRITE_FLAGS),
            (_RETURN, 0, 0, _ALLOW),
        ]
    # Threads are allowed, processes are not. clone3 hides its flags from a filter; told that there is no such call, the
    # C library falls back to clone, which shows them.
    lines += [
        (_JUMP_EQUAL, 0, 1, _CLONE3),
        (_RETURN, 0, 0, _UNKNOWN_CALL),
        (_JUMP_EQUAL, 0, 2, _CLONE[column]),
        (_LOAD, 0, 0, _OFFSET_ARGUMENTS),
        (_JUMP_ANY_BIT, 0, "deny", _CLONE_THREAD),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _DENY),
    ]
    deny = len(lines) - 1

    def jump(target: Any, line: int) -> int:
        return deny - line - 1 if target == "deny" else target

    return b"".join(
        struct.pack("HBBI", code, jump(yes, line), jump(no, line), operand)
        for line, (code, yes, no, operand) in enumerate(lines)
    )


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]


def _prctl(*arguments: Any) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"prctl{arguments[:2]} failed")


def confine(program: bytes | None, cpu_s: float, memory_bytes: int) -> None:
    """Confine this very process. There is no way back."""
    limits = {
        resource.RLIMIT_CPU: int(cpu_s) + 1,
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: 32,
        resource.RLIMIT_CORE: 0,
    }
    for limit, value in limits.items():
        ceiling = resource.getrlimit(limit)[1]
        value = value if ceiling == resource.RLIM_INFINITY else min(value, ceiling)
        resource.setrlimit(limit, (value, value))
    if program is None:
        return
    arguments = _Program(len(program) // 8, program)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(arguments), 0, 0)


# Landlock: calls that have the same number on every architecture, and the rights of its first version.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF, _PATH_BENEATH = 444, 445, 446, 1
_EXECUTE, _READ_FILE, _READ_DIR, _ALL_RIGHTS = 1 << 0, 1 << 2, 1 << 3, (1 << 13) - 1
# What Python and the libraries below it may still have to load. /proc/self is this very process.
_READABLE = ("/usr", "/lib", "/lib64", "/etc/ld.so.cache", "/dev/null", "/dev/urandom", "/proc/self")


def _landlock(number: int, *arguments: Any) -> int:
    """A system call of Landlock. Raises OSError."""
    result = ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(number), *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), "Landlock is not available")
    return result


def limit_reading(folder: str) -> bool:
    """Let this process read nothing but Python, system libraries and, by exact name, the files in ``folder``, which
    holds the databases of all instances: without a listing, their random names are not to be had. There is no way back.

    Returns: whether this kernel can do that.
    """
    places = {path: _READ_FILE | _READ_DIR | _EXECUTE for path in (*_READABLE, sys.prefix, sys.base_prefix)}
    places[folder] = _READ_FILE
    try:
        rights = struct.pack("=Q", _ALL_RIGHTS)
        rules = _landlock(_CREATE_RULESET, rights, ctypes.c_size_t(len(rights)), ctypes.c_uint(0))
        for path, allowed in places.items():
            if os.path.exists(path):
                _allow(rules, path, allowed)
        _prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        _landlock(_RESTRICT_SELF, ctypes.c_int(rules), ctypes.c_uint(0))
    except OSError:
        return False
    os.close(rules)
    return True


def _allow(rules: int, path: str, allowed: int) -> None:
    if not os.path.isdir(path):
        allowed &= ~_READ_DIR  # the kernel refuses a right that a file cannot have
    place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        rule = struct.pack("=Qi", allowed, place)
        _landlock(_ADD_RULE, ctypes.c_int(rules), ctypes.c_int(_PATH_BENEATH), rule, ctypes.c_uint(0))
    finally:
        os.close(place)


def can_limit_reading(folder: str) -> bool:
    """Whether :func:`limit_reading` works here; tried on a child."""
    pid = os.fork()
    if pid == 0:
        os._exit(0 if limit_reading(folder) else 1)
    return os.waitpid(pid, 0)[1] == 0


def usable_program() -> bytes | None:
    """The filter for this machine if its kernel takes it, which some containers forbid; tried on a child."""
    program = seccomp_program(os.uname().machine)
    pid = os.fork()
    if pid == 0:
        try:
            confine(program, cpu_s=10, memory_bytes=1 << 30)
            os._exit(0)
        finally:
            os._exit(1)
    return program if os.waitpid(pid, 0)[1] == 0 else None


# ------------------------------------------------------------------------------------- what a verifier can see


class QueryResult:
    """Rows of one statement, with the fields of the SDK's ``QueryResponse``."""

    def __init__(self, columns: list[str] | None, rows: list | None, error: str | None = None) -> None:
        self.success = error is None
        self.columns = columns
        self.rows = rows
        self.rows_affected = None
        self.last_insert_id = None
        self.error = error
        self.message = f"Query failed: {error}" if error else "Query executed"


class Database:
    """One database, read only. ``query`` and ``table`` are made here because they are what verifiers use most; the rest
    of the SDK's SQLite resource (``snapshot``, ``diff``, ``describe``) is the SDK's own, imported when asked for."""

    def __init__(self, name: str, path: str) -> None:
        self._name = name
        self._path = path
        self._connection: sqlite3.Connection | None = None

    def query(self, query: str, args: list | None = None) -> QueryResult:
        """Run one statement. As in the SDK, a failure is a result with ``success`` false."""
        try:
            cursor = self.execute(query, args or ())
            rows = cursor.fetchall()
        except (sqlite3.Error, sqlite3.Warning) as error:
            return QueryResult(None, None, str(error))
        return QueryResult([column[0] for column in cursor.description or ()] or None, rows or None)

    exec = query  # the SDK's name for statements that may write; this file refuses those

    def table(self, name: str) -> Table:
        return Table(self, name)

    def execute(self, query: str, args: Any) -> sqlite3.Cursor:
        if self._connection is None:
            self._connection = sqlite3.connect(f"file:{self._path}?mode=ro&immutable=1", uri=True)
            self._connection.execute("PRAGMA temp_store = MEMORY")
        return self._connection.execute(query, args)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def diff(self, other: Any, *args: Any, **kwargs: Any) -> Any:
        return self._sdk().diff(other._sdk() if isinstance(other, Database) else other, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sdk(), name)

    def _sdk(self) -> Any:
        # This is the server's side of Fleet, not the trainer: here the SDK is what verifiers are written against.
        from fleet.instance.models import Resource, ResourceMode, ResourceType
        from fleet.resources.sqlite import SQLiteResource

        return SQLiteResource(Resource(name=self._name, type=ResourceType.db, mode=ResourceMode.ro), db_path=self._path)


def _quoted(identifier: str) -> str:
    return '"' + identifier.replace('"', '""') + '"'


class Table:
    """The SDK's query builder: ``table("t").eq("id", 1).sort("n", desc=True).all()``. Every step returns a new builder.

    One difference: a query that cannot run raises. The SDK's builder returns no rows, so that a verifier with a wrong
    table name would quietly grade 0.
    """

    def __init__(self, database: Database, name: str) -> None:
        self._database = database
        self._name = name
        self._columns: tuple[str, ...] = ("*",)
        self._joins: tuple[tuple[str, dict[str, str]], ...] = ()
        self._conditions: tuple[tuple[str, tuple], ...] = ()
        self._order = ""
        self._limit: int | None = None

    def _with(self, **changes: Any) -> Table:
        other = Table(self._database, self._name)
        other.__dict__.update(self.__dict__, **changes)
        return other

    def _and(self, condition: str, *values: Any) -> Table:
        return self._with(_conditions=(*self._conditions, (condition, values)))

    def select(self, *columns: str) -> Table:
        return self._with(_columns=columns or ("*",))

    def join(self, other_table: str, on: dict[str, str]) -> Table:
        return self._with(_joins=(*self._joins, (other_table, on)))

    def sort(self, column: str, desc: bool = False) -> Table:
        return self._with(_order=f"{column} {'DESC' if desc else 'ASC'}")

    def limit(self, n: int | None) -> Table:
        return self._with(_limit=n)

    def eq(self, column: str, value: Any) -> Table:
        return self._and(f"{_quoted(column)} = ?", value)

    def neq(self, column: str, value: Any) -> Table:
        return self._and(f"{_quoted(column)} != ?", value)

    def gt(self, column: str, value: Any) -> Table:
        return self._and(f"{_quoted(column)} > ?", value)

    def gte(self, column: str, value: Any) -> Table:
        return self._and(f"{_quoted(column)} >= ?", value)

    def lt(self, column: str, value: Any) -> Table:
        return self._and(f"{_quoted(column)} < ?", value)

    def lte(self, column: str, value: Any) -> Table:
        return self._and(f"{_quoted(column)} <= ?", value)

    def ilike(self, column: str, pattern: str) -> Table:
        return self._and(f"{_quoted(column)} LIKE ?", pattern)

    def in_(self, column: str, values: Any) -> Table:
        values = tuple(values)
        return self._and(f"{_quoted(column)} IN ({', '.join('?' * len(values))})", *values)

    def not_in(self, column: str, values: Any) -> Table:
        values = tuple(values)
        return self._and(f"{_quoted(column)} NOT IN ({', '.join('?' * len(values))})", *values)

    def is_null(self, column: str) -> Table:
        return self._and(f"{_quoted(column)} IS NULL")

    def not_null(self, column: str) -> Table:
        return self._and(f"{_quoted(column)} IS NOT NULL")

    def where(self, conditions: dict[str, Any] | None = None, **more: Any) -> Table:
        table = self
        for column, value in {**(conditions or {}), **more}.items():
            table = table.eq(column, value)
        return table

    def _statement(self) -> tuple[str, list]:
        sql = f"SELECT {', '.join(self._columns)} FROM {_quoted(self._name)}"
        for other, on in self._joins:
            pairs = (f"{_quoted(self._name)}.{_quoted(a)} = {_quoted(other)}.{_quoted(b)}" for a, b in on.items())
            sql += f" JOIN {_quoted(other)} ON {' AND '.join(pairs)}"
        if self._conditions:
            sql += " WHERE " + " AND ".join(condition for condition, _ in self._conditions)
        if self._order:
            sql += f" ORDER BY {self._order}"
        if self._limit is not None:
            sql += f" LIMIT {self._limit}"
        return sql, [value for _, values in self._conditions for value in values]

    def all(self) -> list[dict[str, Any]]:
        cursor = self._database.execute(*self._statement())
        columns = [column[0] for column in cursor.description]
        return [dict(zip(columns, row, strict=True)) for row in cursor]

    def first(self) -> dict[str, Any] | None:
        rows = self.limit(1).all()
        return rows[0] if rows else None

    def count(self) -> int:
        return self.select("COUNT(*) AS n").limit(None).all()[0]["n"]

    def assert_exists(self) -> Table:
        if self.first() is None:
            raise AssertionError("expected a matching row, found none: {} with {}".format(*self._statement()))
        return self

    def assert_none(self) -> Table:
        row = self.first()
        if row is not None:
            raise AssertionError("expected no matching row, found {}: {} with {}".format(row, *self._statement()))
        return self

    def assert_eq(self, column: str, value: Any) -> Table:
        row = self.first()
        if row is None or row.get(column) != value:
            raise AssertionError(f"expected {column} = {value!r}, found {row}: {self._statement()[0]}")
        return self


class _Instance:
    """``env.instance``: everything is loaded already."""

    def load(self) -> None:
        """Nothing to do."""


class Environment:
    """What a verifier gets as ``env``."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.instance = _Instance()
        self.instance_id: str = job["instance_id"]
        self.env_key: str = job["env_key"]
        self.env_variables: dict[str, Any] = job["env_variables"]
        self._databases = {name: Database(name, path) for name, path in job["databases"].items()}

    def db(self, name: str = "current") -> Database:
        if name not in self._databases:
            raise KeyError(f"unknown database {name!r}, expected one of: {', '.join(self._databases)}")
        return self._databases[name]

    def close(self) -> None:
        for database in self._databases.values():
            database.close()


# -------------------------------------------------------------------------------------------------- one verifier

# Names that hosted verifiers find ready made, and the SDK's modules they come from.
_SDK_NAMES = {
    "IgnoreConfig": "db",
    "DatabaseSnapshot": "db",
    "SnapshotDiff": "db",
    "normalized_contains": "local_executor",
    "normalized_string_comparison": "local_executor",
    "extract_numbers": "local_executor",
    "contains_number": "local_executor",
}
_NEEDS_SDK = re.compile(r"\bfleet\b|\.(?:snapshot|diff|describe)\b|\b(?:" + "|".join(_SDK_NAMES) + r")\b")


def needs_sdk(code: str) -> bool:
    return _NEEDS_SDK.search(code) is not None


@functools.cache
def sdk_names() -> dict[str, Any]:
    """The ready-made names. The import takes half a second: the worker does it, once, and its children inherit it."""
    try:
        importlib.import_module("fleet.resources.sqlite")
        return {name: getattr(importlib.import_module(f"fleet.verifiers.{m}"), name) for name, m in _SDK_NAMES.items()}
    except ImportError:
        return {}  # the verifier will say which name it misses


def _plain_decorator(*_: Any, **__: Any) -> Any:
    return lambda function: function


def _namespace(code: str) -> dict[str, Any]:
    return {
        "__name__": "verifier",
        "TASK_SUCCESSFUL_SCORE": 1,
        "TASK_FAILED_SCORE": 0,
        "Environment": Environment,
        "verifier": _plain_decorator,
        "json": json,
        "re": re,
        **(sdk_names() if needs_sdk(code) else {}),
    }


def _load(code: str, function_name: str) -> Any:
    namespace = _namespace(code)
    exec(compile(code, "verifier.py", "exec"), namespace)
    function = namespace.get(function_name)
    if type(function).__module__.startswith("fleet."):
        # Made by the SDK's own decorator, which turns every exception into the score 0: the bare function is wanted.
        function = function.func
    if not callable(function):
        raise NameError(f"the verifier defines no function {function_name!r}")
    return function


def _accepted(function: Any, keywords: dict[str, Any]) -> dict[str, Any]:
    """The keywords that the function takes: ``final_answer`` and ``conversation`` are offered, not imposed."""
    parameters = inspect.signature(function).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return keywords
    names = {parameter.name for parameter in parameters}
    return {name: value for name, value in keywords.items() if name in names}


def run_verifier(job: dict[str, Any]) -> dict[str, Any]:
    """Run the verifier of the job in this process. Every ending is a reply."""
    started, cpu_started = time.monotonic(), time.process_time()
    stdout = io.StringIO()
    environment = Environment(job)
    result, error = None, None
    try:
        with redirect_stdout(stdout):
            function = _load(job["code"], job["function_name"])
            result = function(environment, *job["args"], **_accepted(function, job["kwargs"]))
        if inspect.iscoroutine(result):
            result.close()
            raise TypeError("the verifier is a coroutine function; it must be an ordinary one")
        json.dumps(result, allow_nan=False)
    except BaseException as failure:  # SystemExit and the like must not end the verification without a reply
        result = None
        error = {
            "type": type(failure).__name__,
            "message": f"{type(failure).__name__}: {failure}"[:MAX_STDOUT_CHARS],
            "traceback": traceback.format_exc(limit=-8)[-MAX_STDOUT_CHARS:],
        }
    environment.close()
    return {
        "success": error is None,
        "result": result,
        "error": error,
        "stdout": stdout.getvalue()[:MAX_STDOUT_CHARS],
        "seconds": time.monotonic() - started,
        "cpu_s": time.process_time() - cpu_started,
        "reusable": error is None and threading.active_count() == 1,
    }


# ---------------------------------------------------------------------------------------------------- the worker


class _Ended(Exception):
    """The other side of a connection is gone."""


def _send(descriptor: int, frame: dict[str, Any]) -> None:
    data = json.dumps(frame).encode()
    data = struct.pack(">I", len(data)) + data
    while data:
        data = data[os.write(descriptor, data) :]


def _receive(descriptor: int, wait: Any = lambda: None) -> dict[str, Any]:
    """Read one frame. ``wait`` is called before each read and may raise.

    Raises:
        _Ended: the stream ended.
        ValueError: the frame is too long or is not JSON.
    """

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            wait()
            chunk = os.read(descriptor, size - len(data))
            if not chunk:
                raise _Ended
            data += chunk
        return data

    (length,) = struct.unpack(">I", exactly(4))
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    return json.loads(exactly(length))


def _serve_as_child(
    connection: int, program: bytes | None, folder: str | None, cpu_s: float, memory_bytes: int
) -> None:
    """``folder``: None where this kernel cannot limit reading."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    os.dup2(connection, 3)
    os.closerange(4, 1024)
    if folder is not None and not limit_reading(folder):
        raise RuntimeError("reading was promised to be limited, and is not")
    confine(program, cpu_s, memory_bytes)
    while True:
        _send(3, run_verifier(_receive(3)))
        gc.collect()  # what a verifier opened and forgot is closed before the next one comes


class _Child:
    """A confined process that runs verifiers."""

    def __init__(self, program: bytes | None, folder: str | None, cpu_s: float, memory_bytes: int) -> None:
        self._connection, theirs = socket.socketpair()
        self.uses = 0
        self.reusable = True
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _serve_as_child(theirs.fileno(), program, folder, cpu_s, memory_bytes)
            finally:
                os._exit(0)  # nothing of the worker, its exit handlers least of all, may run in a child
        theirs.close()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Run one job. Raises TimeoutError for a late child, and OSError, ValueError or _Ended for one that died."""
        deadline = time.monotonic() + job["timeout_s"]
        descriptor = self._connection.fileno()

        def wait() -> None:
            # The server sends nothing while it waits for an answer: stdin becomes readable only by ending.
            ready, _, _ = select.select([descriptor, 0], [], [], max(0.0, deadline - time.monotonic()))
            if descriptor not in ready:
                raise TimeoutError

        _send(descriptor, job)
        reply = _receive(descriptor, wait)
        self.uses += 1
        self.reusable = reply["reusable"] and self.uses < MAX_USES
        return {key: reply[key] for key in ("success", "result", "error", "stdout", "seconds", "cpu_s")}

    def end(self) -> int:
        """Kill and reap. The exit code; negative: the signal that had ended it, or ours."""
        self._connection.close()
        os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class _Worker:
    """Keeps one child ready and hands it one job after the other."""

    def __init__(self, folder: str | None, cpu_s: float, memory_bytes: int) -> None:
        self.program = usable_program()
        self._limits = (folder, cpu_s, memory_bytes)
        self._child: _Child | None = None
        self._freeze()

    def _freeze(self) -> None:
        gc.collect()
        gc.freeze()  # a collection in a child would otherwise copy every page it shares with the worker

    def prepare(self) -> None:
        """Have a child ready before it is needed."""
        if self._child is None:
            self._child = _Child(self.program, *self._limits)

    def run(self, job: dict[str, Any]) -> dict[str, Any]:
        if needs_sdk(job["code"]) and not sdk_names.cache_info().currsize:
            sdk_names()
            self._freeze()
            self.end_child()
        self.prepare()
        try:
            reply = self._child.ask(job)
        except TimeoutError:
            self.end_child()
            return _failure("TimeoutError", f"the verifier was killed: no verdict within {job['timeout_s']:g} s")
        except (OSError, ValueError, KeyError, TypeError, RecursionError, _Ended):
            code = self.end_child()
            return _failure("RuntimeError", f"the verifier's process ended without a verdict (exit code {code})")
        if not self._child.reusable:
            self.end_child()
        return reply

    def end_child(self) -> int | None:
        child, self._child = self._child, None
        return child.end() if child is not None else None


def _failure(kind: str, message: str) -> dict[str, Any]:
    error = {"type": kind, "message": message, "traceback": ""}
    return {"success": False, "result": None, "error": error, "stdout": ""}


def main(folder: str, timeout_s: float, memory_bytes: int) -> None:
    reading = can_limit_reading(folder)
    worker = _Worker(folder if reading else None, timeout_s * MAX_USES, memory_bytes)
    worker.prepare()
    try:
        _send(1, {"ready": True, "confined": worker.program is not None, "reading_limited": reading})
        while True:
            job = _receive(0)
            _send(1, worker.run(job))
            worker.prepare()
    except (_Ended, BrokenPipeError):
        worker.end_child()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3]))
