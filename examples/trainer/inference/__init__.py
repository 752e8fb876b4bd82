"""Uses of a trained model: loading, text, scores of texts, tasks of lm_eval, exports."""
