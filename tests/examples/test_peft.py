"""Adapters that are written apart give the same logits in PEFT."""

import dataclasses

import jax
import numpy as np
import pytest

from examples.trainer.models import adapters
from examples.trainer.settings.model import LoRAConfig, without_adapters
from examples.trainer.system.errors import UserError
from examples.trainer.training.step import make_init_params
from examples.trainer.weights.export import write_adapters
from tests.support.hugging_face import GPT, LLAMA, TOKENS, V, logits, write

LORA = LoRAConfig(rank=3, alpha=6.0)
NETWORKS = {
    "gpt": dataclasses.replace(GPT, lora=LORA),
    "gpt stacked, some": dataclasses.replace(
        GPT, scan=True, tied=False, lora=dataclasses.replace(LORA, targets="attn")
    ),
    "llama grouped": dataclasses.replace(LLAMA, n_kv_head=2, lora=LORA),
    "llama stacked, fused": dataclasses.replace(LLAMA, scan=True, qkv="fused", lora=LORA),
}


def params_of(config):
    """Random parameters, of which no B is zero."""
    params = make_init_params(config, V)(0)
    keys = iter(jax.random.split(jax.random.key(1), 100))
    return jax.tree.map(lambda x: x + 0.2 * jax.random.normal(next(keys), x.shape), params)


def base_of(params):
    """The parameters as they were before adapters."""
    if not isinstance(params, dict):
        return params
    own = {name: x for name, x in params.items() if name not in (adapters.A, adapters.B)}
    return {name: base_of(x) for name, x in own.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT calls what transformers renames
@pytest.mark.parametrize("config", NETWORKS.values(), ids=NETWORKS)
def test_peft_computes_the_same(config, tmp_path):
    torch = pytest.importorskip("torch")
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    params = params_of(config)
    write(tmp_path / "base", without_adapters(config), base_of(params))
    base = str(tmp_path / "base")
    write_adapters(tmp_path / "apart", params, config, base, "float32", False)
    model = transformers.AutoModelForCausalLM.from_pretrained(base)
    tokens = torch.tensor(TOKENS, dtype=torch.long)
    with torch.no_grad():
        plain = model.eval()(tokens).logits.numpy()
        adapted = peft.PeftModel.from_pretrained(model, tmp_path / "apart").eval()
        found = adapted(tokens).logits.numpy()
    np.testing.assert_allclose(found, logits(config, params), atol=1e-4)
    assert np.abs(found - plain).max() > 1e-2


def test_refuses_three_adapters_for_one_layer(tmp_path):
    config = dataclasses.replace(GPT, qkv="separate", lora=LORA)
    with pytest.raises(UserError, match="GPT-2 has one layer"):
        write_adapters(tmp_path / "x", params_of(config), config, "base", "float32", False)
    assert not (tmp_path / "x").exists()
