"""One unit of work each. Started with a Python that has none of dptune's dependencies, it says so."""

import sys
from importlib.util import find_spec

if find_spec("pydantic") is None:
    sys.exit(f"error: {sys.executable} has no dptune. Fix: run `make repro`, or first `. .venv/bin/activate`.")
