"""Download of one file over HTTP, whole or an error."""

from __future__ import annotations

import logging
from pathlib import Path

import requests

from dptune.errors import DataError
from dptune.progress import Meter

log = logging.getLogger(__name__)

_TIMEOUT = (10.0, 60.0)  # seconds to connect, seconds without a byte
_CHUNK = 1 << 16


def download(url: str, target: Path) -> None:
    """Stream ``url`` into ``target``, with a bar on a terminal and log lines elsewhere.

    Raises: DataError if the server cannot be reached, refuses, or sends less than it promised.
    """
    fix = "check the network and retry, or give uci.path a copy of the table (CSV or zip)"
    log.info("downloading %s", url)
    try:
        # Without "identity" the server may state the length of compressed bytes, and the check below would fail.
        headers = {"Accept-Encoding": "identity"}
        with requests.get(url, stream=True, timeout=_TIMEOUT, headers=headers) as response:
            response.raise_for_status()
            promised = int(response.headers.get("Content-Length") or 0)
            received = _stream(response, target, promised)
    except (requests.RequestException, ValueError) as error:
        raise DataError(f"download failed ({type(error).__name__}: {error})", fix=fix, file=url) from None
    if promised and received != promised:  # urllib3 2 raises by itself, urllib3 1 does not
        raise DataError(f"download stopped at {received} of {promised} bytes", fix=fix, file=url)


def _stream(response: requests.Response, target: Path, length: int) -> int:
    with target.open("wb") as file, Meter(f"downloading {target.name}", total=length or None, unit="B") as meter:
        for chunk in response.iter_content(_CHUNK):
            meter.update(meter.done + file.write(chunk))
        return meter.done
