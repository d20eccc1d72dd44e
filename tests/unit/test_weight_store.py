"""Versions only grow and are on disk before they are seen; the newest snapshot is the one that is handed out."""

import json

import pytest
import torch

from actors.weight_store import STATE_FILE, WeightLedger
from serve.snapshot_header import SnapshotError, read_header
from serve.weight_transfer import pack_weights


def header(rows=2):
    return read_header(pack_weights({"weight": torch.zeros(rows, 3)}))


@pytest.fixture
def state_file(tmp_path):
    return tmp_path / "run" / STATE_FILE


def test_the_model_folder_is_version_0_and_each_publication_the_next(state_file):
    ledger = WeightLedger(state_file)
    assert ledger.latest() == (0, None)
    assert [ledger.publish(header(), snapshot) for snapshot in ("a", "b", "c")] == [1, 2, 3]
    assert ledger.latest() == (3, "c")


def test_a_version_never_names_two_sets_of_weights_across_restarts(state_file):
    ledger = WeightLedger(state_file)
    seen = {ledger.version, ledger.publish(header(), "a"), ledger.publish(header(), "b")}
    for life in "123":
        ledger = WeightLedger(state_file, life)  # continued from a model folder, perhaps without publishing anything
        assert ledger.latest()[1] is None
        assert ledger.version not in seen and ledger.version > max(seen)
        seen.add(ledger.version)
    assert ledger.publish(header(), "c") == max(seen) + 1


def test_in_one_life_of_a_run_the_versions_stay_and_only_the_folders_is_handed_out(state_file):
    WeightLedger(state_file, "first").publish(header(), "a")
    for _ in range(2):  # started, and started again before anything was published
        ledger = WeightLedger(state_file, "second")
        assert ledger.latest() == (2, None) and ledger.delivered
    ledger.publish(header(), "b")
    again = WeightLedger(state_file, "second")
    assert again.latest() == (2, None) and again.version == 3 and not again.delivered, "version 3 is lost"
    assert again.publish(header(), "c") == 4 and again.delivered


def test_a_snapshot_that_was_reserved_before_a_death_is_taken_after_it(state_file):
    version = WeightLedger(state_file, "life").reserve(header().shapes)
    again = WeightLedger(state_file, "life")
    assert not again.delivered
    again.deliver(version, header(), "a")
    assert again.delivered and again.latest() == (version, "a")
    with pytest.raises(SnapshotError, match=r"shape \[5, 3\]"):
        again.publish(header(rows=5), "b")


def test_a_state_file_of_a_run_that_knew_no_lives_is_continued(state_file):
    state_file.parent.mkdir()
    state_file.write_text('{"version": 4}')
    assert WeightLedger(state_file).latest() == (5, None)


def test_a_version_is_on_disk_before_it_is_returned(state_file):
    ledger = WeightLedger(state_file)
    for _ in range(3):
        version = ledger.publish(header(), "x")
        assert json.loads(state_file.read_text())["version"] == version
    assert [path.name for path in state_file.parent.iterdir()] == [STATE_FILE]


def test_if_it_cannot_be_written_nothing_is_published(state_file):
    ledger = WeightLedger(state_file)
    ledger.publish(header(), "a")
    state_file.with_suffix(".partial").mkdir()
    with pytest.raises(IsADirectoryError):
        ledger.publish(header(), "b")
    assert ledger.latest() == (1, "a")


def test_weights_of_another_model_are_refused(state_file):
    ledger = WeightLedger(state_file)
    ledger.publish(header(), "a")
    with pytest.raises(SnapshotError, match=r"shape \[5, 3\], the model \[2, 3\]"):
        ledger.publish(header(rows=5), "b")
    assert ledger.latest() == (1, "a")
    assert ledger.publish(header(), "b") == 2


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"version": "3"}', '{"version": -1}'])
def test_a_damaged_state_file_is_named(state_file, text):
    state_file.parent.mkdir()
    state_file.write_text(text)
    with pytest.raises(ValueError, match=f"{state_file} holds .*; restore or remove it"):
        WeightLedger(state_file)


def test_a_reserved_version_is_handed_out_once_its_snapshot_is_here(state_file):
    ledger = WeightLedger(state_file)
    ledger.publish(header(), "a")
    version = ledger.reserve(header().shapes)
    assert version == 2 and json.loads(state_file.read_text())["version"] == 2
    assert not ledger.delivered and ledger.latest() == (1, "a")
    ledger.deliver(version, header(), "b")
    assert ledger.delivered and ledger.latest() == (2, "b")


def test_a_late_snapshot_of_an_older_version_does_not_pass_for_the_newest(state_file):
    ledger = WeightLedger(state_file)
    older, newer = (ledger.reserve(header().shapes) for _ in range(2))
    ledger.deliver(older, header(), "a")
    assert not ledger.delivered and ledger.latest() == (older, "a")
    ledger.deliver(newer, header(), "b")
    assert ledger.delivered
    for wrong in (older, newer + 1):
        with pytest.raises(ValueError, match=f"version {wrong} is not one whose snapshot is awaited"):
            ledger.deliver(wrong, header(), "c")
    assert ledger.latest() == (newer, "b")


def test_a_snapshot_of_other_tensors_than_were_announced_is_refused(state_file):
    ledger = WeightLedger(state_file)
    version = ledger.reserve(header().shapes)
    with pytest.raises(SnapshotError, match=r"shape \[5, 3\], the model \[2, 3\]"):
        ledger.deliver(version, header(rows=5), "b")
    with pytest.raises(SnapshotError, match=r"shape \[5, 3\]"):
        ledger.reserve(header(rows=5).shapes)
    assert ledger.version == version
