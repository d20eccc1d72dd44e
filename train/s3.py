"""Objects in S3, or in a store that speaks its protocol: list, fetch, upload, and errors in one line.

boto3 reads credentials, region and endpoint where it always does: ``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
``AWS_PROFILE``, ``AWS_DEFAULT_REGION``, ``AWS_ENDPOINT_URL``, files under ``~/.aws``, a role of the machine. A request
that fails for a reason that may pass is sent again, ``ATTEMPTS`` times in all (botocore's "standard" mode).

The only file that imports boto3, and only when the first request is made.
"""

from __future__ import annotations

import base64
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

ATTEMPTS = 5
CONNECT_TIMEOUT_S = 10.0
READ_TIMEOUT_S = 60.0
MULTIPART_BYTES = 16 * 2**20  # a larger file travels in parts of this size
CONCURRENCY = 4  # parts of one file at once, of a download

_READ_BYTES = 2**20
# A Path swallows one of the two slashes.
_LOCATION = re.compile(r"s3:/{1,2}([^/]+)(?:/(.*))?", re.DOTALL)

_CREDENTIALS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN), or AWS_PROFILE"
_REGION = "the bucket is in another region than {region}: set AWS_DEFAULT_REGION to the bucket's"
_PROBLEMS = {
    "NoSuchBucket": "there is no such bucket: check its name, and AWS_ENDPOINT_URL if it is not on AWS",
    "NoSuchKey": "there is no such object: check the name",
    # The answer to a HEAD request has no body that could tell a missing bucket from a missing object.
    "404": "there is no such object, or no such bucket: check both names",
    "AccessDenied": f"access denied: the credentials lack the right, or are wrong; {_CREDENTIALS}",
    "403": f"access denied: the credentials lack the right, or are wrong; {_CREDENTIALS}",
    "InvalidAccessKeyId": f"the access key is unknown there: {_CREDENTIALS}",
    "SignatureDoesNotMatch": f"the secret key does not belong to the access key: {_CREDENTIALS}",
    "InvalidToken": f"the session token is not valid: {_CREDENTIALS}",
    "ExpiredToken": "the credentials have expired: sign in again, or renew AWS_SESSION_TOKEN",
    "RequestTimeTooSkewed": "this machine's clock is wrong: set it",
    "PermanentRedirect": _REGION,
    "AuthorizationHeaderMalformed": _REGION,
    "IllegalLocationConstraintException": _REGION,
    "301": _REGION,
    "400": f"bad request, which for a lookup mostly means a wrong region ({{region}}) or session token; {_CREDENTIALS}",
}


class StorageError(Exception):
    """What went wrong with a stored object, in one line: where, what, and what to do."""


@dataclass(frozen=True)
class StoredObject:
    """An object as a listing shows it; ``size`` in bytes."""

    location: str
    size: int
    etag: str


def is_s3(location: str | Path) -> bool:
    """Whether ``location`` names something in S3 (``s3://bucket/...``) rather than a file."""
    return _LOCATION.fullmatch(str(location)) is not None


def objects(prefix: str) -> Iterator[StoredObject]:
    """Every object whose location begins with ``prefix``, in the order of their keys, a page of 1,000 at a time.

    End the prefix with ``/`` to mean a folder. Empty markers of folders are left out.

    Raises:
        StorageError: while iterating.
    """
    bucket, key = _split(prefix)
    with _readable(f"s3://{bucket}/{key}"):
        for page in _client().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key):
            for found in page.get("Contents", ()):
                if not found["Key"].endswith("/"):
                    location = f"s3://{bucket}/{found['Key']}"
                    yield StoredObject(location, found["Size"], found["ETag"].strip('"'))


def fetch(location: str, folder: Path) -> Path:
    """Download one object into ``folder`` under the last part of its name, whole or not at all.

    Returns:
        The path of the file; one that was there is replaced.

    Raises:
        StorageError: there is no such object, or it could not be read or written.
    """
    bucket, key = _split_object(location)
    target = folder / key.rsplit("/", 1)[-1]
    with _readable(f"s3://{bucket}/{key}"):
        folder.mkdir(parents=True, exist_ok=True)
        # boto3 writes under a temporary name beside the target, and renames.
        _client().download_file(bucket, key, str(target), Config=_transfer_config(threads=True))
    return target


def upload(path: Path, location: str) -> None:
    """Store a file as the object ``location``; returns only once the store holds these very bytes.

    The CRC-32 of the file travels with it, and S3 refuses what does not match. Afterwards size and checksum are
    asked for and compared; a store that keeps no checksums is asked for the size alone. It all happens in the caller's
    thread: one of boto3's own would keep the process alive for as long as the store does not answer.

    Raises:
        StorageError: the file could not be read or stored, or what is stored differs.
    """
    bucket, key = _split_object(location)
    where = f"s3://{bucket}/{key}"
    with _readable(where):
        size, checksum = path.stat().st_size, _crc32(path)
        extra = {"ChecksumCRC32": checksum}
        _client().upload_file(str(path), bucket, key, ExtraArgs=extra, Config=_transfer_config(threads=False))
        stored = _client().head_object(Bucket=bucket, Key=key, ChecksumMode="ENABLED")
    if stored["ContentLength"] != size:
        raise StorageError(f"{where}: {stored['ContentLength']} bytes are stored, {path} has {size}: upload it again")
    if stored.get("ChecksumCRC32", checksum) != checksum:
        raise StorageError(f"{where}: what is stored differs from {path} (checksum): upload it again")


def _split(location: str) -> tuple[str, str]:
    """Bucket and key or prefix."""
    match = _LOCATION.fullmatch(str(location))
    if match is None:
        raise StorageError(f"{location}: not a location in S3; write s3://BUCKET/KEY")
    return match[1], match[2] or ""


def _split_object(location: str) -> tuple[str, str]:
    bucket, key = _split(location)
    if key.rsplit("/", 1)[-1] in ("", ".", ".."):
        raise StorageError(f"{location}: names no object; write s3://BUCKET/KEY, with a key that does not end in /")
    return bucket, key


def _client() -> Any:
    return _client_for(tuple(sorted((k, v) for k, v in os.environ.items() if k.startswith("AWS_"))))


@lru_cache(maxsize=2)
def _client_for(environment: tuple[tuple[str, str], ...]) -> Any:
    """A client for the process's AWS settings, which it reads once. Threads may share it."""
    from boto3.session import Session
    from botocore.config import Config

    retries = {"mode": "standard", "total_max_attempts": ATTEMPTS}
    config = Config(retries=retries, connect_timeout=CONNECT_TIMEOUT_S, read_timeout=READ_TIMEOUT_S)
    return Session().client("s3", config=config)


def _transfer_config(threads: bool) -> Any:
    """Without threads the parts travel one after the other, in the thread of the caller."""
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=MULTIPART_BYTES,
        multipart_chunksize=MULTIPART_BYTES,
        max_concurrency=CONCURRENCY,
        use_threads=threads,
    )


def _crc32(path: Path) -> str:
    """As S3 writes it: base64 of four bytes, the highest first."""
    value = 0
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            value = zlib.crc32(block, value)
    return base64.b64encode(value.to_bytes(4, "big")).decode("ascii")


@contextmanager
def _readable(where: str) -> Iterator[None]:
    """Turn whatever boto3 or the file system raises into one line."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        yield
    except Boto3Error as error:
        # Uploads wrap the answer of the service in an exception that says less.
        raise StorageError(f"{where}: {_describe(error.__context__ or error)}") from error
    except (BotoCoreError, ClientError, OSError, ValueError) as error:
        raise StorageError(f"{where}: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    from botocore import exceptions as boto

    unreachable = (boto.ConnectionError, boto.HTTPClientError)
    if isinstance(error, boto.ClientError):
        return _describe_answer(error)
    if isinstance(error, boto.NoCredentialsError | boto.PartialCredentialsError):
        return f"there are no complete credentials: {_CREDENTIALS}"
    if isinstance(error, boto.CredentialRetrievalError | boto.TokenRetrievalError | boto.ProfileNotFound):
        return f"no credentials: {_one_line(error)}; {_CREDENTIALS}"
    if isinstance(error, unreachable):
        return f"no answer: {_one_line(error)}; check the network, and AWS_ENDPOINT_URL if it is set"
    if isinstance(error, OSError):
        return f"a local file cannot be read or written: {_one_line(error)}"
    return f"{_one_line(error)}; check the location and the AWS_* settings"


def _describe_answer(error: Any) -> str:
    """An answer of the service that says no."""
    code = str(error.response.get("Error", {}).get("Code", ""))
    status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
    if code in _PROBLEMS:
        return _PROBLEMS[code].format(region=_client().meta.region_name)
    if status >= 500 or status == 429:
        return f"the service failed {ATTEMPTS} times ({code}, status {status}): try again later"
    return f"{_one_line(error)}; check the location and the AWS_* settings"


def _one_line(error: object) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
