"""Uses of a trained model: loading it, generating text, scoring texts, tasks of lm_eval."""
