"""How well a trained model predicts given tokens."""

import math
from collections.abc import Sequence

import numpy as np

from examples.trainer.data.placement import place_rows
from examples.trainer.inference.trained import TrainedModel
from examples.trainer.training import sharding

SHORTEST = 16  # tokens; shorter rows are padded to this, so that few lengths are compiled

Scores = tuple[np.ndarray, np.ndarray]
"""For each token of a row after the first: nats, and whether no other token was likelier."""


def score(model: TrainedModel, rows: Sequence[Sequence[int]], batch_size: int) -> list[Scores]:
    """The scores of rows of at most context + 1 tokens, in the order of the rows."""
    shards = sharding.shard_count(model.mesh, sharding.RULES["batch"])
    batch_size = -(-batch_size // shards) * shards
    # Rows of similar length form a batch, since a batch is as long as its longest row.
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    scores: list[Scores | None] = [None] * len(rows)
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        longest = max(len(rows[i]) for i in chosen) - 1
        length = min(max(SHORTEST, 2 ** math.ceil(math.log2(longest))), model.config.model.context)
        padded = np.zeros((batch_size, length + 1), np.int32)
        for line, i in zip(padded, chosen, strict=False):
            line[: len(rows[i])] = rows[i]
        inputs, targets = (
            place_rows(part, sharding.of_batch(model.mesh))
            for part in (padded[:, :-1], padded[:, 1:])
        )
        nats, hits = map(np.asarray, model.token_scores(model.params, inputs, targets))
        for line, i in enumerate(chosen):
            n = len(rows[i]) - 1
            scores[i] = nats[line, :n].astype(np.float64), hits[line, :n]
    return [one for one in scores if one is not None]


def windows(ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """Rows in which each token after the first is a target exactly once."""
    return [ids[start : start + context + 1] for start in range(0, len(ids) - 1, context)]
