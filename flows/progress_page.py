"""How far a flow came, on its run's page in Prefect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import UUID

from prefect import artifacts, get_run_logger


def progress_page(key: str) -> Callable[[float, str], None]:
    """A function that shows, on the page of the run under way, the share of its work that is done, and words for it.

    Args:
        key: name of the artifact: lower-case letters, digits and dashes.
    """
    made: list[UUID] = []

    def show(share: float, words: str) -> None:
        percent = round(100 * share, 1)
        try:
            if made:
                artifacts.update_progress_artifact(made[0], progress=percent, description=words)
            else:
                created: Any = artifacts.create_progress_artifact(progress=percent, key=key, description=words)
                made.append(created)
        except Exception as error:  # what cannot be shown must not end the work
            get_run_logger().warning("progress could not be shown: %s", error)

    return show
