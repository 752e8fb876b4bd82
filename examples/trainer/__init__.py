"""A trainer of language models: settings, models, data, the training step, runs, their uses."""
