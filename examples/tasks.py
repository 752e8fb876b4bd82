"""Zero-shot tasks of a trained model: `python -m examples.tasks runs/NAME`.

The questions, prompts and measures are those of EleutherAI's lm_eval, which
`pip install -r requirements/eval.txt` installs. By default they are the
seven tasks of the paper's table "Downstream evaluation results".
"""

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from tqdm import tqdm

from examples.trainer.data.tokenizer import end_id, ids_of
from examples.trainer.models import sharding
from examples.trainer.runs import trained
from examples.trainer.runs.trained import CheckpointRef, Sampling, TrainedModel, sample_ids
from examples.trainer.system.errors import UserError, command
from examples.trainer.system.files import write_atomically

try:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
    from lm_eval.utils import make_table
except ImportError as error:
    sys.exit(f"error: {error}: pip install -r requirements/eval.txt")

PAPER = ("openbookqa", "hellaswag", "arc_easy", "wsc", "winogrande", "boolq", "piqa")
LONGEST_ANSWER = 256  # tokens, for generation tasks that set no limit
SHORTEST = 16  # tokens; shorter rows are padded to this, so that few lengths are compiled

Request = tuple[tuple[str, str], list[int], list[int]]
RowScores = tuple[np.ndarray, np.ndarray]
"""For each token of a row after the first: nats, and whether no other token was likelier."""


def evaluate(
    checkpoint: Annotated[CheckpointRef, tyro.conf.arg(name="")],
    tasks: tuple[str, ...] = PAPER,
    include: Path | None = None,
    limit: int | None = None,
    batch_size: int = 16,
) -> str:
    """Evaluates a trained model on tasks, and writes `tasks.json` into its run.

    Args:
      checkpoint: the model.
      tasks: tasks of lm_eval or your own; their data is downloaded.
      include: a folder with task files (.yaml) of your own.
      limit: number of questions of each task; all by default.
      batch_size: number of answers at a time.
    """
    manager = TaskManager(include_path=str(include) if include else None)
    if unknown := [name for name in tasks if name not in manager.all_tasks]:
        raise UserError(
            f"there is no task {', '.join(unknown)}: `lm_eval ls tasks` lists those of lm_eval, "
            "and --include names a folder with others."
        )
    model = trained.load(checkpoint)
    found: Any = simple_evaluate(
        JaxLM(model, batch_size),
        tasks=list(tasks),
        num_fewshot=0,
        limit=limit,
        task_manager=manager,
    )
    kept = {"step": model.step, "limit": limit, "results": found["results"]}
    write_atomically(
        checkpoint.run / "tasks.json", json.dumps(kept, indent=2, default=str).encode()
    )
    return make_table(found)


class JaxLM(TemplateLM):
    """A model for lm_eval; every text begins with the token that starts a document."""

    def __init__(self, model: TrainedModel, batch_size: int):
        super().__init__()
        self.model = model
        shards = sharding.shard_count(model.mesh, sharding.RULES["batch"])
        self.batch_size = -(-batch_size // shards) * shards
        self.context = model.config.model.context
        everywhere = sharding.replicated(model.mesh)
        self.token_scores = jax.jit(self.scores_of_tokens, out_shardings=everywhere)

    @property
    def eot_token_id(self) -> int:
        """The token that starts a document."""
        return end_id(self.model.tokenizer)

    def scores_of_tokens(
        self, params: optax.Params, inputs: jax.Array, targets: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Nats of targets (B, T), and whether no other token was likelier."""
        logits = self.model.forward(params, inputs)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        wanted = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return nats, wanted >= logits.max(axis=-1)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        """Ids of a text, after the token that starts a document unless that is switched off."""
        start = [] if add_special_tokens is False else [self.eot_token_id]
        return [*start, *ids_of(self.model.tokenizer, [string])[0]]

    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Log-probability of each continuation, and whether greedy decoding would give it."""
        if (longest := max(len(after) for *_, after in requests)) > self.context:
            raise UserError(
                f"a task has an answer of {longest} tokens, and the model sees {self.context}: "
                "leave the task out, or train with a larger --model.context."
            )
        # Of a question that is longer than the context, the end is kept.
        rows = [[*before, *after][-(self.context + 1) :] for _, before, after in requests]
        scores = self.score(rows, disable_tqdm)
        return [
            (-float(nats[-len(after) :].sum()), bool(hits[-len(after) :].all()))
            for (nats, hits), (*_, after) in zip(scores, requests, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's context."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm, desc="scoring"):
            ids = self.tok_encode(request.args[0])
            scores = self.score(windows(ids, self.context))
            totals.append(-float(np.sum([nats.sum() for nats, _ in scores])))
        return totals

    def score(self, rows: Sequence[Sequence[int]], disable_tqdm: bool = True) -> list[RowScores]:
        """The scores of rows of at most context + 1 tokens, in the order of the rows."""
        # Rows of similar length form a batch, since a batch is as long as its longest row.
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        starts = range(0, len(order), self.batch_size)
        scores: dict[int, RowScores] = {}
        for start in tqdm(starts, disable=disable_tqdm, desc="scoring"):
            chosen = order[start : start + self.batch_size]
            found = self.score_batch([rows[i] for i in chosen])
            scores |= dict(zip(chosen, found, strict=True))
        return [scores[i] for i in range(len(rows))]

    def score_batch(self, rows: Sequence[Sequence[int]]) -> list[RowScores]:
        """The scores of at most as many rows as a batch has, padded to a common length."""
        longest = max(map(len, rows)) - 1
        length = min(max(SHORTEST, 2 ** math.ceil(math.log2(longest))), self.context)
        padded = np.zeros((self.batch_size, length + 1), np.int32)
        for line, row in zip(padded, rows, strict=False):
            line[: len(row)] = row
        place = sharding.of_batch(self.model.mesh)
        inputs, targets = jax.device_put((padded[:, :-1], padded[:, 1:]), place)
        nats, hits = map(np.asarray, self.token_scores(self.model.params, inputs, targets))
        sizes = [len(row) - 1 for row in rows]
        return [(nats[i, :n].astype(np.float64), hits[i, :n]) for i, n in enumerate(sizes)]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """The greedy continuation of each text, up to the first of the task's stop strings."""
        written = []
        for request in tqdm(requests, disable=disable_tqdm, desc="writing"):
            text, options = request.args
            new = sample_ids(
                self.model.forward,
                self.model.params,
                self.tok_encode(text),
                int(options.get("max_gen_toks", LONGEST_ANSWER)),
                self.model.config.model,
                self.model.key(0),
                Sampling(temperature=0.0),
            )
            if self.eot_token_id in new:
                new = new[: new.index(self.eot_token_id)]
            answer = self.model.tokenizer.decode(new)
            ends = options.get("until", [])
            for end in [ends] if isinstance(ends, str) else ends:
                answer = answer.split(end)[0] if end else answer
            written.append(answer)
        return written


def windows(ids: Sequence[int], context: int) -> list[Sequence[int]]:
    """Rows in which each token after the first is a target exactly once."""
    return [ids[start : start + context + 1] for start in range(0, len(ids) - 1, context)]


main = command(evaluate, "examples.tasks")

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
