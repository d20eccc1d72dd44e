"""Weights on their way: snapshots that are damaged are noticed, files go with their owner, engines follow updates."""

import asyncio
import os
import signal
import subprocess
import sys
from statistics import fmean

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load

from serve.config import PolicyConfig
from serve.engine import Engine
from serve.engine_errors import EngineDead
from serve.sampling import Sampling
from serve.shared_folder import SharedFolder, remove_abandoned
from serve.snapshot_header import SnapshotError, check_shapes, read_header
from serve.weight_layout import checksum
from serve.weight_transfer import check_received, checkpoint_shapes, pack_weights, read_snapshot
from tests.models import perturbed_weights, reference_logprobs, tiny_qwen3
from train.publisher import ipc_files

WEIGHTS = {
    "a.weight": torch.arange(12.0).reshape(3, 4),
    "b.weight": torch.linspace(-1, 1, 10).to(torch.bfloat16),
    "c.bias": torch.tensor(3.0),
}
PROMPTS = [list(b"Close ticket 12."), list(b"Who owns the oldest open ticket of the web team?"), list(range(256)) * 2]


def test_a_snapshot_holds_the_tensors_bit_for_bit():
    snapshot = pack_weights(WEIGHTS)
    assert snapshot.dtype == np.uint8 and snapshot.ndim == 1
    unpacked = load(snapshot.tobytes())  # the format's own reader
    assert unpacked.keys() == WEIGHTS.keys()
    assert all(unpacked[name].dtype == w.dtype and torch.equal(unpacked[name], w) for name, w in WEIGHTS.items())


def test_the_header_tells_shapes_and_checksums_of_a_sample():
    many = {f"layer.{i:03}": torch.full((2, i + 1), float(i)) for i in range(100)}
    header = read_header(pack_weights(many))
    assert header.shapes == {name: tuple(w.shape) for name, w in many.items()}
    assert 4 <= len(header.checksums) <= 8
    assert header.checksums == {name: checksum(many[name]) for name in header.checksums}
    check_received(header.checksums | {"another": "0"}, header.checksums)
    for name in header.checksums:
        with pytest.raises(SnapshotError, match=f"{name} changed on the way"):
            check_received(header.checksums | {name: checksum(many[name] + 1)}, header.checksums)


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_cut_snapshot_is_noticed(cut, tmp_path):
    whole = pack_weights(WEIGHTS)
    with pytest.raises(SnapshotError, match="publish it anew"):
        read_header(whole[:cut])
    path = tmp_path / "v1.safetensors"
    path.write_bytes(whole[:cut].tobytes())
    with pytest.raises(SnapshotError, match=str(path)):
        read_snapshot(path)


def test_what_is_no_snapshot_is_noticed(tmp_path):
    with pytest.raises(SnapshotError, match="no header"):
        read_header(np.frombuffer(b"\x10" + bytes(7) + b"[1, 2, 3, 4, 5] ", dtype=np.uint8))
    with pytest.raises(SnapshotError, match="No such file"):
        read_snapshot(tmp_path / "missing.safetensors")


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        ({"a": (2, 3)}, "lacks 1 of the model's tensors: b"),
        ({"a": (2, 3), "b": (4,), "c": (1,)}, "has 1 tensors the model has not: c"),
        ({"a": (3, 2), "b": (4,)}, r"tensor a has shape \[3, 2\], the model \[2, 3\]"),
    ],
)
def test_a_snapshot_of_another_model_is_noticed(shapes, reason):
    expected = {"a": (2, 3), "b": (4,)}
    check_shapes(expected, expected)
    with pytest.raises(SnapshotError, match=reason):
        check_shapes(shapes, expected)


def test_names_and_shapes_are_read_from_a_model_folder(tmp_path):
    with pytest.raises(SnapshotError, match=r"no \*\.safetensors"):
        checkpoint_shapes(tmp_path)
    shapes = checkpoint_shapes(tiny_qwen3(tmp_path / "tied", tied=True))
    assert shapes["model.embed_tokens.weight"] == (320, 128) and "lm_head.weight" not in shapes
    assert "lm_head.weight" in checkpoint_shapes(tiny_qwen3(tmp_path / "untied"))


def test_a_folder_goes_with_its_owner_and_snapshots_before(tmp_path):
    folder = SharedFolder("my run/1", root=tmp_path)
    assert folder.path.name.startswith(f"fleet-rl-my-run-1-{os.getpid()}-")
    with folder.snapshot_file(pack_weights(WEIGHTS), 3) as path:
        assert read_snapshot(path)[0].shapes["a.weight"] == (3, 4)
    assert not path.exists()
    with pytest.raises(ZeroDivisionError), folder.snapshot_file(pack_weights(WEIGHTS), 4) as path:
        raise ZeroDivisionError
    assert not path.exists()
    folder.close()
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_only_folders_of_dead_owners_are_removed(tmp_path):
    program = (
        "import sys, time; from pathlib import Path; from serve.shared_folder import SharedFolder;"
        f"f = SharedFolder('killed', root=Path({str(tmp_path)!r})); (f.path / 'v1').write_bytes(b'x');"
        "print(f.path.name, flush=True); time.sleep(60)"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    mine = SharedFolder("mine", root=tmp_path)
    (tmp_path / "fleet-rl-a-file-of-someone").touch()
    try:
        theirs = owner.stdout.readline().strip()
        assert remove_abandoned(tmp_path) == []
        owner.send_signal(signal.SIGKILL)
        owner.wait(10)
        assert remove_abandoned(tmp_path) == [theirs]
        assert mine.path.is_dir() and not (tmp_path / theirs).exists()
    finally:
        owner.kill()
        owner.wait(10)
        owner.stdout.close()
        mine.close()


@pytest.mark.parametrize("end", ["exit", "os._exit(0)", "os.kill(os.getpid(), 9)"])
def test_what_a_process_leaves_behind_goes_once_it_is_dead(tmp_path, end):
    root = tmp_path / "shared"
    root.mkdir()
    (tmp_path / "outside").touch()
    (root / "of-another").touch()
    program = (
        "import os, sys; from pathlib import Path; from serve.shared_folder import SharedFolder, remove_abandoned;"
        f"root = Path({str(root)!r}); (root / 'count').touch();"
        "SharedFolder('ipc', root=root).leave(['count', 'gone-by-itself', '../outside']);"
        f"assert remove_abandoned(root) == [] and (root / 'count').exists(); {end}"
    )
    subprocess.run([sys.executable, "-c", program], timeout=60, check="kill" not in end)
    assert (root / "count").exists()
    assert len(remove_abandoned(root)) == 1
    assert [path.name for path in root.iterdir()] == ["of-another"] and (tmp_path / "outside").exists()


def test_files_of_exported_memory_are_found_by_the_process_that_made_them(tmp_path):
    """The names are those seen on an H200: torch counts in decimal, CUDA in hexadecimal."""
    for name in ("cuda.shm.0.100b.1", "torch_4107_3666668229_0", "cuda.shm.0.4107.1", "torch_41070_1_0", "sem.x"):
        (tmp_path / name).touch()
    assert sorted(ipc_files(4107, tmp_path)) == ["cuda.shm.0.100b.1", "torch_4107_3666668229_0"]


CONFIG = PolicyConfig(max_model_len=1024, max_num_seqs=8, enforce_eager=True, kv_cache_gib=0.1)


def missing_tensor(weights):
    """Noticed while weights are loaded."""
    return {name: w for name, w in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}


def not_finite(weights):
    """Noticed at the end, in the engine's model."""
    return {name: torch.full_like(w, torch.nan) for name, w in weights.items()}


def whole(weights):
    """Nothing is wrong with it; see where it is used."""
    return weights


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[
        ("float32", True, missing_tensor, 1e-3),
        ("bfloat16", True, not_finite, 0.05),
        ("bfloat16", False, whole, 0.05),
    ],
    ids=["tied-fp32", "tied-bf16", "untied-bf16"],
)
async def case(request, tmp_path_factory):
    """An engine, its model folder, a way to break an update, and the tolerance of its dtype."""
    dtype, tied, broken, tolerance = request.param
    model = tiny_qwen3(tmp_path_factory.mktemp("model"), tied=tied)
    engine = await Engine.start(CONFIG.model_copy(update={"dtype": dtype}), model)
    yield engine, model, broken, tolerance
    await engine.shutdown()


async def update(engine, weights, version):
    folder = SharedFolder("test")
    try:
        with folder.snapshot_file(pack_weights(weights), version) as path:
            return await engine.update(path, version)
    finally:
        folder.close()


async def turns(engine):
    sampling = Sampling(max_tokens=24)
    return await asyncio.gather(*(engine.generate(p, sampling, request_id="t") for p in PROMPTS))


def mean_error(found, model, weights=None):
    """Mean difference of logprobs over all turns, per token, against fp32 ``transformers``."""
    differences = []
    for prompt, turn in zip(PROMPTS, found, strict=True):
        reference = reference_logprobs(model, prompt, turn.token_ids, weights=weights)
        differences += [abs(a - b) for a, b in zip(turn.logprobs, reference.tolist(), strict=True)]
    return fmean(differences)


@pytest.mark.asyncio(loop_scope="module")
async def test_logprobs_follow_every_update(case):
    engine, model, _, tolerance = case
    original = perturbed_weights(model, seed=0, scale=0.0)
    assert mean_error(await turns(engine), model) < tolerance
    for version in (1, 2, 3):
        weights = perturbed_weights(model, seed=version)
        report = await update(engine, weights, version)
        assert (report.version, engine.version) == (version, version)
        assert report.checksums == read_header(pack_weights(weights)).checksums
        assert report.seconds.keys() == {"pause", "start", "load", "finish", "call", "resume"}
        found = await turns(engine)
        assert {turn.spans[0][0] for turn in found} == {version}
        assert mean_error(found, model, weights) < tolerance
        # The tolerance tells the weights apart: the same turns are far off under the ones before.
        assert mean_error(found, model, original) > 4 * tolerance
    await update(engine, original, 4)
    assert mean_error(await turns(engine), model) < tolerance


@pytest.mark.asyncio(loop_scope="module")
async def test_after_a_failed_update_nothing_answers(case):
    engine, model, broken, _ = case
    if broken is whole:
        # An update that another left open: this one cannot begin.
        await engine._llm.pause_generation(mode="keep", clear_cache=False)
        await engine._llm.start_weight_update()
    calls = [engine.generate(PROMPTS[0], Sampling(max_tokens=900), request_id="in-flight") for _ in range(8)]
    in_flight = asyncio.gather(*calls, return_exceptions=True)
    while engine.requests_in_flight < 8:
        await asyncio.sleep(0)
    with pytest.raises(EngineDead, match="update to version 9 failed"):
        await update(engine, broken(perturbed_weights(model, seed=5)), 9)
    # Whichever had not ended by then (a random model may end a turn early).
    assert any(isinstance(one, EngineDead) and "version 9 failed" in str(one) for one in await in_flight)
    for answer in (engine.generate(PROMPTS[0], Sampling(), request_id="later"), engine.check()):
        with pytest.raises(EngineDead, match="update to version 9 failed"):
            await answer
    with pytest.raises(EngineDead):
        await update(engine, perturbed_weights(model, seed=5), 10)
    assert not engine._folder.path.exists()
