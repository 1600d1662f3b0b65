"""How the suite is divided when it runs in several lines (``pytest -n``)."""

from __future__ import annotations

import pytest

SHARED = {"test_training_loop.py": "loop", "test_checkpoints.py": "loop", "test_parallel.py": "loop"}
"""Files that look at the same runs, which are made once in a line."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a file together: its ranks are started once."""
    for item in items:
        name = item.path.name
        item.add_marker(pytest.mark.xdist_group(SHARED.get(name, name)))
