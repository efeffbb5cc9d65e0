from __future__ import annotations

import pytest

from sparkdl.errors import LaunchError
from sparkdl.launch.rank.environment import gpus_of_rank, rank_environment


@pytest.mark.parametrize(
    ("addresses", "num_gpus", "position", "assigned"),
    [
        (["3", "5"], 2, 0, ["3", "5"]),
        (None, 2, 0, ["0", "1"]),
        (None, 2, 1, ["2", "3"]),
        (None, 0, 1, None),
    ],
)
def test_ranks_take_the_gpus_that_spark_assigned_or_those_of_their_host_in_turn(
    addresses: list[str] | None, num_gpus: int, position: int, assigned: list[str] | None
) -> None:
    assert gpus_of_rank(addresses, num_gpus, position) == assigned


def test_too_few_assigned_gpus_name_the_setting() -> None:
    with pytest.raises(LaunchError, match=r"spark\.task\.resource\.gpu\.amount to 2"):
        gpus_of_rank(["3"], 2, 0)


def test_visible_gpus_are_left_alone_when_none_are_asked_for() -> None:
    variables = rank_environment({}, gpus=None, num_threads=1, inherited={"CUDA_VISIBLE_DEVICES": "7"})
    assert variables["CUDA_VISIBLE_DEVICES"] == "7"


def test_users_variables_win_and_the_secret_of_sparks_worker_is_removed() -> None:
    inherited = {"PYTHON_WORKER_FACTORY_SECRET": "s", "PATH": "/bin", "MODE": "old"}
    variables = rank_environment({"MODE": "new"}, gpus=["1"], num_threads=1, inherited=inherited)
    assert variables["MODE"] == "new"
    assert variables["PATH"] == "/bin"
    assert variables["CUDA_VISIBLE_DEVICES"] == "1"
    assert "PYTHON_WORKER_FACTORY_SECRET" not in variables


def test_variables_of_another_launcher_are_removed_unless_the_user_sets_them() -> None:
    inherited = {"RANK": "1", "MASTER_ADDR": "10.0.0.1", "PATH": "/bin"}
    assert (
        not {"RANK", "MASTER_ADDR"}
        & rank_environment({}, gpus=None, num_threads=1, inherited=inherited).keys()
    )
    assert rank_environment({"RANK": "0"}, gpus=None, num_threads=1, inherited=inherited)["RANK"] == "0"


def test_allocators_are_those_of_ranks_unless_the_user_sets_others() -> None:
    for name, value in (("ARROW_DEFAULT_MEMORY_POOL", "system"), ("MALLOC_TRIM_THRESHOLD_", "131072")):
        assert rank_environment({}, gpus=None, num_threads=1, inherited={})[name] != value
        assert rank_environment({}, gpus=None, num_threads=1, inherited={name: value})[name] == value


def test_ranks_have_no_credentials_unless_the_user_gives_them() -> None:
    names = (
        "MLFLOW_TRACKING_TOKEN",
        "MLFLOW_TRACKING_USERNAME",
        "MLFLOW_TRACKING_PASSWORD",
        "MLFLOW_TRACKING_CLIENT_CERT_PATH",
        "MLFLOW_TRACKING_AWS_SIGV4",
        "MLFLOW_FLASK_SERVER_SECRET_KEY",
        "DATABRICKS_TOKEN",
        "DATABRICKS_PASSWORD",
        "DATABRICKS_CONFIG_PROFILE",
    )
    harmless = {"MLFLOW_TRACKING_URI": "http://here", "DATABRICKS_RUNTIME_VERSION": "15.4", "PATH": "/bin"}
    inherited = {**dict.fromkeys(names, "secret"), **harmless}
    variables = rank_environment({}, gpus=None, num_threads=1, inherited=inherited)
    assert "secret" not in variables.values()
    assert harmless.items() <= variables.items()
    given = rank_environment({"DATABRICKS_TOKEN": "mine"}, gpus=None, num_threads=1, inherited=inherited)
    assert given["DATABRICKS_TOKEN"] == "mine"


@pytest.mark.parametrize(
    "uri", ["https://user:secret@here", "postgresql://here/db?password=secret", "https://here/?token=secret"]
)
def test_tracking_uri_with_a_password_is_removed(uri: str) -> None:
    assert "MLFLOW_TRACKING_URI" not in rank_environment(
        {}, gpus=None, num_threads=1, inherited={"MLFLOW_TRACKING_URI": uri}
    )
