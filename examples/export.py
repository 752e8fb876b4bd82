"""A run's model for transformers: `python -m examples.export runs/NAME FOLDER`."""

import sys
from pathlib import Path

import tyro

from examples.trainer.inference import trained
from examples.trainer.inference.trained import CheckpointRef, Weights
from examples.trainer.models import adapters
from examples.trainer.settings.model import without_adapters
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.errors import UserError
from examples.trainer.system.exit_status import command
from examples.trainer.weights.export import DType, write_adapters, write_folder


def export(
    run: tyro.conf.Positional[Path],
    folder: tyro.conf.Positional[Path],
    step: int | None = None,
    dtype: DType | None = None,
    shard_bytes: int = 5_000_000_000,
    merged: bool = True,
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
      merged: of a run with LoRA, the adapters are part of the kernels; --no-merged: only the
        adapters are written, as PEFT reads them.
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
    if merged:
        params = model.params
        if network.lora.rank:
            params = adapters.merged(params, network.lora)
        network = without_adapters(network)
        names = write_folder(folder, params, network, model.tokenizer, kind, shard_bytes, overwrite)
    else:
        check_apart(model.config)
        base = model.config.init_from
        names = write_adapters(folder, model.params, network, base, kind, overwrite)
    return f"step {model.step} of {run} in {kind}, written to {folder}:\n" + "\n".join(
        f"  {name}" for name in names
    )


def check_apart(config: RunConfig) -> None:
    """Refuses a run of which adapters are not all that was trained."""
    if not config.model.lora.rank:
        raise UserError("--no-merged: this run has no adapters (--lora.rank): leave it out.")
    if config.optimizer.train_only:
        raise UserError(
            f"--no-merged: the run also trained {config.optimizer.train_only} (--train-only), which"
            " is no adapter: export with the adapters merged."
        )


main = command(export, "examples.export")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
