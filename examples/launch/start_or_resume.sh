#!/usr/bin/env bash
# Trains the run $RUNS/NAME, or goes on with it from its last checkpoint:
#
#   bash examples/launch/start_or_resume.sh NAME "RECIPE AND ITS FLAGS" FLAGS OF THE MACHINE
#
# Every process runs it. All of them choose the same way: process 0 makes the folder after all have
# joined, so that none of them sees it before. `exec` hands SIGTERM on to Python.
set -euo pipefail
name=$1 recipe=$2
shift 2
runs=${RUNS:-runs}
if [ -e "$runs/$name/config.json" ]; then
  exec python -m examples.train --resume "$runs/$name" "$@"
fi
# shellcheck disable=SC2086  # the recipe is several words
exec python -m examples.train $recipe --name "$name" --runs-dir "$runs" "$@"
