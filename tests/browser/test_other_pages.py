"""Pages of other servers in the owner's own browser, which knows the password: they change nothing in `make ui`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from tests.browser.test_prefect import sign_in
from tests.flows.running_ui import RunningUi, without_data

pytestmark = [pytest.mark.browser, pytest.mark.system, pytest.mark.timeout(900)]
#: What a page gets of an address: the status, or the browser's refusal to show it one.
FETCH = """async ([url, method, body, headers]) => {
    try {
        const answer = await fetch(url, {method, body, headers, credentials: "include"});
        return answer.status;
    } catch (error) {
        return String(error);
    }
}"""
JSON, PLAIN = {"Content-Type": "application/json"}, {"Content-Type": "text/plain"}  # the second one without a preflight


class Page(BaseHTTPRequestHandler):
    """A page of somebody else."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<title>kittens</title>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUi]:
    with without_data(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture
def others() -> Iterator[int]:
    """The port of another server of this machine."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


@pytest.fixture
def owners(served: RunningUi, browser: Any) -> Iterator[Any]:
    """A browser in which the owner has signed in to both pages."""
    user, password = served.password.split(":")
    context = browser.new_context(http_credentials={"username": user, "password": password})
    page = context.new_page()
    sign_in(page, served)
    page.goto(served.mlflow)
    assert "MLflow" in page.title()
    assert page.evaluate(FETCH, [f"{served.mlflow}/ajax-api/2.0/mlflow/experiments/create", "POST", "{}", JSON]) == 400
    yield context
    context.close()


def names(served: RunningUi) -> list[str]:
    return [one["name"] for one in served.ask("/flows/filter", {})]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "evil.example"])
def test_a_page_of_another_server_gets_and_changes_nothing(
    served: RunningUi, owners: Any, others: int, host: str
) -> None:
    before = names(served)
    page = owners.new_page()
    page.goto(f"http://{host}:{others}/")
    assert page.title() == "kittens"
    mlflow, prefect = f"{served.mlflow}/ajax-api/2.0/mlflow/experiments", f"{served.prefect}/api"
    evil = f'{{"name": "of {host}"}}'
    for headers in (JSON, PLAIN):
        asked = [
            page.evaluate(FETCH, [f"{mlflow}/create", "POST", evil, headers]),
            page.evaluate(FETCH, [f"{prefect}/flows/", "POST", evil, headers]),
            page.evaluate(FETCH, [f"{mlflow}/search?max_results=9", "GET", None, {}]),
            page.evaluate(FETCH, [f"{prefect}/csrf-token?client=evil", "GET", None, {}]),
        ]
        assert asked == ["TypeError: Failed to fetch"] * 4
    own = owners.new_page()
    own.goto(served.mlflow)
    found = own.evaluate("url => fetch(url).then(one => one.text())", f"{mlflow}/search?max_results=9")
    assert f"of {host}" not in found
    assert names(served) == before


def test_a_name_that_was_made_to_mean_this_machine_opens_nothing(served: RunningUi, owners: Any) -> None:
    """The owner of a name first serves a page of their own, then lets the name mean this machine's server."""
    for server in (served.prefect, served.mlflow):
        page = owners.new_page()
        answer = page.goto(server.replace("127.0.0.1", "evil.example"))
        assert answer.status == 403
        assert "only as 127.0.0.1 or localhost" in page.content()
        for path in ("/api/flows/", "/ajax-api/2.0/mlflow/experiments/create"):
            assert page.evaluate(FETCH, [path, "POST", '{"name": "evil"}', JSON]) == 403


def test_the_page_works_under_the_machines_other_name(served: RunningUi, browser: Any) -> None:
    """A tunnel gives the page another port."""
    page = browser.new_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    address = served.prefect.replace("127.0.0.1", "localhost")
    page.goto(address)
    page.locator("input[type=password]").fill("dptune:wrong")
    page.get_by_role("button", name="Login").click()
    page.get_by_text("Authentication failed").first.wait_for()
    page.locator("input[type=password]").fill(served.password)
    page.get_by_role("button", name="Login").click()
    page.goto(f"{address}/deployments")
    page.get_by_text("policy").first.wait_for()
    assert [url for url in asked if url.startswith("http") and not url.startswith(address)] == []
    page.close()


def test_a_browser_that_was_told_no_password_shows_nothing(served: RunningUi, browser: Any) -> None:
    page = browser.new_page()
    with pytest.raises(Exception, match="ERR_INVALID_AUTH_CREDENTIALS"):  # without a window it cannot ask its user
        page.goto(served.mlflow)
    page.close()
    page = browser.new_page()
    page.goto(f"{served.prefect}/deployments")
    page.locator("input[type=password]").wait_for()
    assert page.get_by_text("policy").count() == 0
    page.close()
