"""A trained model with the interface of EleutherAI's lm_eval; needs `requirements/eval.txt`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from lm_eval import simple_evaluate
from lm_eval.api.model import TemplateLM
from lm_eval.tasks import TaskManager
from lm_eval.utils import make_table
from tqdm import tqdm

from examples.trainer.data.tokenizer import end_id, ids_of
from examples.trainer.inference.trained import TrainedModel, score, windows
from examples.trainer.models.sampling import Sampling, sample_ids
from examples.trainer.system.errors import UserError

PART = 64  # batches between updates of the progress bar
LONGEST_ANSWER = 256  # tokens, for generation tasks that set no limit

Request = tuple[tuple[str, str], list[int], list[int]]


class JaxLM(TemplateLM):
    """A model for lm_eval; every text begins with the token that starts a document."""

    def __init__(self, model: TrainedModel, batch_size: int):
        super().__init__()
        self.model = model
        self.batch_size = batch_size
        self.context = model.config.model.context

    @property
    def eot_token_id(self) -> int:
        return end_id(self.model.tokenizer)

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
        rows, sizes = [], []
        for _, before, after in requests:
            if len(after) > self.context:
                raise UserError(
                    f"a task has an answer of {len(after)} tokens, and the model sees "
                    f"{self.context}: leave the task out, or train with a larger --model.context."
                )
            # Of a question that is longer than the context, the end is kept.
            rows.append([*before, *after][-(self.context + 1) :])
            sizes.append(len(after))
        answers = []
        step = PART * self.batch_size
        for start in tqdm(range(0, len(rows), step), disable=disable_tqdm, desc="scoring"):
            part = slice(start, start + step)
            scores = score(self.model, rows[part], self.batch_size)
            for (nats, hits), size in zip(scores, sizes[part], strict=True):
                answers.append((-float(nats[-size:].sum()), bool(hits[-size:].all())))
        return answers

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-probability of whole texts, in windows of the model's context."""
        totals = []
        for request in tqdm(requests, disable=disable_tqdm, desc="scoring"):
            ids = self.tok_encode(request.args[0])
            scores = score(self.model, windows(ids, self.context), self.batch_size)
            totals.append(-float(np.sum([nats.sum() for nats, _ in scores])))
        return totals

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


def find(tasks: Sequence[str], include: str | None) -> TaskManager:
    """The tasks of lm_eval and of a folder; raises `UserError` for an unknown name."""
    manager = TaskManager(include_path=include)
    unknown = [name for name in tasks if name not in manager.all_tasks]
    if unknown or not tasks:
        raise UserError(
            f"there is no task {', '.join(unknown) or 'given'}: `lm_eval ls tasks` lists those of "
            "lm_eval, and --include names a folder with others."
        )
    return manager


def ask(
    model: JaxLM, tasks: Sequence[str], manager: TaskManager, limit: int | None
) -> tuple[dict[str, Any], str]:
    try:
        results = simple_evaluate(
            model, tasks=list(tasks), num_fewshot=0, limit=limit, task_manager=manager
        )
    except (OSError, ConnectionError) as error:
        raise UserError(
            f"the data of a task cannot be read: {error}. Without a network, give tasks of your "
            "own with --include and --tasks, or fill the cache of Hugging Face (HF_HOME) on a "
            "machine that has one."
        ) from None
    if results is None:
        raise UserError("lm_eval returned nothing, as it does in all processes but the first.")
    return dict(results)["results"], make_table(results)
