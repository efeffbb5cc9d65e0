from __future__ import annotations

import re

from sparkdl.doctor.finding import BAD, GOOD, NOTE, Finding, as_table

FINDINGS = [
    Finding(check="Java", where="this machine", status=GOOD, found="17"),
    Finding(check="MPI", where="node-1", status=NOTE, found="none", advice="pip install mpi4py mpich"),
    Finding(check="Java", where="node-1", status=GOOD, found="17"),
    Finding(check="GPUs", where="node-2", status=BAD, found="8 of them, " * 6, advice="Install a torch " * 4),
]


def test_table_of_findings() -> None:
    assert as_table(FINDINGS, width=80, has_colours=False) == (
        "ok    Java  this machine, node-1  17\n"
        "note  MPI   node-1                none\n"
        "                                  -> pip install mpi4py mpich\n"
        "FAIL  GPUs  node-2                8 of them, 8 of them, 8 of them, 8 of them, 8\n"
        "                                  of them, 8 of them,\n"
        "                                  -> Install a torch Install a torch Install a\n"
        "                                     torch Install a torch\n"
        "\n"
        "1 of 4 checks failed, 1 worth a look."
    )


def test_no_line_is_wider_than_the_terminal() -> None:
    for width in (80, 100, 132):
        assert max(map(len, as_table(FINDINGS, width=width, has_colours=False).splitlines())) <= width


def test_colours_change_nothing_else() -> None:
    coloured = as_table(FINDINGS, width=80, has_colours=True)
    assert "\033[31mFAIL\033[0m" in coloured
    assert re.sub(r"\033\[\d+m", "", coloured) == as_table(FINDINGS, width=80, has_colours=False)


def test_many_machines_that_are_alike_share_a_line() -> None:
    alike = [Finding(check="Java", where=f"node-{n}", status=GOOD, found="17") for n in range(40)]
    text = as_table(alike, width=80, has_colours=False)
    assert text == "ok    Java  node-0 and 39 more  17\n\n40 checks, none failed."
