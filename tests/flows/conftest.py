"""A Prefect server for the flows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that ask the server run where one runs anyway: its start takes more CPU time than all of them."""
    for item in items:
        if "server" in getattr(item, "fixturenames", ()) and not item.get_closest_marker("system"):
            item.add_marker(pytest.mark.system)
            item.add_marker(pytest.mark.road)


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """A Prefect server with an empty database; its API's address."""
    from prefect.settings import PREFECT_API_URL
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=180):
        yield str(PREFECT_API_URL.value())
