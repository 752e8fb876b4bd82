"""A run's model for transformers: `python -m examples.export runs/NAME FOLDER`."""

import sys
from pathlib import Path

import tyro

from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef, Weights
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import command
from examples.trainer.weights.export import DType, write_folder


def export(
    run: tyro.conf.Positional[Path],
    folder: tyro.conf.Positional[Path],
    step: int | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 5_000_000_000,
    overwrite: bool = False,
    mesh: str = "",
    weights: Weights = "last",
    checkpoint_dir: str = "",
) -> str:
    """Writes a trained model as a folder that transformers and --init-from read.

    Args:
      run: folder of a run.
      folder: what to write: safetensors, config.json, generation_config.json and the tokenizer.
      step: step of the checkpoint; the last one by default.
      dtype: type of the weights; None: that of the run.
      shard_bytes: largest size of a file of weights; a larger model has several and an index.
      overwrite: replace a model that is in the folder.
      mesh: how devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp.
      weights: ema: their exponential moving average, of a run with --ema; tail: their mean over its
        last steps, of a run with --tail.
      checkpoint_dir: the --checkpoint-dir that the run began with, if it had one.
    """
    if shard_bytes < 1:
        raise UserError(f"--shard-bytes is {shard_bytes}: give at least 1.")
    model = trained.load(CheckpointRef(run, step, mesh, weights, checkpoint_dir))
    network = model.config.model
    kind = dtype or network.param_dtype
    names = write_folder(
        folder, model.params, network, model.tokenizer, kind, shard_bytes, overwrite
    )
    return f"step {model.step} of {run} in {kind}, written to {folder}:\n" + "\n".join(
        f"  {name}" for name in names
    )


main = command(export, "examples.export")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
