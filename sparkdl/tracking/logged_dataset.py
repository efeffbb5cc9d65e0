"""What a fit was trained on, as MLflow has it for the inputs of runs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LoggedDataset:
    """The fields of MLflow's dataset.

    Attributes:
        name: for people.
        digest: hash of the data, up to 36 characters.
        source_type: what the source is, ``"spark"`` or ``"local"`` say.
        source: where it lies, as JSON.
        schema: its columns, as JSON.
        profile: numbers about it, as JSON.
    """

    name: str
    digest: str
    source_type: str
    source: str
    schema: str
    profile: str
