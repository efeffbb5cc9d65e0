from __future__ import annotations

import pytest

from tests.training.scenes.input_scenes import write_rows


@pytest.fixture(scope="session")
def dataset(tmp_path_factory):
    """Rows with features and labels of every kind, in a folder."""
    return write_rows(tmp_path_factory.mktemp("rows") / "rows")
