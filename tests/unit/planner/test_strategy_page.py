"""The tables of docs/strategy.md are what the planner says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sparkdl.planner import make_cluster, plan

PAGE = Path(__file__).parents[3] / "docs" / "strategy.md"
SIZES = {"1t": "width=25600,layers=128,heads=160,key_heads=8,hidden=83200,vocabulary=128256"}


def rows() -> Iterator[tuple[list[str], list[str]]]:
    """Yield the columns that name a network, and the cells, of each row of a table of layouts."""
    columns: list[str] = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[:3] == ["model", "hosts", "batch"]:
            columns = cells[3:]
        elif not line.startswith("|"):
            columns = []
        elif columns and not line.startswith("|-"):
            yield columns, cells


def cell_of(model: str, hosts: int, batch: int, column: str) -> str:
    """Return the fastest layout and its MFU."""
    *device, rate = column.removesuffix(" Gbit/s").split(", ")
    cluster = make_cluster(device[0] if device else "h100", hosts=hosts, between=float(rate.replace(",", "")))
    best = plan(
        SIZES.get(model, model),
        cluster,
        batch=batch,
        precision="bfloat16-shards",
        sequence=8192 if model in SIZES else None,
    ).best
    return f"{best.label}; {best.utilization:.0%}"


def is_small(cells: list[str]) -> bool:
    return cells[1] == "1 x 8"


@pytest.mark.parametrize(
    ("columns", "cells"),
    [
        pytest.param(
            columns, cells, id="-".join(cells[:2]), marks=() if is_small(cells) else (pytest.mark.slow,)
        )
        for columns, cells in rows()
    ],
)
def test_the_page_has_what_the_planner_says(columns: list[str], cells: list[str]) -> None:
    model, hosts, batch = cells[0], int(cells[1].split(" ")[0]), int(cells[2])
    shown = {column: cell for column, cell in zip(columns, cells[3:], strict=True) if cell}
    assert shown
    assert shown == {column: cell_of(model, hosts, batch, column) for column in shown}
