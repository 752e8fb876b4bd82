"""Names of attention layers: every regular expression with them is in this file."""

import functools
import re

# Layers whose kernels may have an axis of heads, in MaxText, tunix and Keras.
QUERY = r"((q|query)(_proj|_projection)?|wq|wq_b)"
QKV = r"(([qkv]|query|key|value)(_proj|_projection)?|w[qkv]|wq_b|wkv_b)"
OUT = r"(o|out|wo|o_proj|(attn_)?out_proj|attention_output)"
# Layers of attention and gates: an output or a value beside one of them is not a head.
INNER = (
    r"((w|to)?_?([qk]|qkv|kv|quer(y|ies)|keys?|query_key_value|key_value|gate_up|gate|up|down)"
    r"(_?(proj(ection)?|layer|linear|dense|lin|attn))?|c_attn|in_proj_weight)"
)
# Ends of paths that are probably of attention, for a suggestion.
LIKELY_QKV = r"(?i)(^|[/_])(w|to_)?(qkv|kv|[qkv]|query|key|value)(_proj(ection)?)?(/\w+)?$"
LIKELY_OUT = (
    r"(?i)^(?!.*(expert|moe)).*\b(o|out|(attn_)?o(ut)?_proj(ection)?|attention_output)(/\w+)?$"
)

_SUFFIX = r"(_?(proj(ection)?|einsum|attn|lin|dense))?"
_PREFIX = "(w_?|to_|c_|linear_)"
# By what a layer computes. In latent attention (MLA) only up-projections have heads.
_LAYERS = {
    "query": rf"(q|query){_SUFFIX}|({_PREFIX}|in_proj_)q|q_proj_weight",
    "latent query": r"wq_b|q_b_proj|q_up(_proj)?|w_?uq",
    "query, key, value": rf"(qkv|query_key_value){_SUFFIX}|({_PREFIX}|in_proj_)qkv"
    r"|c_attn|in_proj_weight",
    "key": rf"(k|key){_SUFFIX}|{_PREFIX}k|k_proj_weight",
    "latent key": r"k_up(_proj)?|w_?uk",
    "value": rf"(v|value){_SUFFIX}|{_PREFIX}v|v_proj_weight",
    "latent value": r"v_up(_proj)?|w_?uv",
    "key, value": rf"(kv|key_value){_SUFFIX}|{_PREFIX}kv",
    "latent key, value": r"wkv_b|kv_b_proj|kv_up(_proj)?|w_?ukv",
    "output": rf"(o|out|output){_SUFFIX}|attention_output|(w_?|to_|linear_)(o|out)",
}


@functools.lru_cache(maxsize=4096)
def attention_layer(name: str) -> tuple[str, str] | None:
    """Reads the name of a weight: which module of attention it is in, and what its layer computes.

    Args:
      name: a path, such as ``"blocks/0/attn/q_proj/kernel"``.

    Returns:
      The path of the module, ``"blocks/0/attn"``, and ``"query"``, ``"key"``, ``"value"``,
      ``"key, value"``, ``"query, key, value"`` or ``"output"``, after ``"latent "`` for the
      up-projections of latent attention. None for any other layer.
    """
    for outputs, layers in _LAYERS.items():
        if found := re.match(rf"(?i)((?:.*/)?)({layers})(/(kernel|w|weight))?$", name):
            return found[1].rstrip("/"), outputs
    return None
