"""The commits of the states of a run. Only the last one is kept, in a folder that the run holds alone.

The driver holds a lease of the folder. Its name changes with each start of the ranks, and ranks check it before they
write: a rank that was wrongly considered lost must not write to the folder from which the others continue.
:mod:`sparkdl.checkpoint.folder` has the rule for the commit of a single checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sparkdl.checkpoint.folder import CheckpointFolder
from sparkdl.data.files.lease import check_lease

USER, SETTING = "run", "checkpoint_dir"
"""What uses the folder, and the name of its setting, in messages."""


@dataclass(frozen=True)
class CommitPlace:
    """The commits of a run, for the ranks of one start of it.

    Attributes:
        url: path or URL of the folder.
        lease: name of the driver's lease on the folder.
        provided: the place in which this process stores commits, which a launcher of ranks sets; None if they stay in
            memory.
    """

    provided: ClassVar[CommitPlace | None] = None

    url: str
    lease: str

    def folder(self, state: int) -> CheckpointFolder:
        """Return the folder of the commits of a state, to which only the ranks of this start can write.

        Args:
            state: number of the state: the number of states that this process had created before it.
        """
        return CheckpointFolder(self.url, f"state-{state}", check=self.check)

    def check(self) -> None:
        """Check that these ranks may still use the folder.

        Raises:
            StoreError: if the folder cannot be read, or is not the one that the driver sees.
            CheckpointsInUseError: if another run, or the ranks of a restart, have taken the folder.
        """
        check_lease(self.url, self.lease, user=USER, setting=SETTING)

    def position(self) -> str:
        """Describe the point from which the ranks continue. Runs on the *driver*."""
        folder = self.folder(0)
        commit = folder.newest(is_look=True)
        if commit is None:
            return "the beginning, as nothing was committed"
        return f"commit {folder.number(commit.name)} of its state"
