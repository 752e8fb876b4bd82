"""For hosts that want more than a transformation of Optax. Each is imported when it is used."""

from optax_muonplus.integrations._keras import keras_optimizer as keras_optimizer
