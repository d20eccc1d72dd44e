"""Checkpoints are whole or absent, and the last whole one survives everything."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.models import tiny_qwen3
from train import checkpoint
from train.checkpoint import CheckpointError


def _write(root: Path, step: int, content: bytes = b"weights") -> Path:
    folder = checkpoint.begin(root, step, needed_bytes=0)
    (folder / "policy").mkdir()
    (folder / "policy" / "model.bin").write_bytes(content)
    return checkpoint.commit(root, step, {"policy_version": step + 1})


def test_the_manifest_holds_sizes_digests_and_facts(tmp_path):
    path = _write(tmp_path, 7, b"abc")
    manifest = json.loads((path / "manifest.json").read_text())
    assert (path.name, manifest["step"], manifest["policy_version"]) == ("global_step_7", 7, 8)
    assert manifest["files"] == {"policy/model.bin": {"bytes": 3, "sha256": hashlib.sha256(b"abc").hexdigest()}}
    assert checkpoint.verify(path) == []


def test_what_an_interrupted_writer_leaves_is_no_checkpoint_and_is_cleared_by_the_next(tmp_path):
    _write(tmp_path, 1)
    partial = checkpoint.begin(tmp_path, 2, needed_bytes=0)
    (partial / "half").write_bytes(b"x")
    assert checkpoint.latest_complete(tmp_path).name == "global_step_1"
    _write(tmp_path, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_1", "global_step_3"]


def test_latest_complete_passes_over_missing_manifests_and_short_files(tmp_path):
    assert checkpoint.latest_complete(tmp_path / "nothing") is None
    for step in (9, 10, 11, 100):
        _write(tmp_path, step)
    (tmp_path / "global_step_100" / "policy" / "model.bin").write_bytes(b"short")
    (tmp_path / "global_step_11" / "manifest.json").write_text("{")
    assert checkpoint.latest_complete(tmp_path).name == "global_step_10"
    (tmp_path / "global_step_10" / "policy" / "model.bin").unlink()
    assert checkpoint.latest_complete(tmp_path).name == "global_step_9"


def test_verify_finds_changed_bytes_of_the_same_length(tmp_path):
    path = _write(tmp_path, 1, b"weights")
    (path / "policy" / "model.bin").write_bytes(b"weighty")
    assert checkpoint.latest_complete(tmp_path) == path
    assert checkpoint.verify(path) == [f"{path}/policy/model.bin: content differs from the manifest"]
    assert "no manifest" in checkpoint.verify(tmp_path / "global_step_2")[0]


def test_a_step_written_again_replaces_the_first(tmp_path):
    _write(tmp_path, 4, b"first")
    path = _write(tmp_path, 4, b"second")
    assert (path / "policy" / "model.bin").read_bytes() == b"second"
    assert checkpoint.verify(path) == []


def test_retention_keeps_the_newest_whole_ones(tmp_path):
    for step in range(1, 6):
        _write(tmp_path, step)
    (tmp_path / "global_step_5" / "manifest.json").unlink()
    (tmp_path / "global_step_2" / "manifest.json").unlink()
    deleted = checkpoint.prune(tmp_path, keep=2)
    assert [path.name for path in deleted] == ["global_step_1", "global_step_2"]
    # 5 is broken but newer than the newest whole one: whoever writes it may still be at it.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["global_step_3", "global_step_4", "global_step_5"]


def test_retention_never_deletes_the_last_whole_one(tmp_path):
    _write(tmp_path, 1)
    with pytest.raises(ValueError, match="at least one"):
        checkpoint.prune(tmp_path, keep=0)
    assert checkpoint.prune(tmp_path, keep=1) == []
    for step in (2, 3):
        _write(tmp_path, step)
        (tmp_path / f"global_step_{step}" / "manifest.json").unlink()
    checkpoint.prune(tmp_path, keep=1)
    assert checkpoint.latest_complete(tmp_path).name == "global_step_1"


def test_too_little_room_is_one_clear_line_and_leaves_nothing(tmp_path):
    with pytest.raises(CheckpointError, match=r"global_step_1 needs 1073741824.00 GiB but the disk has .* GiB free"):
        checkpoint.begin(tmp_path / "root", 1, needed_bytes=1 << 60)
    assert list((tmp_path / "root").iterdir()) == []


def test_a_folder_that_cannot_be_written_is_one_clear_line(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="could not be written: .*(Not a directory|File exists)"):
        checkpoint.begin(tmp_path / "file", 1, needed_bytes=0)


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from transformers import AutoModelForCausalLM
from train import checkpoint
root, model = Path(sys.argv[1]), Path(sys.argv[2])
lm = AutoModelForCausalLM.from_pretrained(model)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
folder = checkpoint.begin(root, 2, needed_bytes=0)
try:
    checkpoint.export_policy(folder / "policy", lm, model)
except checkpoint.CheckpointError as error:
    print(error)
"""


def test_a_write_that_fails_half_way_is_one_line_and_the_old_checkpoint_stays(tmp_path):
    model = tiny_qwen3(tmp_path / "model")
    _write(tmp_path / "root", 1)
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path / "root"), str(model)]
    repository = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=repository, check=True)
    assert "global_step_2.partial/policy could not be written: " in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert checkpoint.latest_complete(tmp_path / "root").name == "global_step_1"


@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_policy_loads_with_the_same_weights_tokenizer_and_template(tmp_path, tied):
    source = tiny_qwen3(tmp_path / "model", tied=tied)
    lm = AutoModelForCausalLM.from_pretrained(source)
    with torch.no_grad():
        for parameter in lm.parameters():
            parameter.add_(0.25)
    checkpoint.export_policy(tmp_path / "export", lm, source)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    for name, tensor in lm.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes()
    assert AutoTokenizer.from_pretrained(tmp_path / "export").chat_template
