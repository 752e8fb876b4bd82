"""A cache of compiled programs on disk."""

import os

import jax

from examples.trainer.data.token_folder import cache_folder


def keep_compiled_programs() -> None:
    """Stores compiled programs, so that later processes can load them."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "xla"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
