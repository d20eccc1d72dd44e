"""Checkpoint folders that are whole or absent.

``global_step_N/`` is written under another name, gets its ``manifest.json`` last (size and SHA-256 of every file) and
is then renamed. A folder without a manifest that fits is not a checkpoint. The policy lies in ``policy/`` in Hugging
Face format: ``transformers`` and vLLM load it as it is.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "manifest.json"
POLICY = "policy"
OPTIMIZER = "optimizer"
STEPS = "steps.json"  # metrics of the steps since the checkpoint before
STAGING_SUFFIX = ".partial"
_NAME = re.compile(r"global_step_(\d+)")
# What belongs to the weights of the model that is copied from; everything else of it (tokenizer, template) is kept.
_WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message is one line that says which and why."""


def is_checkpoint_name(name: str) -> bool:
    """Whether a folder of this name is meant to be a checkpoint."""
    return _NAME.fullmatch(name) is not None


def step_of(path: Path) -> int:
    """N of ``global_step_N``."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint folder (global_step_N)")
    return int(match[1])


def staging(root: Path, step: int) -> Path:
    """Where the files of a checkpoint are collected before ``commit``."""
    return root / f"global_step_{step}{STAGING_SUFFIX}"


def begin(root: Path, step: int, needed_bytes: int) -> Path:
    """Make an empty staging folder; remove what an interrupted writer left. One run writes to ``root``, at one time.

    Raises:
        CheckpointError: ``root`` cannot be written, or the disk has less than ``needed_bytes`` free.
    """
    folder = staging(root, step)
    with readable_errors(folder):
        root.mkdir(parents=True, exist_ok=True)
        for leftover in root.glob(f"global_step_*{STAGING_SUFFIX}"):
            shutil.rmtree(leftover)
        free = shutil.disk_usage(root).free
        if free < needed_bytes:
            raise CheckpointError(
                f"checkpoint {root}/global_step_{step} needs {_gib(needed_bytes)} but the disk has {_gib(free)} free; "
                "make room, or lower the number of checkpoints that are kept"
            )
        folder.mkdir()
    return folder


def export_policy(folder: Path, lm: PreTrainedModel, source: Path) -> None:
    """Write the policy in Hugging Face format to ``folder``.

    ``source`` is the folder the model came from: its tokenizer, chat template and other small files are copied
    unchanged.
    """
    with readable_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for file in sorted(source.iterdir()):
            if file.is_file() and not file.name.endswith(_WEIGHT_FILES) and file.name != MANIFEST:
                shutil.copyfile(file, folder / file.name)
        lm.save_pretrained(folder)


def commit(root: Path, step: int, facts: Mapping[str, Any]) -> Path:
    """Turn the staging folder into ``global_step_N``: digests, manifest, rename. ``facts`` go into the manifest.

    An existing ``global_step_N`` (a step done again after a restart) is replaced.
    """
    folder, final = staging(root, step), root / f"global_step_{step}"
    with readable_errors(final):
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        with ThreadPoolExecutor(max_workers=4) as pool:
            entries = list(pool.map(_describe_file, files))
        manifest = {
            "format": _FORMAT,
            "step": step,
            "written_at": time.time(),
            **facts,
            "files": {str(file.relative_to(folder)): entry for file, entry in zip(files, entries, strict=True)},
        }
        with open(folder / MANIFEST, "w", encoding="utf-8") as stream:
            json.dump(manifest, stream, indent=1)
            stream.flush()
            os.fsync(stream.fileno())
        _sync_folder(folder)
        if final.exists():
            _remove(final)
        folder.rename(final)
        _sync_folder(root)
    return final


def read_manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a checkpoint whose files are all there in full size, else ``None``. Digests: see ``verify``."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
        whole = all((path / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return manifest if whole and manifest.get("format") == _FORMAT else None


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, one line per problem; reads every byte. Empty: nothing."""
    manifest = read_manifest(path)
    if manifest is None:
        return [f"{path}: no manifest, or files are missing or cut short"]
    return [
        f"{path / name}: content differs from the manifest"
        for name, entry in manifest["files"].items()
        if _sha256(path / name) != entry["sha256"]
    ]


def complete(root: Path) -> list[Path]:
    """The complete checkpoints of ``root``, oldest step first."""
    if not root.is_dir():
        return []
    folders = [path for path in root.iterdir() if _NAME.fullmatch(path.name)]
    return sorted((path for path in folders if read_manifest(path) is not None), key=step_of)


def latest_complete(root: Path) -> Path | None:
    """The complete checkpoint with the highest step."""
    found = complete(root)
    return found[-1] if found else None


def prune(root: Path, keep: int) -> list[Path]:
    """Delete complete checkpoints until the ``keep`` newest are left, and broken ones older than the newest.

    The last complete checkpoint always stays. Returns what was deleted.
    """
    if keep < 1:
        raise ValueError(f"at least one checkpoint must be kept, not {keep}")
    kept = complete(root)[-keep:]
    if not kept:
        return []
    folders = sorted((path for path in root.iterdir() if _NAME.fullmatch(path.name)), key=step_of)
    doomed = [path for path in folders if path not in kept and step_of(path) < step_of(kept[-1])]
    for path in doomed:
        _remove(path)
    return doomed


def _remove(path: Path) -> None:
    # Without its manifest a folder is no checkpoint: an interrupted removal leaves nothing that looks like one.
    (path / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(path)


def _describe_file(path: Path) -> dict[str, Any]:
    with open(path, "rb") as stream:
        os.fsync(stream.fileno())
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def readable_errors(path: Path) -> Iterator[None]:
    """Turn what the writing libraries raise into one line that names ``path``."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, SafetensorError, RuntimeError) as error:  # torch.save raises RuntimeError when a write fails
        full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(error)
        reason = "no space left on the disk" if full else " ".join(str(error).split())
        raise CheckpointError(f"{path} could not be written: {reason}") from error


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
