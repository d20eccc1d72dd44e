"""The training batches that a run has kept, one after the other."""

from __future__ import annotations

from pathlib import Path

from actors.lineage import Lineage
from actors.trajectory import Group, Trajectory
from train import s3
from train.trajectory_reader import Range, Selection, TrajectoryFileError, local_path, read
from train.trajectory_table import trajectory


class KeptBatches:
    """The training batches at a location, one for each step that was kept, in the order of the steps.

    Args:
        location: see :func:`train.trajectory_reader.read`.
        overlong_filtering: groups of which fewer than two members would count are left out of their batch.

    Raises:
        TrajectoryFileError: there are no training batches, or they cannot be read.
    """

    def __init__(self, location: str, overlong_filtering: bool) -> None:
        # An actor has a working directory of its own.
        self.location = location if s3.is_s3(location) else str(local_path(location).absolute())
        self._overlong_filtering = overlong_filtering
        self._steps = sorted({row["step"] for row in read(self.location, Selection("train"), columns=["step"])})
        if not self._steps:
            raise TrajectoryFileError(f"{location}: there are no training batches, only evaluations")

    def __len__(self) -> int:
        return len(self._steps)

    def lies_in(self, folder: Path) -> bool:
        """Whether they are files of this folder."""
        return not s3.is_s3(self.location) and Path(self.location).resolve().is_relative_to(folder.resolve())

    def read(self, number: int) -> tuple[list[Group], Lineage]:
        """Batch ``number``, from 1, and the versions that lead to the weights it is trained from.

        They end where the run was that kept it, but not before ``number - 1``, the updates that come before it here:
        what was rolled out without any training lags further behind with every batch.

        Raises:
            TrajectoryFileError: it cannot be read, or nothing of it can be trained on.
        """
        step = self._steps[number - 1]
        members: dict[int, list[Trajectory]] = {}
        version = 0
        for row in read(self.location, Selection("train", step=Range(step, step))):
            try:
                members.setdefault(row["group_id"], []).append(trajectory(row))
            except (KeyError, ValueError) as error:
                raise TrajectoryFileError(
                    f"{self.location}: {row['trajectory_id']} of step {step} is not as a run keeps it "
                    f"({type(error).__name__}: {error}), so it cannot be trained on"
                ) from None
            version = row["policy_version"] or 0
        groups = [Group(i, found[0].task_key, found[0].env_key, found) for i, found in members.items()]
        groups = [group for group in groups if len(group.members(self._overlong_filtering)) >= 2]
        if not groups:
            raise TrajectoryFileError(f"{self.location}: step {step} has no group with two graded trajectories")
        return groups, Lineage([(0, max(version, number - 1), 0)])
