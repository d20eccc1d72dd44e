"""The store of trajectories: exact, never in the way, and whole whatever dies."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.trajectory import Group
from tests.s3_server import ENVIRONMENT, Fault, serving_bucket, silent_server, url_of
from tests.trajectories import facts, make_groups, make_trajectory, trajectories
from train import s3, trajectory_store
from train.background_upload import BackgroundUpload, missing
from train.config import ConfigError, load_config
from train.preflight import check_store
from train.system import store_settings
from train.trajectory_files import finish, finished_files
from train.trajectory_spool import PARTIAL, SPOOL, Spool
from train.trajectory_store import StoreSettings, TrajectoryStore, recover
from train.trajectory_table import SCHEMA, Origin, json_line, record_batches, rows, trajectory

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "configs" / "demo.yaml"
STEP = Origin("train", 7, policy_version=6)


def stored(folder: Path, groups: list[Group], origin: Origin = STEP, **keys) -> trajectory_store.StoreReport:
    store = TrajectoryStore(StoreSettings(str(folder), **keys))
    store.put(groups, origin)
    return store.close()


def eventually(holds: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


def read(path: Path) -> list:
    return [trajectory(row) for batch in pq.ParquetFile(path).iter_batches() for row in rows(batch)]


def members(groups: list[Group]) -> list:
    return [facts(t) for group in groups for t in group.trajectories]


# Exact


@settings(max_examples=60)
@given(found=trajectories(), limit=st.sampled_from([0, 2**20]))
def test_any_trajectory_survives_the_table_bit_for_bit(found, limit):
    batches = list(record_batches([Group(1, "t", "e", [found, found])], STEP, limit))
    assert len(batches) == (1 if limit else 2)
    back = [trajectory(row) for batch in batches for row in rows(batch)]
    assert [facts(t) for t in back] == [facts(found)] * 2
    for t in back:
        t.validate()


def test_halves_of_surrogate_pairs_do_not_stop_a_batch():
    odd = replace(make_trajectory(1), messages=[{"role": "tool", "content": "a\ud800b", "name": "\udfff"}])
    (row,) = rows(next(record_batches([Group(1, "t", "e", [odd])], STEP)))
    assert row["messages"] == [{"role": "tool", "content": "a?b", "name": "?"}]
    json.loads(json_line(row))


def test_a_stored_batch_is_a_parquet_file_and_the_same_in_lines(tmp_path):
    groups = make_groups(5)
    report = stored(tmp_path, groups)
    assert (report.stored, report.lost, report.waiting, report.problem) == (1, 0, 0, None)
    assert [file.name for file in finished_files(tmp_path)] == ["step_000007.jsonl", "step_000007.parquet"]
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(groups)
    lines = [json.loads(line) for line in (tmp_path / "step_000007.jsonl").read_text().splitlines()]
    assert [facts(trajectory(line)) for line in lines] == members(groups)
    assert {(line["kind"], line["step"], line["policy_version"]) for line in lines} == {("train", 7, 6)}
    assert list((tmp_path / SPOOL).iterdir()) == []


def test_the_columns_are_those_of_the_documentation(tmp_path):
    stored(tmp_path, make_groups(1))
    schema = pq.read_schema(tmp_path / "step_000007.parquet")
    assert schema.equals(SCHEMA)
    text = (ROOT / "docs" / "trajectories.md").read_text(encoding="utf-8")
    assert [name for name in schema.names if f"`{name}`" not in text] == []


def test_lines_can_be_left_out(tmp_path):
    stored(tmp_path, make_groups(1), jsonl=False)
    assert [file.name for file in finished_files(tmp_path)] == ["step_000007.parquet"]


def test_training_and_evaluations_have_names_of_their_own(tmp_path):
    names = [
        Origin("train", 12, 11).name,
        Origin("eval", 12, 12, "sampled").name,
        Origin("eval", 12, 12, "greedy").name,
        Origin("eval", 12, 12).name,
    ]
    assert names == ["step_000012", "eval_000012_sampled", "eval_000012_greedy", "eval_000012"]


def test_row_groups_are_bounded(tmp_path):
    groups = make_groups(8, tokens=3000)
    size = sum(group.nbytes for group in groups)
    spool = Spool(tmp_path, jsonl=False)
    path = spool.write(groups, STEP, limit=size // 4)
    finish(path, tmp_path)
    file = pq.ParquetFile(tmp_path / "step_000007.parquet")
    assert 4 <= file.num_row_groups <= 6 and file.metadata.num_rows == 16
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(groups)
    spool.close()


# Never in the way


def test_put_does_not_wait_for_the_writer(tmp_path, monkeypatch):
    """The thread hangs in its first file: put goes on, nothing is dropped, and what waits is on disk."""
    release = threading.Event()
    slow = trajectory_store.finish
    monkeypatch.setattr(trajectory_store, "finish", lambda *a: (release.wait(30), slow(*a))[1])
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    begun = time.monotonic()
    for step in range(40):
        store.put(make_groups(2), replace(STEP, step=step))
    assert time.monotonic() - begun < 5
    assert store.report().waiting == 40 and len(list((tmp_path / SPOOL).glob("*/*.arrows"))) == 40
    release.set()
    assert store.close().waiting == 0
    assert len(list(tmp_path.glob("*.parquet"))) == 40


def test_a_batch_that_cannot_be_written_is_counted_and_the_next_one_is_stored(tmp_path, caplog):
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    broken = Group(1, "t", "e", [replace(make_trajectory(1), turns="many")])
    store.put([broken], STEP)
    store.put(make_groups(1), replace(STEP, step=8))
    report = store.close()
    assert (report.stored, report.lost) == (1, 1) and "step_000007" in caplog.text and "lost" in report.problem
    assert [file.stem for file in finished_files(tmp_path)] == ["step_000008"] * 2
    assert report.metrics() == {
        "trajectories/stored": 1.0,
        "trajectories/lost": 1.0,
        "trajectories/waiting": 0.0,
        "trajectories/not_uploaded": 0.0,
    }


def test_a_file_that_cannot_be_finished_is_tried_again_at_the_end(tmp_path, monkeypatch):
    real, failures = trajectory_store.finish, [OSError(28, "No space left on device")]

    def full_once(*arguments):
        if failures:
            raise failures.pop()
        return real(*arguments)

    monkeypatch.setattr(trajectory_store, "finish", full_once)
    report = stored(tmp_path, make_groups(2))
    assert report.waiting == 0 and "No space left" in report.problem
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(make_groups(2))


# Whole whatever dies


def spooled(folder: Path, groups: list[Group], origin: Origin = STEP, jsonl: bool = True) -> Path:
    """As a process leaves it that died right after put."""
    spool = Spool(folder, jsonl)
    path = spool.write(groups, origin)
    spool._lock.close()
    return path


def test_what_a_dead_store_left_is_finished_by_the_next_one(tmp_path):
    groups = make_groups(3)
    spooled(tmp_path, groups)
    report = recover(StoreSettings(str(tmp_path)))
    assert (report.recovered, report.cut) == (1, 0)
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(groups)
    assert list((tmp_path / SPOOL).iterdir()) == []


def test_what_dies_while_a_store_lives_is_finished_when_that_store_ends(tmp_path):
    """As the driver's store does for a learner that was killed."""
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    groups = make_groups(3)
    spooled(tmp_path, groups)
    assert store.close().recovered == 1
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(groups)


@pytest.mark.parametrize("jsonl", [True, False])
def test_what_is_recovered_has_lines_if_its_own_run_wanted_them(tmp_path, jsonl):
    spooled(tmp_path, make_groups(1), jsonl=jsonl)
    recover(StoreSettings(str(tmp_path), jsonl=not jsonl))
    assert (tmp_path / "step_000007.parquet").exists() and (tmp_path / "step_000007.jsonl").exists() == jsonl


def out_of_reach(path: Path) -> Path:
    """Make a spool one that cannot be opened; as root may open everything, not by its mode. Returns its lock."""
    owner = path.parent / "owner"
    owner.unlink()
    owner.mkdir()
    return owner


def test_a_spool_that_cannot_be_opened_stops_nothing_else(tmp_path):
    bad = spooled(tmp_path, make_groups(1), replace(STEP, step=1))
    bad = bad.parent.rename(bad.parent.with_name("!the first")) / bad.name
    out_of_reach(bad)
    spooled(tmp_path, make_groups(1), replace(STEP, step=2))
    report = stored(tmp_path, make_groups(1))
    assert (report.stored, report.recovered, report.waiting) == (1, 1, 1)
    assert str(bad.parent) in report.problem and "IsADirectoryError" in report.problem and bad.exists()
    assert [file.stem for file in finished_files(tmp_path)] == ["step_000002"] * 2 + ["step_000007"] * 2


def test_a_spool_that_can_be_opened_later_is_finished_then(tmp_path):
    owner = out_of_reach(spooled(tmp_path, make_groups(1)))
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    assert eventually(lambda: store.report().waiting == 1)
    owner.rmdir()
    owner.touch()
    report = store.close()
    assert (report.recovered, report.waiting) == (1, 0)


def test_a_spool_that_turns_out_to_be_a_living_stores_is_not_waiting(tmp_path):
    path = spooled(tmp_path, make_groups(1))
    owner = out_of_reach(path)
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    assert eventually(lambda: store.report().waiting == 1)
    owner.rmdir()
    with owner.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert store.close().waiting == 0 and path.exists()


def test_what_somebody_else_finished_is_not_waiting(tmp_path):
    path = spooled(tmp_path, make_groups(1))
    path.write_bytes(b"nonsense" * 100)
    store = TrajectoryStore(StoreSettings(str(tmp_path)))
    assert eventually(lambda: store.report().waiting == 1)
    path.unlink()
    assert store.close().waiting == 0


def test_time_that_runs_out_is_reported_with_what_is_left(tmp_path, monkeypatch):
    for step in (1, 2, 3):
        spooled(tmp_path, make_groups(1), replace(STEP, step=step))
    release, calls = threading.Event(), []

    def hangs_in_the_second(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            release.wait(30)
        return finish(*arguments)

    monkeypatch.setattr(trajectory_store, "finish", hangs_in_the_second)
    report = recover(StoreSettings(str(tmp_path)), timeout_s=1.0)
    release.set()
    assert (report.recovered, report.waiting) == (1, 2)
    assert report.problem == "not everything was finished within 1 s"


def test_what_a_living_store_has_is_left_alone(tmp_path):
    spool = Spool(tmp_path)
    path = spool.write(make_groups(1), STEP)
    assert Spool.adopt(path.parent) is None
    assert recover(StoreSettings(str(tmp_path))).recovered == 0 and path.exists()
    spool.close()
    assert path.exists(), "a spool that still holds something must not go"


@settings(max_examples=30)
@given(data=st.data())
def test_a_half_written_file_gives_back_every_whole_batch_wherever_it_was_cut(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cut")
    groups = make_groups(4, samples=1, tokens=300)
    spool = Spool(folder)
    # Where each trajectory ends, one a record batch: a stream of the first n ends there, and 8 bytes more say so.
    ends = [spool.write(groups[:n], STEP, limit=0).stat().st_size - 8 for n in range(5)]
    path = spool.write(groups, STEP, limit=0)
    for other in spool.files()[:-1]:
        other.unlink()
    cut = data.draw(st.integers(0, ends[-1] + 8))
    partial = path.with_name(path.name + PARTIAL)
    partial.write_bytes(path.read_bytes()[:cut])
    path.unlink()
    spool._lock.close()
    report = recover(StoreSettings(str(folder)))
    target = folder / "step_000007.parquet"
    found = [facts(t) for t in read(target)] if target.exists() else []
    assert found == members(groups)[: sum(cut >= end for end in ends[1:])]
    assert target.exists() == (cut >= ends[0])
    assert report.cut == (target.exists() and len(found) < 4) and not partial.exists()


def test_a_finished_file_that_cannot_be_read_is_kept_and_reported(tmp_path):
    path = spooled(tmp_path, make_groups(1))
    path.write_bytes(b"nonsense" * 100)
    report = recover(StoreSettings(str(tmp_path)))
    assert report.waiting == 1 and path.exists() and str(path) in report.problem


def test_finishing_that_breaks_off_leaves_the_spool_file_and_nothing_else(tmp_path, monkeypatch):
    path = spooled(tmp_path, make_groups(2))

    def full(row):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.trajectory_files.json_line", full)
    with pytest.raises(OSError, match="No space left"):
        finish(path, tmp_path)
    assert path.exists() and [file.name for file in tmp_path.iterdir()] == [SPOOL]


def test_finishing_twice_is_finishing_once(tmp_path):
    """The writer died between naming the finished file and removing the spool file."""
    path = spooled(tmp_path, make_groups(2))
    content = path.read_bytes()
    finish(path, tmp_path)
    before = {file.name: file.read_bytes() for file in finished_files(tmp_path)}
    path.write_bytes(content)
    assert recover(StoreSettings(str(tmp_path))).recovered == 1
    assert {file.name: file.read_bytes() for file in finished_files(tmp_path)} == before
    assert not (tmp_path / "superseded").exists()


def test_a_step_that_is_trained_again_supersedes_the_first_and_keeps_it(tmp_path):
    first, second = make_groups(2), make_groups(2, first=10)
    stored(tmp_path, first)
    stored(tmp_path, second)
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(second)
    (kept,) = (tmp_path / "superseded").iterdir()
    assert [facts(t) for t in read(kept)] == members(first)
    assert len(finished_files(tmp_path)) == 2


@pytest.mark.parametrize("late", ["the first", "the second"])
def test_of_two_batches_of_a_step_the_later_one_stands_in_whatever_order_they_are_finished(tmp_path, late, caplog):
    """An orphan of the run before may die, and its spool be adopted, after the step was trained again."""
    first, second = make_groups(2), make_groups(2, first=10)
    paths = [spooled(tmp_path, first), spooled(tmp_path, second)]
    for path in reversed(paths) if late == "the first" else paths:
        finish(path, tmp_path)
    assert [facts(t) for t in read(tmp_path / "step_000007.parquet")] == members(second)
    lines = [json.loads(line) for line in (tmp_path / "step_000007.jsonl").read_text().splitlines()]
    assert [facts(trajectory(line)) for line in lines] == members(second)
    (kept,) = (tmp_path / "superseded").iterdir()
    assert [facts(t) for t in read(kept)] == members(first) and str(kept) in caplog.text
    assert not any(path.exists() for path in paths)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        SPOOL,
        "step_000007.jsonl",
        "step_000007.parquet",
        "superseded",
    ]


def test_files_are_on_the_disk_before_they_have_their_names(tmp_path, monkeypatch):
    synced, named = {}, []

    def fsync(descriptor):
        assert named == []
        synced[Path(os.readlink(f"/proc/self/fd/{descriptor}")).name.split(".")[2]] = os.fstat(descriptor).st_size

    def rename(path, target):
        named.append(target)
        os.replace(path, target)

    path = spooled(tmp_path, make_groups(2))
    monkeypatch.setattr("train.trajectory_files.os.fsync", fsync)
    monkeypatch.setattr(Path, "replace", rename)
    finish(path, tmp_path)
    assert named == [tmp_path / "step_000007.jsonl", tmp_path / "step_000007.parquet"]
    assert synced == {file.suffix[1:]: file.stat().st_size for file in named}


WRITER = """
import sys
from tests.trajectories import make_groups
from train.trajectory_store import StoreSettings, TrajectoryStore
from train.trajectory_table import Origin
store = TrajectoryStore(StoreSettings(sys.argv[1]))
for step in range(10_000):
    store.put(make_groups(4, first=4 * step, tokens=2_000), Origin("train", step, step))
    print(step, flush=True)
"""


@pytest.mark.parametrize("steps", [1, 7, 25])
def test_nothing_that_was_put_is_lost_when_the_process_is_killed(tmp_path, steps):
    process = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )
    for _ in range(steps):
        done = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    done = max([done, *map(int, process.stdout.read().split())])
    process.wait()
    report = recover(StoreSettings(str(tmp_path)))
    assert report.waiting == 0
    for step in range(done + 1):
        found = [facts(t) for t in read(tmp_path / f"step_{step:06d}.parquet")]
        assert found == members(make_groups(4, first=4 * step, tokens=2_000))
        assert len((tmp_path / f"step_{step:06d}.jsonl").read_text().splitlines()) == 8
    assert list((tmp_path / SPOOL).iterdir()) == []


# Configuration

DUMP = ["--trainer.dump_trajectories", "true"]


def test_a_run_keeps_its_trajectories_where_it_is_told(tmp_path):
    config = ["--name", "red", "--output_dir", str(tmp_path)]
    assert store_settings(load_config(DEMO, config)) is None
    folder = str(tmp_path / "red" / "trajectories")
    assert store_settings(load_config(DEMO, [*config, *DUMP])) == StoreSettings(folder, jsonl=True, upload_to=None)
    keys = ["--trajectories.jsonl", "false", "--trajectories.upload_to", "s3://bucket/runs/"]
    found = store_settings(load_config(DEMO, [*config, *DUMP, *keys]))
    assert found == StoreSettings(folder, jsonl=False, upload_to="s3://bucket/runs/red/trajectories")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["--trajectories.upload_to", "s3://bucket"], "trainer.dump_trajectories is not"),
        ([*DUMP, "--trajectories.upload_to", "bucket/runs"], "trajectories.upload_to"),
        ([*DUMP, "--trajectories.upload", "s3://bucket"], "trajectories.upload_to"),
    ],
)
def test_a_store_that_cannot_be_meant_is_one_clear_line(keys, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_config(DEMO, keys)
    assert "\n" not in str(caught.value)


# Uploads


@pytest.fixture(scope="module")
def server():
    with serving_bucket("trajectories") as server:
        yield server


def contents(prefix: str, folder: Path) -> dict[str, bytes]:
    found = {}
    for item in s3.objects(prefix):
        path = s3.fetch(item.location, folder)
        found[path.name] = path.read_bytes()
    return found


def test_finished_files_are_uploaded_and_stay(server, tmp_path):
    server.arm()
    report = stored(tmp_path / "run", make_groups(2), upload_to="s3://trajectories/a/run")
    assert report.not_uploaded == 0
    local = {file.name: file.read_bytes() for file in finished_files(tmp_path / "run")}
    assert contents("s3://trajectories/a/", tmp_path / "back") == local and len(local) == 2


def test_an_outage_is_waited_out_and_holds_nothing_up(server, tmp_path, caplog):
    server.arm(Fault(503, "SlowDown", count=1_000_000))
    uploads = BackgroundUpload(retry_s=(0.01,))
    files = []
    for number in range(3):
        files.append(tmp_path / f"{number}.txt")
        files[-1].write_text(str(number))
        uploads.add(files[-1], f"s3://trajectories/b/{number}.txt")
    while uploads.error is None:
        time.sleep(0.01)
    assert len(uploads.waiting()) == 3 and "will be tried again" in caplog.text
    server.arm()
    assert eventually(lambda: not uploads.waiting())
    assert uploads.close(10) == [] and uploads.error is None
    assert set(contents("s3://trajectories/b/", tmp_path / "back")) == {"0.txt", "1.txt", "2.txt"}


def test_what_could_not_be_uploaded_is_reported_and_the_next_store_uploads_it(server, tmp_path, caplog):
    server.arm(Fault(403, "AccessDenied", count=1_000_000))
    report = stored(tmp_path / "run", make_groups(2), upload_to="s3://trajectories/c")
    assert report.not_uploaded == 2 and "access denied" in report.problem
    assert f"fleet-rl trajectories recover {tmp_path}/run --upload-to s3://trajectories/c/" in caplog.text
    server.arm()
    report = recover(StoreSettings(str(tmp_path / "run"), upload_to="s3://trajectories/c/"))
    assert report.not_uploaded == 0
    local = {file.name: file.read_bytes() for file in finished_files(tmp_path / "run")}
    assert contents("s3://trajectories/c/", tmp_path / "back") == local
    server.arm()
    recover(StoreSettings(str(tmp_path / "run"), upload_to="s3://trajectories/c/"))
    assert server.count("PUT") == 0, "what is there was uploaded again"


def test_a_listing_that_fails_at_the_end_sends_nothing_again(server, tmp_path):
    """Of files that another store finished nobody knows whether they are there: they count as not uploaded."""
    server.arm()
    folder, prefix = tmp_path / "run", "s3://trajectories/f/"
    stored(folder, make_groups(1), replace(STEP, step=1), upload_to=prefix)
    store = TrajectoryStore(StoreSettings(str(folder), upload_to=prefix))
    store.put(make_groups(1), replace(STEP, step=2))
    assert eventually(lambda: server.count("PUT") == 4 and store.report().not_uploaded == 0)
    stored(folder, make_groups(1), replace(STEP, step=3))
    server.arm(Fault(403, "AccessDenied", count=1_000_000, method="GET"))
    report = store.close()
    assert report.not_uploaded == 2 and "access denied" in report.problem
    assert server.count("PUT") == 0
    server.arm()
    assert recover(StoreSettings(str(folder), upload_to=prefix)).not_uploaded == 0
    assert server.count("PUT") == 2
    assert set(contents(prefix, tmp_path / "back")) == {file.name for file in finished_files(folder)}


def test_without_the_right_to_list_every_file_is_sent_once(server, tmp_path):
    folder, prefix = tmp_path / "run", "s3://trajectories/g/"
    stored(folder, make_groups(1), replace(STEP, step=1))
    server.arm(Fault(403, "AccessDenied", count=1_000_000, method="GET"))
    store = TrajectoryStore(StoreSettings(str(folder), upload_to=prefix))
    store.put(make_groups(1), replace(STEP, step=2))
    assert eventually(lambda: store.report().waiting == 0 and server.count("PUT") == 4)
    assert eventually(lambda: store.report().not_uploaded == 0)
    assert store.close().not_uploaded == 0 and server.count("PUT") == 4


def test_a_file_that_is_gone_is_not_missing(server, tmp_path):
    server.arm()
    (tmp_path / "there").write_text("x")
    assert [item.path.name for item in missing([tmp_path / "gone", tmp_path / "there"], "s3://trajectories/h/")] == [
        "there"
    ]


def test_files_of_which_a_silent_store_does_not_tell_count_as_not_uploaded(server, tmp_path, monkeypatch):
    stored(tmp_path, make_groups(1))
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 5.0)
    with silent_server() as listener:
        monkeypatch.setenv("AWS_ENDPOINT_URL", url_of(listener))
        report = recover(StoreSettings(str(tmp_path), upload_to="s3://trajectories/i/"), timeout_s=1.0)
    assert (report.waiting, report.not_uploaded) == (0, 2)
    assert report.problem == "not everything was finished within 1 s"


SENDER = """
import sys
from pathlib import Path
from train import s3
from train.background_upload import BackgroundUpload
s3.READ_TIMEOUT_S = 20.0
uploads = BackgroundUpload()
uploads.add(Path(sys.argv[1]), "s3://trajectories/file")
sys.stdin.readline()
print(len(uploads.close(1)), flush=True)
"""


@pytest.mark.parametrize("size", [1, s3.MULTIPART_BYTES + 1])
def test_a_store_that_does_not_answer_does_not_keep_the_process(tmp_path, size):
    path = tmp_path / "file"
    path.write_bytes(bytes(size))
    with silent_server() as listener:
        environment = os.environ | ENVIRONMENT | {"AWS_ENDPOINT_URL": url_of(listener)}
        command = [sys.executable, "-c", SENDER, str(path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, env=environment, **pipes) as process:
            try:
                listener.settimeout(60)
                listener.accept()
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "1\n"
                assert process.wait(timeout=10) == 0
            finally:
                process.kill()


def test_a_run_is_told_before_it_starts_that_it_cannot_reach_its_store(server):
    server.arm()
    check_store("s3://trajectories/new/folder")
    with pytest.raises(ConfigError, match="trajectories.upload_to: s3://absent/: there is no such bucket"):
        check_store("s3://absent")


def test_one_file_that_cannot_be_uploaded_does_not_hold_up_the_others(server, tmp_path):
    server.arm()
    uploads = BackgroundUpload(retry_s=(0.01,))
    uploads.add(tmp_path / "absent", "s3://trajectories/d/absent")
    (tmp_path / "there").write_text("x")
    uploads.add(tmp_path / "there", "s3://trajectories/d/there")
    left = uploads.close(20)
    assert [item.path.name for item in left] == ["absent"]
    assert set(contents("s3://trajectories/d/", tmp_path / "back")) == {"there"}


def test_closing_is_bounded_in_time(server, tmp_path, monkeypatch):
    monkeypatch.setattr("train.background_upload.upload", lambda path, location: time.sleep(3))
    uploads = BackgroundUpload()
    for _ in range(5):
        uploads.add(tmp_path, "s3://trajectories/e")
    begun = time.monotonic()
    assert len(uploads.close(0.2)) >= 4
    assert time.monotonic() - begun < 2
