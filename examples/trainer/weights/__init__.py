"""Weights in Hugging Face's form: safetensors files, read by array and written in shards."""
