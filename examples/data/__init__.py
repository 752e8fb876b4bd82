"""Text to batches: which documents, which tokenizer, which rows."""
