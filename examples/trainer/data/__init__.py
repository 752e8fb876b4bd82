"""Data: from documents and a tokenizer to batches on devices."""
