"""``python -m dptune.cli``: the command ``dptune`` of this interpreter."""

from dptune.cli import app

app(prog_name="dptune")
