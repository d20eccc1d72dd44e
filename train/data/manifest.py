"""``manifest.json``: what a prepared data set was made of, and by which rules, so that it can be made again."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from actors.config import Section
from train.data.split import EnvironmentRule

MANIFEST = "manifest.json"
TRAIN, VALIDATION = "train.parquet", "validation.parquet"


class ManifestError(ValueError):
    """A manifest that cannot be used, in one line."""


class InputFile(Section):
    """The task file."""

    location: str
    tasks: int = Field(ge=0)
    bytes: int = Field(ge=0)
    sha256: str


class OutputFile(Section):
    """One side."""

    tasks: int = Field(ge=1)
    bytes: int = Field(ge=1)
    sha256: str


class Counts(Section):
    """Tasks of an environment: on each side, in all, and why the others are on neither."""

    train: int
    eval: int
    total: int
    dropped: dict[str, int]


class Choices(Section):
    """What was chosen besides the preset."""

    ratio: float
    minimum: int
    cap: int | None
    held_out: tuple[str, ...]
    modality: str | None
    env_keys: tuple[str, ...]
    difficulties: tuple[int, ...]
    max_tasks: int | None


class Manifest(Section):
    """``rules_from``: the manifest whose rules the ``stable`` preset went on from."""

    format: Literal[1] = 1
    preset: str
    input: InputFile
    choices: Choices
    rules_from: str | None
    counts: dict[str, Counts]
    rules: dict[str, EnvironmentRule]
    files: dict[str, OutputFile]
    versions: dict[str, str]


def prepared_file(folder: Path, name: str) -> Path:
    """``TRAIN`` or ``VALIDATION`` of a prepared folder. A folder without a manifest is taken as it is.

    Raises:
        ManifestError: there is no such file, or it is not the one that the manifest describes.
    """
    path = folder / name
    if not path.is_file():
        raise ManifestError(f"{folder} holds no {name}: name a task file, or a folder that fleet-rl prepare wrote")
    if not (folder / MANIFEST).exists():
        return path
    described = read_manifest(folder).files.get(name)
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if described is None or described.sha256 != digest:
        raise ManifestError(f"{path} is not the file that {MANIFEST} beside it describes: run fleet-rl prepare again")
    return path


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a prepared folder.

    Raises:
        ManifestError: there is none, or it is not one.
    """
    path = folder / MANIFEST
    try:
        return Manifest.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise ManifestError(f"{path} does not exist: {folder} is no folder that fleet-rl prepare wrote") from None
    except OSError as error:
        raise ManifestError(f"{path} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the file"
        problem = " ".join(first["msg"].split()).lower()
        raise ManifestError(f"{path} is not a manifest of fleet-rl prepare: {where}: {problem}") from None
