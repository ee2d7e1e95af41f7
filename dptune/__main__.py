"""``python -m dptune``: the command line."""

from dptune.cli import app

if __name__ == "__main__":
    app(prog_name="dptune")
