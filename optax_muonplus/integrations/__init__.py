"""Entries for hosts that want more than a transformation of Optax, each imported by its use."""

from optax_muonplus.integrations._keras import keras_optimizer as keras_optimizer
