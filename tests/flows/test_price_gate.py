"""A run that asks first makes no release before somebody who was told the price resumes it."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tiny_pipeline import BUDGET, STEPS, nonprivate, static, write_params

from flows.server import flow
from flows.study import price_of, wait_for_approval
from tasks.experiment.cells import grid
from tasks.experiment.finetune import run_cell
from tasks.settings.params import load_settings


def test_the_price_adds_to_what_these_records_paid(pipeline: Path) -> None:
    cells = [static(), nonprivate()]
    price = price_of(cells, private=False)
    assert price is not None
    assert f"spends at most epsilon {BUDGET:g} by certified accounting" in price
    assert "then paid" not in price, "nothing was paid before"
    run_cell(cells[0], "cpu")
    other = static({"experiment": {"seeds": [1]}})
    price = price_of([other], private=False)
    assert price is not None
    assert f"these records then paid at most epsilon {2 * BUDGET:g} in all" in price
    unbounded = price_of([other, nonprivate()], private=False)
    assert unbounded is not None
    assert "then paid at most" not in unbounded, "one of the cells has no bound"
    private = price_of([other], private=True)
    assert private is not None
    assert "paid" not in private, "what these records paid is private"
    assert price_of(cells[:1], private=False) is None, "a finished cell makes no release"


@pytest.mark.system
def test_a_run_waits_until_it_is_resumed_and_shows_the_price(server: str, pipeline: Path) -> None:
    from prefect.client.orchestration import get_client
    from prefect.exceptions import PrefectHTTPStatusError
    from prefect.flow_runs import resume_flow_run

    write_params({"experiment": {"mechanisms": ["static"]}})
    assert len(grid(load_settings())) == 1
    passed: list[str] = []

    @flow(name="asks")
    def asks() -> None:
        wait_for_approval(None)
        passed.append("went on")

    started = threading.Thread(target=asks, daemon=True)
    started.start()
    with get_client(sync_client=True) as client:
        paused: list[Any] = []
        end = time.monotonic() + 120
        while not paused and time.monotonic() < end:
            time.sleep(0.5)
            paused = [one for one in client.read_flow_runs() if one.state and one.state.is_paused()]
        (run,) = paused
        assert passed == []
        key = run.state.state_details.run_input_keyset["description"]
        shown = ""
        while not shown and time.monotonic() < end:
            with suppress(PrefectHTTPStatusError):  # the page's words follow the state
                shown = str(client.read_flow_run_input(run.id, key))
        assert f"makes {STEPS} releases" in shown
        resume_flow_run(run.id, run_input={})
    started.join(120)
    assert passed == ["went on"]
