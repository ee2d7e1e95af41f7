"""Tasks, each of which is one unit of work. Without dptune's dependencies, importing this says so and exits."""

import sys
from importlib.util import find_spec

if find_spec("pydantic") is None:
    sys.exit(f"error: {sys.executable} has no dptune. Fix: run `make repro`, or first `. .venv/bin/activate`.")
