"""`--compile-for`: what a run needs on devices that are not there, and compilers that die."""

import json
import os
import sys

import jax
import jax.numpy as jnp
import pytest

from examples.compiled_programs import targets
from examples.compiled_programs.forecast import children, estimate, even_share, programs
from examples.compiled_programs.forecast.__main__ import main as child
from examples.compiled_programs.forecast.command import forecast
from examples.train import main
from examples.trainer.settings import command_line
from examples.trainer.system.errors import UserError
from examples.trainer.training import sharding
from tests.support.trainer import ROOT, TOY

CPU = targets.parse("cpu:8")


def test_a_run_is_compiled_for_eight_devices_without_data_or_folder(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    adamw = ("--optimizer.name", "adamw")  # compiles faster
    words = [*TOY, *adamw, "--mesh", "fsdp=8", "--compile-for", "cpu:8", "--json", "a/b.json"]
    assert main(words) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["a"]  # no run folder
    record = json.loads((tmp_path / "a" / "b.json").read_text())
    assert record["fits"] is True and record["command"].endswith("--json a/b.json")
    assert 0 < record["argument_bytes"] < record["peak_bytes"] < record["device_bytes"]
    assert record["temporary_bytes"] > 0
    assert record["flops_per_device"] == pytest.approx(record["flops_even_share"], rel=0.1)
    assert any(kind.startswith("all-reduce") for kind in record["collectives"])
    assert all(sent["received_bytes"] > 0 for sent in record["collectives"].values())
    assert list(record["programs"]) == list(programs.PROGRAMS)
    shown = capsys.readouterr().out
    for part in ("8 devices simulated by this CPU", "training step", "of an even share", "yes: "):
        assert part in shown, part
    assert max(map(len, shown.splitlines())) <= 100


@pytest.fixture
def compiled_as(monkeypatch):
    """Replaces the processes that compile: each gets its programs as `names`, and a `say`."""

    def replace(code):
        real = children.process
        head = "import json, os, sys, time\ndef say(**x): print(json.dumps(x), flush=True)\n"

        def process(command, variables, limit_s):
            script = f"{head}names = {command[3]!r}.split(',')\n{code}"
            return real([sys.executable, "-c", script], variables, limit_s)

        monkeypatch.setattr(children, "process", process)

    return replace


@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("os.abort()", "killed by SIGABRT: stack overflow"),
        ("sys.exit(3)", "exit status 3: stack overflow"),
        ("time.sleep(100)", "not done after 1 s"),
        ("sys.exit(0)", "it ended without figures"),
    ],
)
def test_a_compiler_that_dies_costs_one_program(compiled_as, end, failed):
    compiled_as(
        "for name in names:\n"
        "    say(begin=name)\n"
        "    if name == 'evaluation':\n"
        f"        print('stack overflow', file=sys.stderr, flush=True); {end}\n"
        "    say(program=name, figures={'peak_bytes': 1})\n"
    )
    begun = []
    found = children.figures([], programs.PROGRAMS, CPU, begun.append, limit_s=1.0)
    assert found["evaluation"] == {"failed": failed}
    assert found["train_step"] == found["init"] == {"peak_bytes": 1}
    assert begun == list(programs.PROGRAMS)


def forecast_of(*words):
    asked, preset = command_line.parse(words)
    return forecast(asked, preset, words)


def test_a_dead_compiler_is_reported_and_the_rest_is_printed(compiled_as, tmp_path, capsys):
    compiled_as("say(begin=names[0])\nprint('no stack', file=sys.stderr)\nos.abort()")
    path = tmp_path / "x.json"
    assert forecast_of("gpt-micro", "--compile-for", "cpu:8", "--json", str(path)) == 1
    record = json.loads(path.read_text())
    assert record["fits"] is None and record["flops_per_device"] is None
    assert "killed by SIGABRT: no stack" in capsys.readouterr().out


def test_what_does_not_fit_is_tried_with_flags_that_make_it_smaller(compiled_as, tmp_path, capsys):
    """A step takes 10 TB but in one piece a row, where the compiler is asked again."""
    compiled_as(
        "for name in names:\n"
        "    size = 10**13 if name == 'train_step' and len(names) > 1 else 5 * 10**6\n"
        "    say(program=name, figures=dict(argument_bytes=1, temporary_bytes=size,"
        " output_bytes=1, peak_bytes=size, compile_s=1, flops=1, collectives={}, seconds={},"
        " optimizer_share=0))\n"
    )
    words = ("gpt-micro", "--batch-size", "64", "--compile-for", "cpu:8")
    assert forecast_of(*words) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "no: a device has" in shown
    assert "With --model.remat full --accumulate 8 it fits: a step then needs 5.00 MB" in shown
    assert forecast_of(*words, "--model.remat", "full", "--accumulate", "8") == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "No flag makes a step smaller on this mesh: give more devices to fsdp" in shown


def test_errors_of_the_run_and_of_the_target_are_sentences(compiled_as, monkeypatch):
    compiled_as("say(error='rows do not divide')")
    with pytest.raises(UserError, match="rows do not divide"):
        forecast_of("gpt-micro", "--compile-for", "cpu:8")
    with pytest.raises(UserError, match=r"--mesh fsdp=4 is for 4 devices, but there are 8"):
        forecast_of("gpt-micro", "--mesh", "fsdp=4", "--compile-for", "cpu:8")
    with pytest.raises(UserError, match=r"--compile-for h100: A target is h100:8"):
        forecast_of("gpt-micro", "--compile-for", "h100")
    monkeypatch.setattr(targets, "_find", lambda module: False)
    with pytest.raises(UserError, match=r"pip install -e '\.\[tpu\]'"):
        forecast_of("gpt-micro", "--compile-for", "v5e:4x4")


def test_what_a_compiler_says_of_a_program_that_is_too_large():
    message = (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space"
        " hbm. Used 131.06G of 15.75G hbm. Exceeded hbm capacity by 115.31G."
    )
    assert programs.too_large(message) == int(131.06 * 2**30)
    assert programs.too_large("INTERNAL: something else") is None


def test_operations_that_a_function_asks_for():
    def f(x):
        y, _ = jax.lax.scan(lambda y, _: (y @ x, None), x, length=3)
        z = jax.lax.platform_dependent(y, tpu=lambda y: y @ y @ y, default=lambda y: y)
        return jax.lax.cond(z[0, 0] > 0, lambda: z, lambda: z @ z)

    jaxpr = jax.make_jaxpr(jax.checkpoint(f))(jnp.ones((8, 8))).jaxpr
    cube = 2 * 8**3
    assert even_share.operations(jaxpr, "cuda") == (3 + 1) * cube
    assert even_share.operations(jaxpr, "tpu") == (3 + 2 + 1) * cube
    loop = jax.make_jaxpr(lambda x: jax.lax.while_loop(lambda x: x[0, 0] > 0, lambda x: x @ x, x))
    with pytest.raises(ValueError, match="a loop of unknown length"):
        even_share.operations(loop(jnp.ones((8, 8))).jaxpr, "cpu")


needs_cuda_compiler = pytest.mark.skipif(
    targets.missing(targets.parse("h100:8")) is not None,
    reason="needs requirements/cuda-compiler.txt",
)


@needs_cuda_compiler
def test_figures_of_a_recipe_are_those_that_were_published(monkeypatch):
    """A compiler, a reader or a model that moves one by a tenth asks for new tables."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    record = json.loads((ROOT / "results/benchmarks/fit-llama-60m-h100-1.json").read_text())
    published = record["programs"]["train_step"]
    words = ["llama-60m", "--machine", "h100-1", "--compile-for", "h100:1"]
    target = targets.parse("h100:1")
    found = children.figures(words, ["train_step"], target, print)["train_step"]
    for name in ("flops", "even_flops", "peak_bytes", "temporary_bytes", "kernels", "attention_s"):
        assert found[name] == pytest.approx(published[name], rel=0.1), name
    for name, seconds in published["seconds"].items():
        assert found["seconds"][name] == pytest.approx(seconds, rel=0.1), name


@needs_cuda_compiler
def test_a_toy_is_compiled_for_eight_h100(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    path = tmp_path / "x.json"
    words = ["--mesh", "fsdp=8", "--compile-for", "h100:8", "--json", str(path)]
    assert main([*TOY, *words]) == 0
    record = json.loads(path.read_text())
    assert record["fits"] and 0 < record["estimate"]["mfu"] < record["estimate"]["mfu_hidden"] < 1
    assert 0 < record["estimate"]["optimizer_share"] < 1


@pytest.mark.parametrize(("waited", "step_s"), [(0.1, 1.1), (None, 1.5)])
def test_a_step_waits_as_long_as_its_program_says(waited, step_s):
    """A TPU's program does not say: it waits for every collective."""
    seconds = {"compute": 1.0, "collectives": 0.5}
    step = {"seconds": seconds, "waited_s": waited, "attention_s": 0.0, "optimizer_share": 0.0}
    config = command_line.parse(TOY)[0].config
    speed = estimate.speed(config, targets.parse("h100:8"), step)
    assert (speed["step_s"], speed["step_s_hidden"]) == (pytest.approx(step_s), 1.0)
    assert speed["mfu_hidden"] / speed["mfu"] == pytest.approx(step_s)


def test_a_compiling_process_has_the_flags_of_the_run(monkeypatch):
    """The command that starts it removes XLA_FLAGS."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    mesh = ["--mesh", "data=4,fsdp=4"]
    child(["train_step", *TOY, "--batch-size", "16", *mesh, "--compile-for", "cpu:8"])
    assert os.environ["XLA_FLAGS"] == sharding.BETWEEN_HOSTS
