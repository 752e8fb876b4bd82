#!/usr/bin/env bash
# A slice of TPU VMs, one process on each host; the processes find each other:
#
#   TPU=my-slice ZONE=us-central2-b bash examples/launch/tpu_pod.sh
#
# Every host has this checkout in ~/optax_muonplus with `pip install -e '.[tpu]' -r
# requirements/examples.txt`, and a shared disk (Filestore, or another NFS) at /mnt/shared.
# The same command goes on with a run that was stopped or preempted.
set -euo pipefail
: "${TPU:?the name of the slice}" "${ZONE:?its zone}"

# nohup: a lost connection ends the shell, not the training.
# shellcheck disable=SC2016  # the host fills in its name
train='cd ~/optax_muonplus &&
export RUNS=/mnt/shared/runs XDG_CACHE_HOME=/mnt/shared/cache &&
nohup bash examples/launch/start_or_resume.sh llama-1b "llama-1b --accumulate 16" \
  --distributed --mesh fsdp=16 > train-$(hostname).log 2>&1 < /dev/null &'
# gcloud compute tpus tpu-vm ssh ... --command "pkill -TERM -f examples.train" stops and saves.
gcloud compute tpus tpu-vm ssh "$TPU" --zone "$ZONE" --worker=all --command "$train"
