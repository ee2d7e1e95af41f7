# Runs a stage's module: sh tasks/stage.sh MODULE. Where no environment is activated it takes that of `make setup`, so
# that `.venv/bin/dvc repro` works by itself; a queued experiment runs in a copy under .dvc/tmp/exps, which has none.
for python in python "${PWD%/.dvc/tmp/exps/*}/.venv/bin/python"; do
    if command -v "$python" >/dev/null; then
        exec "$python" -m "$@"
    fi
done
echo "error: no python is on PATH, and .venv has none. Fix: run \`make repro\`, or activate dptune's environment." >&2
exit 2
