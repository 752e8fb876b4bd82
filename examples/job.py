"""A configuration and its text, put together to the functions that a run calls."""

from collections.abc import Callable
from dataclasses import dataclass

import optax

from examples import optimizers
from examples.config import RunConfig
from examples.data.loader import Loader
from examples.data.prepare import Dataset
from examples.errors import UserError
from examples.evaluate import Evaluation, make_evaluate
from examples.training import Apply, TrainState, TrainStep, make_apply, make_init, make_train_step


@dataclass(frozen=True)
class Job:
    """Everything about a run but where it is kept and how far it is; holds no arrays."""

    config: RunConfig
    dataset: Dataset
    loader: Loader
    apply: Apply
    init: Callable[[], TrainState]
    train_step: TrainStep
    evaluate: Callable[[optax.Params], Evaluation]


def assemble(config: RunConfig, dataset: Dataset) -> Job:
    """The parts of a run; raises `UserError` if the text is too short for them."""
    loader = Loader(dataset.train.ids, config.model.context, config.batch_size, config.seed)
    if loader.n_windows < config.batch_size:
        raise UserError(
            f"too little training text: {dataset.train.meta.tokens} tokens, and a batch needs "
            f"{config.batch_size} x {config.model.context}. Give more text, or a smaller "
            "--batch-size or --model.context."
        )
    vocab_size = dataset.tokenizer.get_vocab_size()
    apply = make_apply(config, vocab_size)
    optimizer = optimizers.build(config.optimizer, config.steps)
    return Job(
        config=config,
        dataset=dataset,
        loader=loader,
        apply=apply,
        init=make_init(config, vocab_size, optimizer),
        train_step=make_train_step(apply, optimizer),
        evaluate=make_evaluate(apply, config, dataset.val),
    )
