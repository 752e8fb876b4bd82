"""What the compiler is asked to do, and the communication in the programs that it makes."""

import contextlib
import re

import jax
import jax.monitoring

COLLECTIVE = (
    r" = (.*?) (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\("
)


def collectives(compiled):
    """The kinds of collectives in a compiled program, in order."""
    return [kind for _, kind in re.findall(COLLECTIVE, compiled.as_text())]


@contextlib.contextmanager
def compilations():
    """A list that gets one entry for each compilation inside the block."""
    found = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: found.append(event) if "backend_compile" in event else None
    )
    try:
        yield found
    finally:
        jax.monitoring.clear_event_listeners()
