"""Lists of rules for ``rules=``, for projects whose names have another meaning elsewhere.

Your own rules go before or after: ``rules=[("torso", None), *omp.rules.AGENTS]``. Listed rules may
match nothing.
"""

from optax_muonplus._params.language import PathRule as _PathRule
from optax_muonplus._params.language import adamw as _adamw
from optax_muonplus._params.language import matrix as _matrix
from optax_muonplus._params.neighbours import is_alone as _is_alone
from optax_muonplus._params.neighbours import is_outermost as _is_outermost
from optax_muonplus._params.table import COUNTER as _COUNTER
from optax_muonplus._params.table import LEAF as _LEAF
from optax_muonplus._params.table import TOP as _TOP

# Names of networks in reinforcement learning, of their parts and of their outputs.
_NET = r"(_?(net(work)?|function|fn|mlp|model|params|head))"
_ROLE = "(actor|critic|policy|advantage)"
_AGENT = (
    rf"^(?!**(att|extractor))(**/)?((*_)?{_ROLE}{_NET}?|action{_NET}|value{_NET}?|pi|[qv]f"
    rf"|[qv]({_NET}|_?\d)){_COUNTER}"
    r"(/(~|params|mlp|net(work)?|layers|body|trunk|torso)){0,}"
)
_OUTPUT = (
    r"(out(put)?s?|logits?|means?|mu|loc|log_?std|values?|final|last)"
    r"(_(layer|linear|dense|fc|proj))?"
)
_HEAD = "head of an actor or critic"

AGENTS: tuple[_PathRule, ...] = (
    _adamw(
        rf"{_TOP}(value|advantage){_COUNTER}/(kernel|w|weight)"
        rf"|((*_)?{_ROLE}{_NET}?|(value|action|[qv]f?){_NET}|v_head/summary){_COUNTER}{_LEAF}"
        rf"|(*_)?({_ROLE}|value|action|reward|[qv]f?)_?{_OUTPUT}{_COUNTER}{_LEAF}",
        _HEAD,
        condition=_is_outermost,
    ),
    _adamw(rf"(?i){_AGENT}/{_OUTPUT}{_LEAF}", _HEAD, condition=_is_outermost),
)
"""Output layers of actors and critics get AdamW: Stoix, Mava, CleanRL, openpi, DreamerV3,
Stable-Baselines3, TRL. They are found by name. A numbered last layer needs its own rule:
``("actor/Dense_2", None)``."""

MAXTEXT: tuple[_PathRule, ...] = (
    _matrix(
        r"(?i)(moe_?block(_\d+)?|routed_experts|gptossmlp)/(wi(_\d)?|wo)",
        "experts: expert, in, out",
        "MaxText",
    ),
    _matrix("qkv_proj/kernel", "attention: in, part, (heads head)", "MaxText"),
)
"""MaxText's experts and fused attention, whose arrays have the names of modules elsewhere.
With scanned layers also pass ``layer_axes={"layers": 1}``."""

_ATTENTION = r"(*_)?(att(entio)?n|mha|kda|delta_?net)(_*|\d+)?/(*/)?"
_IN_FEED_FORWARD = r"(*moe*|*mlp*|ffn*|*feed_?forward*|*experts)"

MOE: tuple[_PathRule, ...] = (
    _adamw(rf"(?i)(*_)?router(_*)?{_COUNTER}(/*)?{_LEAF}", "router"),
    _adamw(rf"(?i){_IN_FEED_FORWARD}{_COUNTER}/gate{_LEAF}", "router", condition=_is_alone),
    _adamw(rf"(?i)(*_)?shared_expert_gate{_LEAF}", "gate of a shared expert"),
    _adamw(
        rf"(?i){_ATTENTION}(in_proj_z|g_proj|(o(ut(put)?)?_)?gate(_proj)?){_LEAF}", "output gate"
    ),
    _adamw(rf"(?i)in_proj_(a|b|ba){_LEAF}", "a number for each head"),
    _adamw(rf"input_mix_weight_(down|up){_LEAF}", "low-rank map", library="Qwen"),
    _adamw(rf"block_inject_weight{_LEAF}", "a number for each branch", library="Qwen"),
)
"""AdamW for what Qwen3.8-Flash-Next (arXiv:2608.30320, section 3.1) keeps off Muon: routers, output
gates of attention, and the low-rank maps of its residual stream. A router named ``gate`` is
distinguished from a feed-forward gate by its neighbours. DeepSeek-V4 trains routers with Muon."""
