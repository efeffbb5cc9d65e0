"""A plan in words, one thing a line. Runs on the *driver*."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparkdl.jobs.job import Job
    from sparkdl.jobs.plan import Plan

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def plan_text(job: Job, plan: Plan, columns: list[str], state: str) -> str:
    """Return what ``--dry-run`` prints.

    Args:
        job: the job.
        plan: what it will do.
        columns: that the fit reads.
        state: of the output, in words.
    """
    lines = [
        ("job", f"{job.file.name}: {job.estimator}"),
        ("rows", f"{plan.rows.num_rows:,} of {job.data}; {_training(plan)}"),
        ("columns", f"{', '.join(columns)}: {in_bytes(plan.rows_bytes)} when decoded"),
        ("ranks", f"{len(plan.shards)}, {plan.batch_size} rows each in a step"),
        ("shards", f"{_span(plan.shards)} rows for each rank and epoch"),
        ("steps", _steps(plan)),
        ("model", _model(plan)),
        ("memory", _memory(plan)),
        *(("host", _host(plan, index)) for index in range(len(plan.hosts))),
        ("output", state),
    ]
    return "\n".join(f"{name:<8} {text}" for name, text in lines)


def in_bytes(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit in _UNITS[:-1]:
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} {_UNITS[-1]}"


def _training(plan: Plan) -> str:
    validation = plan.rows.num_rows - plan.num_training
    if not validation:
        return "all are trained on"
    about = "" if plan.is_exact else "about "
    return f"{about}{plan.num_training:,} to train on, {about}{validation:,} to validate on"


def _span(shards: tuple[int, ...]) -> str:
    least, most = min(shards), max(shards)
    return f"{least:,}" if least == most else f"{least:,} or {most:,}"


def _steps(plan: Plan) -> str:
    about = "" if plan.is_exact else "about "
    updates = "" if plan.updates == plan.steps else f", {plan.updates:,} updates of the weights"
    epochs = f"{plan.epochs:,} epoch{'s' if plan.epochs > 1 else ''}"
    return f"{about}{plan.steps:,} in an epoch{updates}; {about}{plan.steps * plan.epochs:,} in {epochs}"


def _model(plan: Plan) -> str:
    size = plan.model
    if size is None:
        return "is made of the rows when the fit begins, so its size is not known yet"
    optimizer = "of unknown size" if size.optimizer is None else in_bytes(size.optimizer)
    return (
        f"{size.num_parameters:,} parameters: weights {in_bytes(size.weights)}, gradients {in_bytes(size.gradients)}, "
        f"optimizer {optimizer}"
    )


def _memory(plan: Plan) -> str:
    model = (
        "the model" if plan.model is None else f"model, gradients and optimizer {in_bytes(plan.model.total)}"
    )
    return (
        f"of each rank: {model}, rows read ahead up to {in_bytes(plan.read_ahead_bytes)}; beside that Python with "
        "torch, and what layers compute for a step"
    )


def _host(plan: Plan, index: int) -> str:
    host = plan.hosts[index]
    num = len(host.ranks)
    free = "" if host.available_bytes is None else f", {in_bytes(host.available_bytes)} of memory free"
    short = ""
    if host.available_bytes is not None and num * plan.rank_bytes > host.available_bytes:
        short = f": too little for {in_bytes(num * plan.rank_bytes)}"
    numbers = ", ".join(map(str, host.ranks))
    return (
        f"{host.name}: {num} rank{'s' if num > 1 else ''} ({numbers}) on {host.num_cores} cores{free}{short}"
    )
