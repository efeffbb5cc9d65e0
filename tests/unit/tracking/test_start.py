from __future__ import annotations

import threading

import mlflow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparkdl.tracking.start import reporting_to, with_known_credentials, without_credentials


@pytest.mark.parametrize(
    ("uri", "bare"),
    [
        ("https://me:secret@host:5000/a?b=c", "https://host:5000/a?b=c"),
        ("https://secret@host", "https://host"),
        ("postgresql+psycopg2://me:sec/ret#1@host:5432/db", "postgresql+psycopg2://host:5432/db"),
        ("mysql://me@host/db", "mysql://host/db"),
        ("postgresql://host/db?user=me&password=secret&a=b", "postgresql://host/db?user=me&password=&a=b"),
        ("401 of https://me:secret@host/api: mail a@b.c", "401 of https://host/api: mail a@b.c"),
    ],
)
def test_users_and_passwords_are_removed(uri, bare):
    assert without_credentials(uri) == bare


@pytest.mark.parametrize(
    "uri",
    [
        "sqlite:////home/a@b/mlflow.db",
        "file:///home/a:b@c/mlruns",
        "https://host:5000/a@b",
        "databricks://scope:key",
        "databricks",
        "s3://bucket/a@b",
        "",
    ],
)
def test_texts_without_credentials_are_not_changed(uri):
    assert without_credentials(uri) == uri


WORDS = st.text(alphabet="abcXYZ019-_.~%!$&'()*+,;=", min_size=1, max_size=12)


@given(
    scheme=st.sampled_from(["http", "https", "postgresql", "mysql+pymysql"]),
    user=WORDS,
    password=WORDS,
    path=st.sampled_from(["", "/db", "/a/b?c=d"]),
)
def test_any_user_and_password_is_removed(scheme, user, password, path):
    assert without_credentials(f"{scheme}://{user}:{password}@host:1{path}") == f"{scheme}://host:1{path}"


def test_tracking_uri_of_the_process_is_restored(tracked):
    with reporting_to("http://there"):
        assert mlflow.get_tracking_uri() == "http://there"
    assert not mlflow.is_tracking_uri_set()
    mlflow.set_tracking_uri("http://here")
    with pytest.raises(ValueError, match="broken"), reporting_to("http://there"):
        raise ValueError("broken")
    assert mlflow.get_tracking_uri() == "http://here"
    with reporting_to("http://there"):
        mlflow.set_tracking_uri("http://chosen-meanwhile")
    assert mlflow.get_tracking_uri() == "http://chosen-meanwhile"


def test_threads_set_the_tracking_uri_one_after_the_other(tracked):
    seen = []

    def report(uri):
        for _ in range(200):
            with reporting_to(uri):
                seen.append(mlflow.get_tracking_uri() == uri)

    threads = [threading.Thread(target=report, args=(f"http://{name}",)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [True] * 400
    assert not mlflow.is_tracking_uri_set()


def test_credentials_of_the_process_are_used_for_the_same_server(tracked):
    mlflow.set_tracking_uri("https://me:secret@host")
    assert with_known_credentials("https://host") == "https://me:secret@host"
    assert with_known_credentials("https://other") == "https://other"
