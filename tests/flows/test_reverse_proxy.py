"""The lines of the docs with which nginx shows the pages to colleagues; skipped where nginx or openssl is not there."""

from __future__ import annotations

import base64
import os
import re
import shutil
import ssl
import subprocess
import time
from collections.abc import Iterator
from http.client import HTTPSConnection
from pathlib import Path

import pytest
from running_ui import RunningUi, free_port, without_data
from tiny_pipeline import ROOT

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

NAME, PASSWORD = "runs.example.org", "a colleague's"
ORIGIN = {"Origin": f"https://{NAME}"}
SIGNED_IN = {"Authorization": f"Basic {base64.b64encode(f'colleague:{PASSWORD}'.encode()).decode()}"}


class Proxy:
    """nginx before one of the two pages, by the docs' block with this machine's port and files in it."""

    def __init__(self, folder: Path, page: str, password: str) -> None:
        folder.mkdir()
        self.port = free_port()
        hashed = subprocess.run(["openssl", "passwd", "-apr1", PASSWORD], capture_output=True, text=True, check=True)
        (folder / "colleagues").write_text(f"colleague:{hashed.stdout}")
        subject = ["-subj", f"/CN={NAME}", "-days", "2", "-keyout", "key.pem", "-out", "certificate.pem"]
        made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject]
        subprocess.run(made, cwd=folder, capture_output=True, check=True)
        docs = (ROOT / "docs" / "howto" / "prefect.md").read_text(encoding="utf-8")
        block = re.search(r"^    server \{\n(?:.*\n)*?^    \}\n", docs, re.MULTILINE)
        assert block is not None
        basic = base64.b64encode(password.encode()).decode()
        own = {
            "listen 443 ssl;": f"listen 127.0.0.1:{self.port} ssl; ssl_certificate {folder}/certificate.pem; "
            f"ssl_certificate_key {folder}/key.pem;",
            "/etc/nginx/colleagues": f"{folder}/colleagues",
            "127.0.0.1:5000": page.removeprefix("http://"),
            "Basic ...": f"Basic {basic}",
        }
        lines = block[0]
        for said, here in own.items():
            assert said in lines
            lines = lines.replace(said, here)
        kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        places = " ".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
        user = "user root; " if os.getuid() == 0 else ""  # its workers read the files of this folder
        head = f"daemon off; {user}pid {folder}/pid; error_log {folder}/log;\nevents {{}}\n"
        head += f"http {{ access_log off; {places}\n"
        (folder / "nginx.conf").write_text(f"{head}{lines}}}\n")
        self.process = subprocess.Popen(["nginx", "-c", f"{folder}/nginx.conf", "-e", f"{folder}/log"])
        time.sleep(2)
        assert self.process.poll() is None, (folder / "log").read_text()

    def ask(self, path: str, headers: dict[str, str], body: str | None = None) -> int:
        """The status with which a path is answered."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        asking = HTTPSConnection("127.0.0.1", self.port, context=context, timeout=60)
        told = {"Host": NAME, "Content-Type": "application/json", **headers}
        asking.request("GET" if body is None else "POST", path, body, told)
        return asking.getresponse().status


@pytest.fixture(scope="module")
def interface(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUi]:
    if not (shutil.which("nginx") and shutil.which("openssl")):
        pytest.skip("needs nginx and openssl")
    with without_data(tmp_path_factory.mktemp("proxied")) as running:
        yield running


def test_colleagues_use_both_pages_and_nobody_else_does(interface: RunningUi, tmp_path: Path) -> None:
    reads = {"mlflow": "/ajax-api/2.0/mlflow/experiments/search?max_results=5", "prefect": "/api/admin/version"}
    for kind, read in reads.items():
        proxy = Proxy(tmp_path / kind, getattr(interface, kind), interface.password)
        try:
            for path in ("/", read):
                assert proxy.ask(path, SIGNED_IN) == 200
                assert proxy.ask(path, SIGNED_IN | ORIGIN) == 200
                assert proxy.ask(path, {}) == 401
                assert proxy.ask(path, {"Authorization": interface.basic}) == 401, "the owner's is the proxy's own"
                for other in (f"http://{NAME}", f"https://{NAME}.evil.example", "https://runsxexample.org", "null"):
                    assert proxy.ask(path, SIGNED_IN | {"Origin": other}) == 403, other
            if kind == "mlflow":
                create = "/ajax-api/2.0/mlflow/experiments/create"
                assert proxy.ask(create, SIGNED_IN | ORIGIN, '{"name": "by a colleague"}') == 200
                assert proxy.ask(create, SIGNED_IN | {"Origin": "http://evil.example"}, '{"name": "evil"}') == 403
            else:
                assert proxy.ask("/api/flows/", SIGNED_IN | ORIGIN, '{"name": "without a token"}') == 403
                upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
                upgrade |= {"Sec-WebSocket-Key": "x3JJHMbDL1EzLkh9GBhXDw==", "Sec-WebSocket-Protocol": "prefect"}
                assert proxy.ask("/api/events/out", SIGNED_IN | ORIGIN | upgrade) == 101, "the event feed is live"
        finally:
            proxy.process.terminate()
            proxy.process.wait()
