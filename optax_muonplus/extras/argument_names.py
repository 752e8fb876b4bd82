"""Maps argument names of other libraries to ours, for the error about an unknown keyword.

:data:`NAMES` is the one table of them: messages are made of it, and so is the page on PyTorch.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

from optax_muonplus.method import did_you_mean

P = ParamSpec("P")
T = TypeVar("T")
LIBRARIES = {
    "torch": "PyTorch",  # torch.optim.Muon
    "code": "code of Muon and Muon+",  # the published one
    "dion": "Dion",  # Microsoft's
    "nvidia": "Emerging-Optimizers",  # and Megatron
    "keras": "Keras",  # keras.optimizers.Muon
    "jax": "Levanter, MaxText and others",  # optax.adamw among them
}


class Name(NamedTuple):
    """An argument, and its names in other libraries."""

    here: str  # an argument of muonplus, or of a rule; of several arguments the first
    how: str  # what to pass, as the end of a message; empty where the value is the same
    elsewhere: Mapping[str, Sequence[str]]  # by library


# An argument here, what to pass if the value is another (behind =), and its names by library. A
# line that begins with spaces goes on with the row before it.
_TABLE = """\
learning_rate | torch: lr | code: lr muon_lr | dion: lr | nvidia: lr | jax: lr muon_lr matrix_lr
beta | torch: momentum | code: momentum | dion: mu | nvidia: momentum momentum_beta muon_momentum |
  keras: momentum | jax: momentum muon_beta muon_momentum
nesterov | nvidia: use_nesterov muon_use_nesterov
ns_coeffs = ns_coeffs takes a table's name, such as 'jordan', or rows of numbers | torch:
  ns_coefficients | nvidia: coefficient_type muon_coefficient_type | keras: muon_a muon_b muon_c |
  jax: coefficients coefficient_type
ns_coeffs = ns_coeffs='jordan' is 'Keller', 'you' is 'Jiacheng', and polar='svd' the exact factor |
  code: polar_method polar_args
ns_coeffs = ns_coeffs='jordan', 'dion' or rows of polar_express(5); see the page on PyTorch and
  Dion | dion: use_polar_express
ns_steps | code: backend_steps | nvidia: num_ns_steps muon_num_ns_steps | jax: backend_steps
  newton_schulz_steps steps
eps | dion: epsilon | keras: epsilon | jax: epsilon muon_epsilon muon_eps
weight_decay | code: wd | jax: wd decay muon_weight_decay
cautious_weight_decay | dion: cautious_wd
weight_decay = weight_decay is decoupled here, times the rate; for the rate-free one pass
  weight_decay=decay / rate | nvidia: weight_decay_method
weight_decay_mask | jax: mask
norm | code: norm_mode | jax: normalization normalize_mode
shape_scale = shape_scale='max' is 'original'; consistent_rms=0.2 for the size of AdamW's updates
  is 'match_rms_adamw' | torch: adjust_lr_fn
shape_scale = shape_scale='spectral' is True, and 'none' False | code: rms_scaling
shape_scale = shape_scale='spectral' is 'spectral_norm'; consistent_rms=0.2 for the size of AdamW's
  updates is 'rms_norm' | dion: adjust_lr
shape_scale = shape_scale='max' is 'shape_scaling', and 'spectral' 'unit_rms_norm';
  consistent_rms=1.0, or 0.2 with their extra factor 0.2, is 'spectral' | nvidia: scale_mode
  muon_scale_mode extra_scale_factor muon_extra_scale_factor
consistent_rms | keras: rms_rate | jax: muon_consistent_rms
consistent_rms = consistent_rms=0.2 for the size of AdamW's updates is True | jax: use_kimi_scaling
adaptive | code: nuclear_scaling
polar = polar takes a function on arrays (*batch, out, in) | code: backend | dion:
  newton_schulz_func
polar = polar='gram' is True, and 'auto' takes it where it is cheaper | dion:
  use_gram_newton_schulz
compute_dtype | jax: dtype
compute_dtype = compute_dtype='bfloat16' or None | nvidia: fp32_matmul_prec
mu_dtype | jax: momentum_dtype
adam_learning_rate | code: adamw_lr | jax: adam_lr adamw_lr
adam_learning_rate = adam_learning_rate is the rate itself, not its share of the matrices' rate |
  keras: adam_lr_ratio
adam_b1 | keras: adam_beta_1 | jax: b1 beta1 adamw_b1 adam_beta1
adam_b2 | keras: adam_beta_2 | jax: b2 beta2 adamw_b2 adam_beta2
adam_b1 = two numbers here, adam_b1=0.9, adam_b2=0.95 | code: adamw_betas | dion: betas | jax:
  adam_betas
adam_eps | code: adamw_eps | jax: adam_epsilon
adam_weight_decay | code: adamw_wd | jax: adamw_weight_decay
beta2 = NorMuon has it, omp.baselines.normuon(rate, beta2=0.95) | dion: muon_beta2
muon_weight_dimension_numbers = muon_weight_dimension_numbers=omp.per_head(head_size) makes each
  head a matrix | code: split_heads nheads | dion: num_heads | nvidia: split_qkv muon_split_qkv
muon_weight_dimension_numbers = rules=[(pattern, omp.MatrixSpec(split_axis=..., split_sizes=...))]
  makes each block a matrix | dion: split_sizes
muon_weight_dimension_numbers | jax: weight_dimension_numbers dimension_numbers
rules = rules=[(pattern, None)] leaves parameters to AdamW, and embeddings are known by name |
  code: adamw_params | keras: exclude_layers exclude_embeddings
rules = kernels of convolutions are flattened to (out, rest) by their names, and others by rules= |
  dion: flatten
sharding = sharding= takes where the parameters lie | dion: distributed_mesh
= optax.chain(optax.clip_by_global_norm(1.0), optimizer) clips gradients | keras: clipnorm
  clipvalue global_clipnorm | jax: max_grad_norm
"""


def _rows() -> Iterator[Name]:
    for row in _TABLE.replace("\n  ", " ").splitlines():
        argument, *cells = row.split(" | ")
        here, _, how = argument.partition("= ")
        pairs = (cell.split(": ") for cell in cells)
        yield Name(here.strip(), how, {library: names.split() for library, names in pairs})


NAMES = tuple(_rows())
# By each name of another library, its row; the first one has precedence.
ALIASES = {
    name: row
    for row in reversed(NAMES)
    for library in reversed(LIBRARIES)
    for name in row.elsewhere.get(library, ())
}
# Arguments of muonplus that its rivals lack, and what has the same effect.
_AROUND = {
    "state_sharding": "wrap the optimizer, omp.transforms.shard_state(optimizer, sharding, ...)",
    "cautious_weight_decay": "make a chain of its link and"
    " omp.transforms.add_decayed_weights(..., cautious=True)",
}


def suggest_argument_names(function: Callable[P, T]) -> Callable[P, T]:
    """Makes an unknown keyword of a function raise a TypeError that names our equivalent."""
    names = inspect.signature(function).parameters

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        check_argument_names(checked.__name__, kwargs, names)
        return function(*args, **kwargs)

    return checked


def check_argument_names(function: str, given: Iterable[str], names: Iterable[str]) -> None:
    """Raises TypeError for a keyword that ``function``, which takes ``names``, does not have."""
    for name in given:
        if name not in names:
            raise TypeError(f"{function}() has no argument {name}{_instead(name, list(names))}")


def _instead(given: str, names: Sequence[str]) -> str:
    row = ALIASES.get(given, Name(given, "", {}))
    if row.here in names and not row.how:
        own = ", and that of the rule beta2" * (given == "b2" and "beta2" in names)
        return f": it is called {row.here} here{own}."
    if "others" in names and row.here.startswith("adam_"):
        fields = ["b1", "b2"] if "betas" in given else [row.here.removeprefix("adam_")]
        options = ", ".join(f"{x}=..." for x in fields)
        return f": AdamW has it, as in others=omp.transforms.AdamW({options})."
    if how := row.how or _AROUND.get(row.here, ""):
        return f": {how}."
    near = did_you_mean(given, names, 0.75)
    return f".{near}" if near else f": it has {', '.join(names)}."


def options_of(rule: Callable[..., Any]) -> dict[str, Any]:
    """Returns the options of a rule, and their defaults."""
    parameters = inspect.signature(rule).parameters.items()
    return {name: p.default for name, p in parameters if p.default is not p.empty}
