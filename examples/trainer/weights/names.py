"""The names of Hugging Face's arrays, to those of the state dicts that the trainer reads.

They are the same but for GPT-2's linear layers, which are (in, out), for the prefix, which files of
a network without a head lack, and for buffers that are no parameters, in files of older versions.
"""

import re
from collections.abc import Mapping
from typing import Any

from examples.trainer.models.published_names import Family
from examples.trainer.models.state_dict import HEAD
from examples.trainer.settings.model import ModelConfig
from examples.trainer.weights.tensors import Tensor

PREFIXES = {"gpt": "transformer.", "llama": "model."}
BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
POSITIONS = "transformer.wpe.weight"


def is_transposed(name: str, family: Family) -> bool:
    """Whether Hugging Face has a matrix as (in, out)."""
    return family == "gpt" and re.search(r"\.(c_attn|c_proj|c_fc)\.weight$", name) is not None


def published(found: Mapping[str, tuple[Any, Any]], config: ModelConfig) -> dict[str, Tensor]:
    """The state dict of the paper's names: of each name, its file to read it from when needed.

    A GPT with a shorter context than that of the file has the first of its positions.
    """
    prefix = PREFIXES[config.family]
    tensors = {}
    for name, (path, file) in found.items():
        if BUFFERS.search(name):
            continue
        full = name if name == HEAD or name.startswith(prefix) else prefix + name
        rows = config.context if full == POSITIONS else None
        tensors[full] = Tensor(path, file, name, is_transposed(full, config.family), rows)
    return tensors
