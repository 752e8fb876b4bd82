"""What `lab.benchmarks.gpu` measures, a generator of rows for each part.

A row has a name, and what was found: ``median_s``, ``of_reference`` (its time over that of the
reference, which comes first; median over rounds), and seconds of one run by class of kernel.
"""

import dataclasses
import functools
import importlib.util
import math
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import optax_muonplus as omp
from examples.trainer.models import sharding
from examples.trainer.settings.command_line import PRESETS
from examples.trainer.settings.run import Name, RunConfig, training_flops_per_token
from examples.trainer.training import optimizers
from examples.trainer.training.optimizers import Rates
from examples.trainer.training.step import make_functions, make_train_step
from lab.benchmarks import parity, products, timing, trees
from lab.benchmarks.compiled import Update, compile_program

Row = dict[str, Any]
Timed = Callable[[dict[str, Callable[[], Any]]], dict[str, np.ndarray]]
Programs = Mapping[str, tuple[Callable[[], Any], float]]
"""Name to what makes a program, and the multiplications and additions of a run."""
REFERENCE, DEFAULT = "optax.contrib.muon", "omp.muonplus"

TINY = trees.Size(16, 1, 40, gated=False)
MOST_LAYERS = 12  # GPT-Small's; Optax's update of 24 layers would compile for minutes
PACKAGES = {"torch.optim.Muon": "torch", "dion.Muon": "dion"}

PLAIN = omp.polar.Orthogonalize(compute_dtype="bfloat16", polar="newton_schulz")
AUTO = PLAIN.replace(polar="auto")
STACKS = ((12, 2048, 5461), (12, 2048, 2048))
TINY_STACKS = ((2, 16, 40), (2, 16, 16))

STEPS: dict[str, Name | None] = {"optax.adamw": "adamw", REFERENCE: None, DEFAULT: "muonplus"}
BATCH, VOCABULARY = 16, 50_257  # rows of 2,048 tokens: 3.5 GB at most on an H100; GPT-2's
LONG = ("kernel", "step", "llama-1b")  # parts whose programs run for tens of milliseconds
PROFILED = 3  # runs in a profile


def rows(part: str, toy: bool, rounds: int, calls: int) -> Iterator[Row]:
    """Makes the rows of a part."""
    calls = math.ceil(calls / 3) if part in LONG else calls
    timed = functools.partial(timing.interleaved, rounds=rounds, calls=calls)
    if part == "kernel":
        return (row for stack in (TINY_STACKS if toy else STACKS) for row in polar(stack, timed))
    if part == "step":
        return training_steps(toy, timed)
    size = trees.SIZES["gpt-small" if part == "float32" else part]
    size = TINY if toy else size._replace(layers=min(size.layers, MOST_LAYERS))
    return updates(size, "float32" if part == "float32" else "bfloat16", timed)


def compared(programs: Programs, timed: Timed) -> Iterator[Row]:
    """Times programs, each in turn with the first, and makes their rows."""
    reference, *others = programs
    first = programs[reference][0]()
    for n, name in enumerate(others):
        made = {reference: first, name: programs[name][0]()}
        seconds = timed(made)
        for one in list(made)[n > 0 :]:
            row = {"name": one, **made[one].figures, **timing.median_and_quartiles(seconds[one])}
            row["of_reference"] = float(np.median(seconds[one] / seconds[reference]))
            row["tflop_per_s"] = programs[one][1] / row["median_s"] / 1e12
            profiled = jax.default_backend() == "gpu" and one not in PACKAGES
            yield row | (profile(made[one]) if profiled else {})


def updates(size: trees.Size, dtype: Any, timed: Timed) -> Iterator[Row]:
    """Times whole updates of parameters in a dtype, and those of torch last."""
    shapes = trees.shapes(size, dtype)
    params, grads = trees.random_like(shapes, 0), trees.random_like(shapes, 1)
    where: dict[str, Any] = {"muon_weight_dimension_numbers": omp.muon_dimension_numbers(shapes)}
    theirs = functools.partial(Update, optax.contrib.muon(0.02, **where), params, grads)
    plain = products.operations(size, "newton_schulz", dtype)
    programs = {REFERENCE: (theirs, plain)}
    for name, (rule, compute_dtype) in rules(dtype).items():
        operations = products.operations(size, "auto", compute_dtype)
        programs[name] = functools.partial(Update, rule, params, grads), operations
    for name, package in PACKAGES.items():
        if importlib.util.find_spec(package) is not None:
            programs[name] = functools.partial(TorchUpdate, name, params, grads), plain
    return compared(programs, timed)


def rules(dtype: str) -> dict[str, tuple[Any, str | None]]:
    """Makes our updates, each with its dtype of products; the first is the default as typed."""
    chosen = "bfloat16" if jax.default_backend() == "gpu" else None
    found: dict[str, tuple[Any, str | None]] = {DEFAULT: (omp.muonplus(0.02), chosen)}
    if dtype == "float32":
        exact = omp.muonplus(0.02, compute_dtype="float32")
        return found | {"omp.muonplus, TF32": (exact, "float32")}
    return found | {"omp.muonplus, col_row": (omp.muonplus(0.02, **parity.COL_ROW), chosen)}


def polar(stack: tuple[int, int, int], timed: Timed) -> Iterator[Row]:
    """Times polar factors of a stack in bfloat16, the kernel's and others.

    The kernel stays if its ``of_reference`` is at most 1 / 1.15 at (12, 2048, 5461). ``distance``
    is that of the first matrix from the plain iteration's. Without ``mosaic_calls`` it fell back.
    """
    x = jax.random.normal(jax.random.key(0), stack, jnp.bfloat16)
    plain, auto = (functools.partial(omp.polar.polar_factor, options=o) for o in (PLAIN, AUTO))
    first = PolarFactor(plain, x)
    make = functools.partial(PolarFactor, x=x, expected=first()[0])
    operations, fewer = (stack[0] * omp.polar.FastPolar(o).flops(stack[1:]) for o in (PLAIN, AUTO))
    programs: Programs = {
        f"plain iteration, {stack}": (lambda: first, operations),
        f"hopper_polar, {stack}": (lambda: make(omp.contrib.hopper_polar()), operations),
        f"auto, {stack}": (lambda: make(auto), fewer),
    }
    return compared(programs, timed)


class PolarFactor:
    """A polar function of an array, compiled; it may be compared with another's first factor."""

    def __init__(self, function: Callable[..., Any], x: jax.Array, expected: Any = None):
        compiled = compile_program(jax.jit(function), x)
        self.program, self.figures, self.x = compiled.program, compiled.figures(), x
        self.figures["mosaic_calls"] = self.program.as_text().count('target="mosaic_gpu')
        if expected is not None:
            self.figures["distance"] = parity.distance(self()[0], expected)

    def __call__(self) -> jax.Array:
        """Computes the factors."""
        return self.program(self.x)


def training_steps(toy: bool, timed: Timed) -> Iterator[Row]:
    """Times training steps of the recipe of GPT-Small on random tokens."""
    config, vocabulary = dataclasses.replace(PRESETS["gpt-small"][1], batch_size=BATCH), VOCABULARY
    if toy:
        tiny = {"n_layer": 2, "n_head": 2, "d_model": 32, "d_ff": 128, "context": 32}
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **tiny))
        vocabulary = 512
    tokens = BATCH * config.model.context
    operations = tokens * training_flops_per_token(config.model, vocabulary)
    make = functools.partial(TrainingStep, config, vocabulary)
    programs = {name: (functools.partial(make, rule), operations) for name, rule in STEPS.items()}
    for row in compared(programs, timed):
        yield row | {"tokens_per_s": tokens / row["median_s"]}


class TrainingStep:
    """A training step, ready to run: each call goes on from the state of the call before."""

    def __init__(self, config: RunConfig, vocabulary: int, rule: Name | None):
        mesh = sharding.make_mesh("", jax.devices()[:1])
        optimizer = dataclasses.replace(config.optimizer, name=rule or "muon")
        config = dataclasses.replace(config, optimizer=optimizer)
        functions: Any = make_functions(config, vocabulary, mesh)
        step, self.state = functions.train_step, functions.init(0)
        if rule is None:
            build = functools.partial(optax_muon, config)
            placed = jax.tree.map(lambda x: x.sharding, functions.abstract.params)
            step = make_train_step(config, functions.loss, build, placed, mesh)
            step = jax.jit(step, donate_argnums=0)
            opt_state = jax.jit(build(Rates(0.0, 0.0)).init)(self.state.params)
            self.state = self.state._replace(opt_state=opt_state)
        shape = config.batch_size, config.model.context
        tokens = jax.random.randint(jax.random.key(1), shape, 0, vocabulary)
        self.inputs = Rates(1e-4, 1e-4), tokens, jnp.roll(tokens, -1, axis=1)
        compiled = compile_program(step, self.state, *self.inputs, state=self.state.opt_state)
        self.program, self.figures = compiled.program, compiled.figures()

    def __call__(self) -> Any:
        """Takes the next step."""
        self.state, _ = self.program(self.state, *self.inputs)
        return self.state.params


def optax_muon(config: RunConfig, peaks: Rates) -> optax.GradientTransformation:
    """Builds Optax's Muon for a recipe, as the trainer builds ours; without decay."""
    given = config.optimizer
    rate, adam_rate = (optimizers.schedule(given, peak, config.steps) for peak in peaks)
    where: dict[str, Any] = {"muon_weight_dimension_numbers": optimizers.matrices}
    rule = optax.contrib.muon(rate, adam_learning_rate=adam_rate, **where)
    return optax.chain(optax.clip_by_global_norm(given.clip_norm or math.inf), rule)


class TorchUpdate:
    """PyTorch's or Dion's Muon on the matrices of a tree, without decay."""

    def __init__(self, name: str, params: Any, grads: Any):
        torch: Any = importlib.import_module("torch")
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.cuda, self.figures = torch.cuda, {}
        self.params = []
        for x, g in zip(jax.tree.leaves(params), jax.tree.leaves(grads), strict=True):
            if x.ndim == 2:
                weight, grad = (torch.tensor(np.asarray(a, np.float32)) for a in (x, g))
                dtype = getattr(torch, x.dtype.name)
                weight = torch.nn.Parameter(weight.to(self.device, dtype))
                weight.grad = grad.to(self.device, dtype)
                self.params.append(weight)
        options: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.0}
        if PACKAGES[name] == "dion":
            options["use_triton"] = self.device == "cuda"
        muon = importlib.import_module(name.rpartition(".")[0]).Muon
        self.optimizer = muon(self.params, **options)

    def __call__(self) -> "TorchUpdate":
        """Takes the next step."""
        self.optimizer.step()
        return self

    def block_until_ready(self) -> None:
        """Waits for the last step."""
        if self.device == "cuda":
            self.cuda.synchronize()


class Event(NamedTuple):
    """One run of a kernel, in nanoseconds."""

    name: str
    start: float
    duration: float


# Names of kernels of cuBLASLt on Hopper and before, of CUTLASS, and of Triton's by XLA, of cuDNN's
# attention, and of Mosaic's.
PRODUCTS = re.compile(r"gemm|nvjet|cutlass|cublas|xmma|_dot_|^dot|sdpa|mosaic", re.IGNORECASE)


def profile(program: Callable[[], Any]) -> Row:
    """Runs a program under JAX's profiler; returns the seconds of a run by class of kernel."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(PROFILED):
                result = program()
            jax.block_until_ready(result)
        (file,) = Path(folder).rglob("*.xplane.pb")
        return classes(kernels(file), PROFILED)


def kernels(file: Path) -> Iterator[Event]:
    """Reads the kernels of a profile: what ran in a stream of a GPU."""
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines if plane.name.startswith("/device:GPU") else ():
            if line.name.startswith("Stream"):
                yield from (Event(x.name, x.start_ns, x.duration_ns) for x in line.events)


def classes(events: Iterable[Event], runs: int) -> Row:
    """Adds up products and traffic, and the time in which no kernel runs, for one of ``runs``."""
    found = sorted(events, key=lambda event: event.start)
    if not found:
        return {}
    busy, end = 0.0, found[0].start
    for event in found:
        busy += max(0.0, event.start + event.duration - max(end, event.start))
        end = max(end, event.start + event.duration)
    times = {
        "products_s": sum(x.duration for x in found if PRODUCTS.search(x.name)),
        "traffic_s": sum(x.duration for x in found if not PRODUCTS.search(x.name)),
        "waiting_s": end - found[0].start - busy,
    }
    return {name: 1e-9 * x / runs for name, x in times.items()} | {"kernels": len(found) / runs}
