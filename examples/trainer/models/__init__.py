"""Transformers, their attention and state dicts, and sampling from them."""
