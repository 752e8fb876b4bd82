#!/usr/bin/env bash
# A TPU slice of a GKE cluster that XPK made; the processes find each other:
#
#   CLUSTER=my-cluster ZONE=us-central2-b PROJECT=my-project IMAGE=... bash examples/launch/xpk.sh
#
# The image has this checkout in /optax_muonplus and its requirements; `xpk storage attach` gives
# the pods a shared disk, here at /shared. More flags, such as --dry-run, are handed on.
set -euo pipefail
: "${CLUSTER:?}" "${ZONE:?}" "${PROJECT:?}" "${IMAGE:?}"

train='cd /optax_muonplus &&
export RUNS=/shared/runs XDG_CACHE_HOME=/shared/cache &&
exec bash examples/launch/start_or_resume.sh llama-1b "llama-1b --machine v5e-4x4" \
  --distributed --mesh fsdp=16'
xpk workload create --cluster "$CLUSTER" --zone "$ZONE" --project "$PROJECT" \
  --workload llama-1b --tpu-type v5litepod-16 --num-slices 1 --docker-image "$IMAGE" \
  --max-restarts 20 --termination-grace-period-seconds 600 --command "$train" "$@"
