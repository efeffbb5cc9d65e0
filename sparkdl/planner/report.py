"""Tables and pictures of plans. Tables need rich, pictures matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparkdl.bench.report import format_time
from sparkdl.foreign_errors import needing
from sparkdl.planner.cluster import GIB, USABLE
from sparkdl.planner.layouts import advice

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.table import Table

    from sparkdl.planner.layouts import Layout, Plan

TIMES = {
    "products": "#08519c",
    "attention": "#3182bd",
    "passes": "#6baed6",
    "recomputation": "#9ecae1",
    "optimizer": "#c6dbef",
    "contention": "#41b6c4",
    "tensor": "#a63603",
    "context": "#e6550d",
    "shard": "#fd8d3c",
    "data": "#fdae6b",
    "pipeline": "#fdd0a2",
    "bubble": "#969696",
}
"""Kinds of time of :class:`~sparkdl.planner.cost.StepTime`, which add up to the step, and their colors: arithmetic is
blue, communication orange, waiting gray."""

MEMORIES = {
    "weights": "#006d2c",
    "gradients": "#2ca25f",
    "optimizer": "#99d8c9",
    "activations": "#756bb1",
    "buffers": "#bcbddc",
}
"""Kinds of memory of :class:`~sparkdl.planner.memory.RankMemory`, which add up to its total, and their colors."""


def print_plan(found: Plan, *, most: int, details: bool = False) -> None:
    """Print the first layouts of a plan as a table, and the best one to paste.

    Args:
        found: the plan.
        most: number of layouts to print.
        details: whether to print the seconds and the GiB by kind in place of the reasons.
    """
    shape, cluster = found.shape, found.cluster
    columns = ("layout", "rows x passes", "batch up to", "GiB", "step", "MFU")
    table = None if details else _table("", columns)  # before the first line, as rich may be missing
    print(
        f"{shape.name}, {shape.parameters / 1e9:.3g} billion parameters, on {cluster}\n"
        f"batches of {found.batch} rows of {shape.sequence} positions, in {found.precision}"
    )
    if table is None:
        _print_details(found, most)
    else:
        for layout in found.layouts[:most]:
            table.add_row(
                f"{layout.label}\n{layout.reason}",
                f"{layout.rows} x {layout.passes}",
                f"{layout.largest_batch}",
                f"{layout.memory.total / GIB:.3g}",
                format_time(layout.time.total),
                f"{layout.utilization:.0%}",
            )
        _print(table)
    more = len(found.layouts) - most
    others = f"{more} more fit, and " if more > 0 else ""
    usable = f"{USABLE:.0%} of {cluster.device.memory_bytes / GIB:.3g} GiB"
    print(f"{others}{found.num_unfit} layouts do not fit into {usable}.")
    print("In order of time, with one percent more for each kind of parallelism besides replicas.")
    print(f"\nbest: {found.best_as_code}")
    for text in advice(cluster):
        print(text)


def _print_details(found: Plan, most: int) -> None:
    for layout in found.layouts[:most]:
        print(f"\n{layout.label}: {layout.as_code()}")
        time, memory = layout.time, layout.memory
        hidden = sum(time.hidden.values())
        for what, kinds, total, show in (
            ("step", {kind: getattr(time, kind) for kind in TIMES}, time.total, format_time),
            ("communication hidden behind arithmetic", time.hidden, hidden, format_time),
            ("memory", vars(memory), memory.total, lambda value: f"{value / GIB:.3g} GiB"),
        ):
            parts = ", ".join(
                f"{kind} {show(value)}" for kind, value in kinds.items() if value > 0.0005 * total
            )
            print(f"  {what} {show(total)}{parts and f': {parts}'}")
        print(f"  {layout.reason}")


def print_scaling(plans: Sequence[Plan], *, is_weak: bool) -> None:
    """Print the best layout on each number of hosts."""
    table = _table(
        f"{plans[0].shape.name}: {'weak' if is_weak else 'strong'} scaling on {plans[0].cluster.device.name}",
        ("ranks", "batch", "layout", "step", "rows/s", "speed-up", "efficiency", "MFU", "exposed", "bubble"),
    )
    for row in scaling_rows(plans):
        table.add_row(
            str(row["ranks"]),
            str(row["batch"]),
            row["layout"],
            format_time(row["step_s"]),
            f"{row['rows_per_s']:.4g}",
            f"{row['speed_up']:.4g}",
            f"{row['efficiency']:.2f}",
            f"{row['utilization']:.0%}",
            f"{row['exposed']:.0%}",
            f"{row['bubble']:.0%}",
        )
    _print(table)


def scaling_rows(plans: Sequence[Plan]) -> list[dict[str, Any]]:
    """Return a row for each plan; speed-up and efficiency refer to the first one."""
    first = plans[0].batch / plans[0].best.time.total
    rows = []
    for plan in plans:
        best = plan.best
        speed_up = plan.batch / best.time.total / first
        rows.append(
            {
                "hosts": plan.cluster.hosts,
                "ranks": plan.cluster.world_size,
                "batch": plan.batch,
                "layout": best.label,
                "code": best.as_code(),
                "step_s": best.time.total,
                "rows_per_s": plan.batch / best.time.total,
                "speed_up": speed_up,
                "efficiency": speed_up * plans[0].cluster.world_size / plan.cluster.world_size,
                "utilization": best.utilization,
                "exposed": best.time.exposed / best.time.total,
                "bubble": best.time.bubble / best.time.total,
            }
        )
    return rows


def print_published(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print published runs, and what the planner says about each."""
    columns = ("source", "run", "measured", "planner", "unit", "error")
    table = _table("Published runs, with figures of one device", columns)
    for row in rows:
        table.add_row(
            row["source"],
            row["run"],
            f"{row['measured']:.4g}",
            f"{row['predicted']:.4g}",
            row["unit"],
            f"{row['error']:+.0%}",
        )
    _print(table)


def print_orders(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print published layouts of one job, the fastest first, and how fast the planner says that each is."""
    table = _table("Speed of layouts, as a share of the fastest", ("job", "layout", "measured", "planner"))
    job = ""
    for row in rows:
        measured = "" if row["measured"] is None else f"{row['measured']:.2f}"
        is_new, job = row["job"] != job, row["job"]
        table.add_row(job if is_new else "", row["run"], measured, f"{row['predicted']:.2f}")
    _print(table)


def print_comparison(rows: Sequence[Mapping[str, Any]], *, details: bool = False) -> None:
    """Print measured steps, and what the planner says about their time and memory.

    Args:
        rows: rows of :func:`~sparkdl.planner.comparison.compare_steps`.
        details: whether to print also what the measured time of a rank consists of.
    """
    columns = (
        "model",
        "layout",
        "hosts x ranks",
        "Mbit/s",
        "measured",
        "planner",
        "ratio",
        "MiB",
        "planner",
        "ratio",
    )
    table = _table("Steps on this machine", columns)
    for row in rows:
        table.add_row(
            row["model"],
            row["layout"],
            f"{row['hosts']} x {row['ranks'] // row['hosts']}",
            "" if row["megabits"] is None else f"{row['megabits']:g}",
            format_time(row["measured_s"]),
            format_time(row["predicted_s"]),
            f"{row['ratio']:.2f}",
            f"{row['measured_bytes'] / 2**20:.0f}",
            f"{sum(row['memory_bytes'].values()) / 2**20:.0f}",
            f"{row['memory_ratio']:.2f}",
        )
    _print(table)
    if details:
        parts = ("processor", "kernel", "waits")
        table = _table("Where a rank's time goes", ("model", "layout", "ranks", "measured", *parts))
        for row in rows:
            times = (format_time(row[f"{part}_s"]) for part in ("measured", *parts))
            table.add_row(row["model"], row["layout"], str(row["ranks"]), *times)
        _print(table)
    for name, key, limit in (("time", "ratio", 0.15), ("memory", "memory_ratio", 0.1)):
        near = sum(abs(row[key] - 1) <= limit for row in rows)
        print(f"{name}: {near} of {len(rows)} within {limit:.0%}")


def _table(title: str, columns: Sequence[str]) -> Table:
    with needing("sparkdl plan, which prints tables,", "plan", "rich"):
        from rich import box
        from rich.table import Table
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        is_text = column in ("model", "layout", "job", "source", "run")
        table.add_column(column, justify="left" if is_text else "right", overflow="fold")
    return table


def _print(table: Table) -> None:
    from rich.console import Console

    console = Console()
    Console(width=None if console.is_terminal else 100).print(table)


def plot_plan(found: Plan, path: Path, *, most: int) -> None:
    """Draw the time of a step, and the memory of the fullest rank, of the fastest layouts, by kind."""
    from matplotlib.figure import Figure

    layouts = found.layouts[:most]
    figure = Figure(figsize=(16, 2.6 + 0.4 * len(layouts)), layout="constrained")
    times, memories = figure.subplots(1, 2, sharey=True)
    usable = USABLE * found.cluster.device.memory_bytes / GIB
    memories.axvline(usable, color="black", linestyle="--", label=f"limit ({usable:.3g} GiB)")
    _bars(times, layouts, {kind: [getattr(layout.time, kind) for layout in layouts] for kind in TIMES}, TIMES)
    _bars(
        memories,
        layouts,
        {kind: [getattr(layout.memory, kind) / GIB for layout in layouts] for kind in MEMORIES},
        MEMORIES,
    )
    times.set_title("time of a step, in seconds")
    memories.set_title("memory of the fullest rank, in GiB")
    figure.suptitle(f"{found.shape.name} on {found.cluster}, batches of {found.batch} rows")
    figure.savefig(path)


def _bars(
    axes: Axes, layouts: Sequence[Layout], kinds: Mapping[str, Sequence[float]], colors: Mapping[str, str]
) -> None:
    """Draw one bar for each layout, of the kinds that are not zero everywhere."""
    labels, left = [layout.label for layout in layouts], [0.0] * len(layouts)
    least = 0.002 * max(map(sum, zip(*kinds.values(), strict=True)))
    shown = {kind: values for kind, values in kinds.items() if max(values) > least}
    for kind, values in shown.items():
        axes.barh(labels, values, left=left, label=kind, color=colors[kind])
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.invert_yaxis() if not axes.yaxis_inverted() else None
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=3, fontsize="small")


def plot_comparison(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the planner's time and memory of each step over the measured ones, by rate of the link."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator, NullFormatter

    figure = Figure(figsize=(13, 6), layout="constrained")
    panels = (
        (
            "time of a step, in seconds",
            0.15,
            {id(row): (row["measured_s"], row["predicted_s"]) for row in rows},
        ),
        (
            "memory of the fullest rank, in MiB",
            0.1,
            {
                id(row): (row["measured_bytes"] / 2**20, sum(row["memory_bytes"].values()) / 2**20)
                for row in rows
            },
        ),
    )
    rates = dict.fromkeys(row["megabits"] for row in rows)
    for axes, (title, limit, point_of) in zip(figure.subplots(1, 2), panels, strict=True):
        for rate, marker in zip(rates, "osD^v<>", strict=False):
            points = [point_of[id(row)] for row in rows if row["megabits"] == rate]
            name = "one host" if rate is None else f"hosts with links of {rate:g} Mbit/s"
            axes.scatter(*zip(*points, strict=True), marker=marker, alpha=0.8, label=name)
        measured = [point_of[id(row)][0] for row in rows]
        ends = [0.8 * min(measured), 1.25 * max(measured)]
        axes.plot(ends, ends, color="gray", label="as measured")
        below, above = ([factor * end for end in ends] for factor in (1 - limit, 1 + limit))
        axes.fill_between(ends, below, above, color="gray", alpha=0.2, label=f"within {limit:.0%}")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(NullFormatter())
        axes.set_xlabel("measured")
        axes.set_ylabel("planner")
        axes.set_title(title)
        axes.legend(fontsize="small")
    figure.suptitle("Steps of decoders on this machine, and what the planner says about them")
    figure.savefig(path)


def plot_scaling(plans: Sequence[Plan], path: Path, *, is_weak: bool) -> None:
    """Draw rows per second, and the shares of a step, over the number of ranks, with the best layout for each."""
    from matplotlib.figure import Figure

    rows = scaling_rows(plans)
    ranks = [row["ranks"] for row in rows]
    figure = Figure(figsize=(13, 6), layout="constrained")
    speeds, shares = figure.subplots(1, 2)
    speeds.plot(ranks, [row["rows_per_s"] for row in rows], marker="o", label="plan")
    linear = [rows[0]["rows_per_s"] * count / ranks[0] for count in ranks]
    speeds.plot(ranks, linear, "--", color="gray", label="linear")
    speeds.set_yscale("log", base=2)
    speeds.yaxis.set_major_formatter("{x:g}")
    speeds.set_title("rows per second")
    speeds.legend()
    parts = {
        "arithmetic": [1 - row["exposed"] - row["bubble"] for row in rows],
        "exposed communication": [row["exposed"] for row in rows],
        "bubble": [row["bubble"] for row in rows],
    }
    colors = ("#9ecae1", "#fdae6b", "#bdbdbd")
    shares.stackplot(ranks, list(parts.values()), labels=list(parts), colors=colors)
    for name, label, color in (
        ("efficiency", f"efficiency against {ranks[0]} ranks", "black"),
        ("utilization", "model FLOP utilization (MFU)", "#a63603"),
    ):
        shares.plot(ranks, [row[name] for row in rows], marker="o", label=label, color=color)
    shares.set_title("shares of a step")
    # Below the labels, however many lines they have.
    figure.legend(*shares.get_legend_handles_labels(), loc="outside lower right", ncols=3, fontsize="small")
    layouts = ["\n".join([f"{row['ranks']:,}", *row["layout"].split(", ")]) for row in rows]
    for axes, labels in ((speeds, [f"{count:,}" for count in ranks]), (shares, layouts)):
        axes.set_xscale("log", base=2)
        axes.set_xticks(ranks, labels, fontsize="small")
        axes.set_xlabel("ranks" if axes is speeds else "ranks, and the best layout")
        axes.grid(alpha=0.3)
    first, last = plans[0], plans[-1]
    batch = f"weak scaling, batches of {first.batch} to {last.batch} rows" if is_weak else "strong scaling"
    batch += "" if is_weak else f", batches of {first.batch} rows"
    figure.suptitle(
        f"{first.shape.name} on {first.cluster.device.name}, {first.cluster.between.name} for each host: {batch}"
    )
    figure.savefig(path)
