"""train/s3.py against an S3 server over real sockets."""

from __future__ import annotations

import hashlib
import os
import socket
from pathlib import Path

import boto3
import pytest
from hypothesis import given
from hypothesis import strategies as st
from moto.core.authorization import enable_iam_authentication

from tests.s3_server import ENVIRONMENT, Fault, serving_s3
from train import s3
from train.s3 import StorageError

BUCKET = "runs"
MIB = 2**20


@pytest.fixture(scope="module")
def server():
    with serving_s3() as server, pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.url}).items():
            patch.setenv(name, value)
        location = {"LocationConstraint": ENVIRONMENT["AWS_DEFAULT_REGION"]}
        boto3.session.Session().client("s3").create_bucket(Bucket=BUCKET, CreateBucketConfiguration=location)
        yield server


@pytest.fixture(autouse=True)
def no_faults(server, monkeypatch):
    # botocore waits up to 20 s between attempts.
    monkeypatch.setattr("botocore.retries.standard.ExponentialBackoff.delay_amount", lambda self, context: 0.01)
    server.arm()
    yield
    server.arm()


def stored(name: str, data: bytes, folder: Path) -> str:
    path = folder / "source"
    path.write_bytes(data)
    s3.upload(path, f"s3://{BUCKET}/{name}")
    return f"s3://{BUCKET}/{name}"


def one_line(call, *arguments) -> str:
    with pytest.raises(StorageError) as caught:
        list(call(*arguments) or ())
    message = str(caught.value)
    assert "\n" not in message and len(message) < 400
    return message


# Locations


@pytest.mark.parametrize("location", ["s3://b/k", "s3://b", Path("s3://b/k/l"), "s3://b/k l"])
def test_locations_in_s3_are_told_from_files(location):
    assert s3.is_s3(location)


@pytest.mark.parametrize("location", ["/s3://b/k", "runs/demo", "s3:", "s3://", "gs://b/k", Path("s3")])
def test_files_are_no_locations_in_s3(location):
    assert not s3.is_s3(location)


@given(st.text(max_size=30))
def test_a_location_that_names_no_object_is_one_clear_line(text):
    for location in (text, f"s3://{text}/", f"s3://b/{text}/"):
        if location.startswith("s3:/") and not location.endswith(("/", "/.", "/..")):
            continue
        with pytest.raises(StorageError, match="write s3://BUCKET/KEY"):
            s3._split_object(location)


# Upload and fetch


@pytest.mark.parametrize("size", [0, 1, 100_000, 2 * s3.MULTIPART_BYTES + 12_345])
def test_what_was_uploaded_comes_back_byte_for_byte(server, tmp_path, size):
    data = os.urandom(size)
    location = stored(f"back/{size}/file.bin", data, tmp_path)
    path = s3.fetch(location, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / "file.bin"
    assert hashlib.sha256(path.read_bytes()).digest() == hashlib.sha256(data).digest()
    assert [p.name for p in path.parent.iterdir()] == ["file.bin"]


def test_a_large_file_travels_in_parts(server, tmp_path):
    stored("parts/large", bytes(2 * s3.MULTIPART_BYTES + 1), tmp_path)
    assert server.count("PUT /runs/parts/large?") == 3
    assert server.count("POST /runs/parts/large?uploads") == 1


def test_what_the_store_holds_is_asked_for_after_an_upload(server, tmp_path):
    stored("asked", b"abc", tmp_path)
    assert [r.split("?")[0] for r in server.requests] == ["PUT /runs/asked", "HEAD /runs/asked"]


@pytest.mark.parametrize("stands", [b"other size", b"ABC"])
def test_an_upload_that_left_other_bytes_is_an_error(server, tmp_path, monkeypatch, stands):
    """Somebody else writes the object between our upload and our look."""
    path = tmp_path / "source"
    path.write_bytes(b"abc")
    client = s3._client()
    upload_file = client.upload_file

    def upload_and_lose(*arguments, **keywords):
        upload_file(*arguments, **keywords)
        client.put_object(Bucket=BUCKET, Key="raced", Body=stands, ChecksumAlgorithm="CRC32")

    monkeypatch.setattr(client, "upload_file", upload_and_lose)
    assert "upload it again" in one_line(s3.upload, path, f"s3://{BUCKET}/raced")


def test_a_fetched_file_replaces_the_old_one_and_a_failed_fetch_leaves_it(server, tmp_path):
    location = stored("again/file", b"new", tmp_path)
    target = tmp_path / "folder" / "file"
    target.parent.mkdir()
    target.write_bytes(b"old")
    server.arm(Fault(503, "SlowDown", count=1000))
    one_line(s3.fetch, location, target.parent)
    assert target.read_bytes() == b"old" and list(target.parent.iterdir()) == [target]
    server.arm()
    s3.fetch(location, target.parent)
    assert target.read_bytes() == b"new"


def test_an_object_cut_off_in_the_middle_is_read_again(server, tmp_path):
    data = os.urandom(MIB)
    location = stored("cut", data, tmp_path)
    server.arm(Fault(0, "", count=2, method="GET", partial_body=True))
    assert s3.fetch(location, tmp_path / "out").read_bytes() == data
    assert server.count("GET ") == 3


def test_a_missing_local_file_is_one_clear_line(server, tmp_path):
    assert "local file" in one_line(s3.upload, tmp_path / "absent", f"s3://{BUCKET}/absent")


# Listing


def test_a_listing_goes_on_over_pages_and_keeps_to_its_prefix(server, tmp_path):
    names = [f"many/{i:04d}" for i in range(1100)]
    for name in (*names, "many-others/0", "many/folder/"):
        server.backend.put_object(BUCKET, name, name.encode())
    found = list(s3.objects(f"s3://{BUCKET}/many/"))
    assert [o.location for o in found] == [f"s3://{BUCKET}/{name}" for name in names]
    assert {o.size for o in found} == {len("many/0000")}
    assert found[7].etag == hashlib.md5(b"many/0007").hexdigest()
    assert server.count(f"GET /{BUCKET}?") == 2


def test_a_listing_of_nothing_is_empty(server):
    assert list(s3.objects(f"s3://{BUCKET}/nothing/here/")) == []


# What goes wrong


@pytest.mark.parametrize(("status", "code"), [(503, "SlowDown"), (500, "InternalError"), (429, "TooManyRequests")])
def test_a_service_that_fails_twice_and_then_works_goes_unnoticed(server, tmp_path, status, code):
    server.arm(Fault(status, code, count=2))
    location = stored(f"retried/{code}", b"abc", tmp_path)
    server.arm(Fault(status, code, count=2))
    assert [o.location for o in s3.objects(location)] == [location]
    server.arm(Fault(status, code, count=2))
    assert s3.fetch(location, tmp_path).read_bytes() == b"abc"


def test_retries_are_bounded_and_said(server, tmp_path):
    server.arm(Fault(503, "SlowDown", count=1000))
    message = one_line(s3.objects, f"s3://{BUCKET}/x/")
    assert (
        message == f"s3://{BUCKET}/x/: the service failed {s3.ATTEMPTS} times (SlowDown, status 503): try again later"
    )
    assert len(server.requests) == s3.ATTEMPTS


def test_a_missing_bucket_and_a_missing_object_are_named(server, tmp_path):
    assert "no such bucket" in one_line(s3.objects, "s3://absent/x")
    path = tmp_path / "source"
    path.write_bytes(b"abc")
    assert "no such bucket" in one_line(s3.upload, path, "s3://absent/x")
    assert "no such object" in one_line(s3.fetch, f"s3://{BUCKET}/absent", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_wrong_credentials_say_what_to_check_and_keep_the_secret(server, tmp_path):
    path = tmp_path / "source"
    path.write_bytes(b"abc")
    with enable_iam_authentication():
        for call, arguments in (
            (s3.objects, (f"s3://{BUCKET}/",)),
            (s3.fetch, (f"s3://{BUCKET}/x", tmp_path)),
            (s3.upload, (path, f"s3://{BUCKET}/x")),
        ):
            message = one_line(call, *arguments)
            assert "AWS_ACCESS_KEY_ID" in message and "testing" not in message


def test_missing_credentials_say_what_to_set(server, monkeypatch):
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    assert "there are no complete credentials" in one_line(s3.objects, f"s3://{BUCKET}/")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    assert "there are no complete credentials" in one_line(s3.objects, f"s3://{BUCKET}/")


@pytest.mark.parametrize("code", ["PermanentRedirect", "AuthorizationHeaderMalformed"])
def test_a_wrong_region_names_the_one_in_use_and_what_to_set(server, tmp_path, code):
    status = 301 if code == "PermanentRedirect" else 400
    path = tmp_path / "source"
    path.write_bytes(b"abc")
    for call, arguments in (
        (s3.objects, (f"s3://{BUCKET}/",)),
        (s3.fetch, (f"s3://{BUCKET}/x", tmp_path)),
        (s3.upload, (path, f"s3://{BUCKET}/x")),
    ):
        # Answers to HEAD have no body: they cannot say what is wrong.
        server.arm(Fault(400, "Bad Request", count=1000, method="HEAD"), Fault(status, code, count=1000))
        message = one_line(call, *arguments)
        assert "region" in message and ENVIRONMENT["AWS_DEFAULT_REGION"] in message


def test_no_server_is_one_clear_line(server, monkeypatch):
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", url)
        message = one_line(s3.objects, f"s3://{BUCKET}/")
    assert url in message and "check the network" in message


@pytest.mark.parametrize(
    ("name", "value"),
    [("AWS_ENDPOINT_URL", "nonsense"), ("AWS_PROFILE", "absent"), ("AWS_DEFAULT_REGION", "no region")],
)
def test_settings_that_cannot_be_used_are_one_clear_line(server, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    one_line(s3.objects, f"s3://{BUCKET}/")


def test_a_bucket_name_that_cannot_be_is_one_clear_line(server):
    one_line(s3.objects, "s3://not a bucket/x")
