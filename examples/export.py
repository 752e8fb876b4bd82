"""A run's model for transformers: `python -m examples.export runs/NAME FOLDER`."""

import sys
from pathlib import Path

import tyro

from examples.trainer.inference import trained
from examples.trainer.inference.export import DType, write_folder
from examples.trainer.inference.trained import CheckpointRef
from examples.trainer.system.exit_status import command


def export(
    run: tyro.conf.Positional[Path],
    folder: tyro.conf.Positional[Path],
    step: int | None = None,
    dtype: DType | None = None,
    mesh: str = "",
) -> str:
    """Writes a trained model as a folder that transformers reads.

    Args:
      run: folder of a run.
      folder: a new folder for weights, configuration and tokenizer.
      step: step of the checkpoint; the last one by default.
      dtype: type of the weights; None: that of the run.
      mesh: how devices are arranged, as data=2,fsdp=4; empty: all of them on fsdp.
    """
    model = trained.load(CheckpointRef(run, step, mesh))
    network = model.config.model
    kind = dtype or network.param_dtype
    names = write_folder(folder, model.params, network, model.tokenizer, kind)
    lines = [f"step {model.step} of {run} in {kind}, written to {folder}:"]
    return "\n".join([*lines, *(f"  {name}" for name in names)])


main = command(export, "examples.export")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
