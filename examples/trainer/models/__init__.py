"""Transformers, their attention, adapters and state dicts, and sampling from them."""
