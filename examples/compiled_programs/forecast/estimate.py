"""From the figures of compiled programs to what a person asks: does it fit, how fast is it."""

from typing import Any

from examples.compiled_programs.forecast import programs
from examples.compiled_programs.targets import Target
from examples.trainer.settings.model import training_flops_per_token
from examples.trainer.settings.run import RunConfig
from examples.trainer.system.chips import CHIPS

# What cuBLAS, NCCL and fragments take beside a program was not measured here; 8% is a guess.
USABLE_OF_GPU = 0.92
XLA_DEFAULT = 0.75  # the share of a GPU's memory that JAX takes if nothing is said


def record(
    config: RunConfig, mesh: dict[str, int], target: Target, found: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Collects the figures of a run: those of a step at the top, those of each program below."""
    step = found["train_step"]
    # While the model is evaluated, the optimizer's state is on the device too.
    state = found["init"].get("output_bytes")
    params = found["evaluation"].get("argument_bytes")
    resident = max(0, state - params) if state and params else 0
    for name, figures in found.items():
        figures["fits"] = fits(figures, resident if name == "evaluation" else 0, target)
    sizes = [figures["fits"] for figures in found.values()]
    return {
        "fits": False if False in sizes else None if None in sizes else True,
        "argument_bytes": step.get("argument_bytes"),
        "temporary_bytes": step.get("temporary_bytes"),
        "peak_bytes": step.get("peak_bytes"),
        "device_bytes": target.memory,
        "flops_per_device": step.get("flops"),
        "flops_even_share": step.get("even_flops"),
        "collectives": step.get("collectives"),
        "estimate": speed(config, target, step),
        "assumptions": assumptions(target),
        "attention": step.get("attention"),
        "mesh": mesh,
        "rows_of_a_device": config.batch_size // (mesh["data"] * mesh["fsdp"] * config.accumulate),
        "programs": found,
    }


def fits(figures: dict[str, Any], resident: int, target: Target) -> bool | None:
    """Tells whether a program fits the memory with what is there already; None if unknown."""
    if "failed" in figures:
        return None
    if "refused" in figures:
        return False
    return figures["peak_bytes"] + resident <= usable(target)


def usable(target: Target) -> float:
    """Counts bytes of a device that programs can have."""
    return target.memory * (USABLE_OF_GPU if target.is_gpu else 1.0)


def speed(config: RunConfig, target: Target, step: dict[str, Any]) -> dict[str, float] | None:
    """Estimates seconds of a step and what follows; None where no rates are known.

    The first figures are those of a GPU that waits for its collectives where the program says so,
    and of a TPU that waits for every one. Those with `hidden` are of a program whose collectives
    all run beside its other work.
    """
    seconds = step.get("seconds")
    if not seconds:
        return None
    tokens = config.batch_size * config.model.context
    needed = tokens * training_flops_per_token(config.model, programs.vocabulary(config))
    peak = target.devices * CHIPS[target.kind].peak
    waited = step["waited_s"]
    waiting = seconds["compute"] + (seconds["collectives"] if waited is None else waited)
    hidden = max(seconds.values())
    return {
        "step_s": waiting,
        "step_s_hidden": hidden,
        "tokens_per_second": tokens / waiting,
        "tokens_per_second_hidden": tokens / hidden,
        "mfu": needed / waiting / peak,
        "mfu_hidden": needed / hidden / peak,
        "compute_s": seconds["compute"],
        "attention_s": step["attention_s"],
        "collectives_s": seconds["collectives"],
        "waited_s": waited,
        "optimizer_share": step["optimizer_share"],
    }


def assumptions(target: Target) -> str:
    nothing = "Nothing was run: the figures are read from the compiled programs."
    if target.kind == "cpu":
        return f"{nothing} Simulated devices share this machine's memory; no time is estimated."
    chip = CHIPS[target.kind]
    if target.is_tpu:
        return (
            f"{nothing} Time: libtpu's own estimate of cycles at {chip.clock / 1e9:g} GHz,"
            " attention at the share of the peak that cuDNN reaches on an H100 (assumed), and"
            f" collectives at {chip.link / 1e9:.0f} GB/s a chip, those of one axis of the slice."
            f" MFU is of {chip.peak / 1e12:.0f} TFLOP/s."
        )
    like = "" if target.kind == "h100" else " The shares of the peaks are those of an H100."
    launch = f" {1e6 * programs.LAUNCH_S:g} us pass from one kernel to the next."
    return (
        f"{nothing} Time: {target.roofline}{like}{launch} MFU is of {chip.peak / 1e12:.0f} TFLOP/s."
    )


def thriftier(config: RunConfig, mesh: dict[str, int]) -> list[str]:
    """Lists flags that save memory and compute the same; empty if there are none."""
    flags = ["--model.remat", "full"] if config.model.remat == "none" else []
    most = config.batch_size // (mesh["data"] * mesh["fsdp"])
    if config.accumulate < most:
        flags += ["--accumulate", str(most)]
    return flags
