"""The number of executors requested from Spark, and the largest number that existed at once."""

from __future__ import annotations

import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch.slots import Executors, check_memory, executors_by_settings, most_at_once


@pytest.mark.parametrize(
    ("master", "settings", "asked"),
    [
        ("local-cluster[2,3,1024]", {}, Executors(num_expected=2, slots_of_each=3, most_slots=6)),
        (
            "local-cluster[2, 3, 1024]",
            {"spark.task.cpus": "2"},
            Executors(num_expected=2, slots_of_each=1, most_slots=2),
        ),
        ("spark://host:7077", {}, Executors()),
        ("spark://host:7077", {"spark.executor.instances": "4"}, Executors()),
        ("spark://host:7077", {"spark.cores.max": "8", "spark.task.cpus": "2"}, Executors(most_slots=4)),
        ("yarn", {}, Executors()),
        (
            "yarn",
            {"spark.executor.instances": "3"},
            Executors(num_expected=3, slots_of_each=1, most_slots=3),
        ),
        (
            "k8s://https://host",
            {"spark.executor.instances": "3", "spark.executor.cores": "4", "spark.task.cpus": "2"},
            Executors(num_expected=3, slots_of_each=2, most_slots=6),
        ),
    ],
)
def test_executors_that_spark_is_asked_for_are_read_from_its_settings(
    master: str, settings: dict[str, str], asked: Executors
) -> None:
    assert executors_by_settings(master, lambda name: settings.get(name, "")) == asked


def test_replacement_of_a_lost_executor_does_not_raise_the_count_of_executors() -> None:
    assert most_at_once([]) == 0
    assert most_at_once([(0, None, 1), (1, 10, 1), (10, 20, 1), (25, None, 1)]) == 2
    assert most_at_once([(0, 5, 1), (1, 5, 1), (2, None, 1)]) == 3


@pytest.mark.parametrize(
    ("memory", "cores", "limit"),
    [
        ("2g", "1", "2.0 GiB"),
        ("2048", "", "2.0 GiB"),
        ("1GB", "", "1.0 GiB"),
        ("8g", "4", "2.0 GiB"),
        ("1048576k", "", "1.0 GiB"),
        ("3g", "", None),
        ("16g", "4", None),
        ("", "4", None),
    ],
)
def test_memory_that_is_too_little_for_torch_is_named_with_its_setting(memory, cores, limit):
    settings = {"spark.executor.pyspark.memory": memory, "spark.executor.cores": cores}
    if limit is None:
        check_memory(settings.__getitem__)
        return
    with pytest.raises(LaunchError, match=rf"^spark\.executor\.pyspark\.memory={memory}.* to {limit}"):
        check_memory(settings.__getitem__)
