"""Names that arguments have in other libraries, said where an optimizer is called with them.

:data:`NAMES` is the one table of them: messages are made of it, and so is the page on PyTorch.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, ParamSpec, TypeVar

from optax_muonplus.method import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")


class Name(NamedTuple):
    """What an argument is called in other libraries.

    Attributes:
      here: the argument of ``muonplus``; of several the first; or of a rule that has it.
      how: what to pass, as the end of a message; empty where the value is the same.
      torch: of ``torch.optim.Muon``. Several names are separated by spaces, here and below.
      code: of the published code of Muon and of Muon+.
      dion: of Microsoft's Dion.
      nvidia: of Emerging-Optimizers and Megatron.
      keras: of ``keras.optimizers.Muon``.
      jax: of ``optax.adamw``, Levanter, MaxText and other trainers.
    """

    here: str
    how: str = ""
    torch: str = ""
    code: str = ""
    dion: str = ""
    nvidia: str = ""
    keras: str = ""
    jax: str = ""


_RMS = "consistent_rms=0.2 for the size of AdamW's updates"
_BETAS = "two numbers here, adam_b1=0.9, adam_b2=0.95"
_HEADS = "muon_weight_dimension_numbers=omp.per_head(head_size) makes each head a matrix"
_RULES = "rules=[(pattern, None)] leaves parameters to AdamW, and embeddings are known by name"
_CLIP = "optax.chain(optax.clip_by_global_norm(1.0), optimizer) clips gradients"
_ROWS = "ns_coeffs takes a table's name, such as 'jordan', or rows of numbers"

NAMES = (
    Name("learning_rate", "", "lr", "lr muon_lr", "lr", "lr", "", "lr muon_lr matrix_lr"),
    Name("beta", "", "momentum", "momentum", "mu", "momentum momentum_beta muon_momentum",
         "momentum", "momentum muon_beta muon_momentum"),
    Name("nesterov", "", nvidia="use_nesterov muon_use_nesterov"),
    Name("ns_coeffs", _ROWS, "ns_coefficients", "", "", "coefficient_type muon_coefficient_type",
         "muon_a muon_b muon_c", "coefficients coefficient_type"),
    Name("ns_coeffs", "ns_coeffs='jordan' is 'Keller', 'you' is 'Jiacheng', and polar='svd' the"
         " exact factor", code="polar_method polar_args"),
    Name("ns_coeffs", "ns_coeffs='jordan', 'dion' or rows of polar_express(5); see the page on"
         " PyTorch and Dion", dion="use_polar_express"),
    Name("ns_steps", "", "", "backend_steps", "", "num_ns_steps muon_num_ns_steps", "",
         "backend_steps newton_schulz_steps steps"),
    Name("eps", "", "", "", "epsilon", "", "epsilon", "epsilon muon_epsilon muon_eps"),
    Name("weight_decay", "", "", "wd", "", "", "", "wd decay muon_weight_decay"),
    Name("cautious_weight_decay", "", dion="cautious_wd"),
    Name("weight_decay", "weight_decay is decoupled here, times the rate; for the rate-free one"
         " pass weight_decay=decay / rate", nvidia="weight_decay_method"),
    Name("weight_decay_mask", "", jax="mask"),
    Name("norm", "", code="norm_mode", jax="normalization normalize_mode"),
    Name("shape_scale", f"shape_scale='max' is 'original'; {_RMS} is 'match_rms_adamw'",
         torch="adjust_lr_fn"),
    Name("shape_scale", "shape_scale='spectral' is True, and 'none' False", code="rms_scaling"),
    Name("shape_scale", f"shape_scale='spectral' is 'spectral_norm'; {_RMS} is 'rms_norm'",
         dion="adjust_lr"),
    Name("shape_scale", "shape_scale='max' is 'shape_scaling', and 'spectral' 'unit_rms_norm';"
         " consistent_rms=1.0, or 0.2 with their extra factor 0.2, is 'spectral'",
         nvidia="scale_mode muon_scale_mode extra_scale_factor muon_extra_scale_factor"),
    Name("consistent_rms", "", keras="rms_rate", jax="muon_consistent_rms"),
    Name("consistent_rms", f"{_RMS} is True", jax="use_kimi_scaling"),
    Name("adaptive", "", code="nuclear_scaling"),
    Name("polar", "polar takes a function on arrays (*batch, out, in)", code="backend",
         dion="newton_schulz_func"),
    Name("polar", "polar='gram' is True, and 'auto' takes it where it is cheaper",
         dion="use_gram_newton_schulz"),
    Name("compute_dtype", "", jax="dtype"),
    Name("compute_dtype", "compute_dtype='bfloat16' or None", nvidia="fp32_matmul_prec"),
    Name("mu_dtype", "", jax="momentum_dtype"),
    Name("adam_learning_rate", "", code="adamw_lr", jax="adam_lr adamw_lr"),
    Name("adam_learning_rate", "adam_learning_rate is the rate itself, not its share of the"
         " matrices' rate", keras="adam_lr_ratio"),
    Name("adam_b1", "", keras="adam_beta_1", jax="b1 beta1 adamw_b1 adam_beta1"),
    Name("adam_b2", "", keras="adam_beta_2", jax="b2 beta2 adamw_b2 adam_beta2"),
    Name("adam_b1", _BETAS, code="adamw_betas", dion="betas", jax="adam_betas"),
    Name("adam_eps", "", code="adamw_eps", jax="adam_epsilon"),
    Name("adam_weight_decay", "", code="adamw_wd", jax="adamw_weight_decay"),
    Name("beta2", "NorMuon has it, omp.baselines.normuon(rate, NorMuon(beta2=0.95))",
         dion="muon_beta2"),
    Name("muon_weight_dimension_numbers", _HEADS, code="split_heads nheads", dion="num_heads",
         nvidia="split_qkv muon_split_qkv"),
    Name("muon_weight_dimension_numbers", "rules=[(pattern, omp.MatrixSpec(split_axis=...,"
         " split_sizes=...))] makes each block a matrix", dion="split_sizes"),
    Name("muon_weight_dimension_numbers", "", jax="weight_dimension_numbers dimension_numbers"),
    Name("rules", _RULES, keras="exclude_layers exclude_embeddings", code="adamw_params"),
    Name("rules", "kernels of convolutions are flattened to (out, rest) by their names, and others"
         " by rules=", dion="flatten"),
    Name("sharding", "sharding= takes where the parameters lie", dion="distributed_mesh"),
    Name("", _CLIP, keras="clipnorm clipvalue global_clipnorm", jax="max_grad_norm"),
)  # fmt: skip
LIBRARIES = {
    "torch": "PyTorch",
    "code": "code of Muon and Muon+",
    "dion": "Dion",
    "nvidia": "Emerging-Optimizers",
    "keras": "Keras",
    "jax": "Levanter, MaxText and others",
}


def elsewhere() -> Iterator[tuple[str, Name]]:
    """Gives each name of another library, with its row; the first row of a name is its own."""
    seen = set()
    for row in NAMES:
        for library in LIBRARIES:
            for name in getattr(row, library).split():
                if name not in seen:
                    seen.add(name)
                    yield name, row


ELSEWHERE = dict(elsewhere())
# Arguments of muonplus that its rivals lack, and what has the same effect.
_AROUND = {
    "state_sharding": "wrap the optimizer, omp.transforms.shard_state(optimizer, sharding, ...)",
    "cautious_weight_decay": "make a chain of its link and"
    " omp.transforms.add_decayed_weights(..., cautious=True)",
}


def says_names(rule: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Makes a decorator: the TypeError for an unknown keyword says what it is called here.

    Args:
      rule: what makes the argument ``link``, for the options that are in it.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        names = inspect.signature(function).parameters

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> T:
            for given in kwargs:
                if given not in names:
                    raise TypeError(
                        f"{checked.__name__}() has no argument {given}"
                        f"{_instead(given, names, rule)}"
                    )
            return function(*args, **kwargs)

        return checked

    return decorate


def _instead(given: str, names: Mapping[str, inspect.Parameter], rule: Any) -> str:
    row = ELSEWHERE.get(given, Name(given))
    if row.here in names and not row.how:
        return f": it is called {row.here} here."
    places = list(_places(given, row.here, names, rule))
    if len(places) > 1:
        return f": the rule's own is {places[0]}, and AdamW's {places[1]}."
    if places:
        where = places[0].partition("=")[0]
        return f": it is in {where} here, as in {places[0]}."
    how = row.how or ("" if given in names else _AROUND.get(row.here, ""))
    if how:
        return f": {how}."
    near = did_you_mean(given, names, 0.75)
    of_rule = " Options of the rule itself are in link." if "link" in names else ""
    return f".{near}" if near else f": it has {', '.join(names)}.{of_rule}"


def _places(
    given: str, here: str, names: Mapping[str, inspect.Parameter], rule: Any
) -> Iterator[str]:
    """Where an optimizer that takes values has an option: in its link, and in AdamW."""
    if "link" in names and rule is not None:
        for name in dict.fromkeys((given, here)):
            form = form_with(rule, name)
            if form:
                yield f"link={form}"
                break
    value = next((x for x in ("adamw", "others") if x in names), None)
    if value and here.startswith("adam_"):
        fields = ["b1", "b2"] if "betas" in given else [here.removeprefix("adam_")]
        yield f"{value}=omp.transforms.AdamW({', '.join(f'{x}=...' for x in fields)})"


def form_with(rule: Any, option: str) -> str:
    """How an option is passed to a rule, ``NorMuon(beta2=...)``; empty if it has none such."""
    options = options_of(rule)
    if option in options and not dataclasses.is_dataclass(options[option]):
        return f"{rule.__name__}({option}=...)"
    for name, value in options.items():
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) else ()
        if option in {x.name for x in fields}:
            return f"{rule.__name__}({name}={type(value).__name__}({option}=...))"
    return ""


def options_of(rule: Callable[..., Any]) -> dict[str, Any]:
    """The options of a rule, and their defaults."""
    parameters = inspect.signature(rule).parameters.items()
    return {name: p.default for name, p in parameters if p.default is not p.empty}
