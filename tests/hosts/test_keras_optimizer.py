"""What `keras_optimizer` refuses, without Keras; tests/hosts/test_keras.py runs it in Keras."""

import sys
import types

import pytest

import optax_muonplus as omp
from examples.hosts.keras_optimizer import keras_optimizer


def test_a_transformation_in_place_of_a_function_is_an_error():
    with pytest.raises(TypeError, match=r"function of the learning rate, as omp\.muonplus"):
        keras_optimizer(omp.muonplus(0.02), 0.02)


def test_keras_on_another_backend_is_an_error(monkeypatch):
    keras = types.ModuleType("keras")
    keras.backend = types.SimpleNamespace(backend=lambda: "tensorflow")
    monkeypatch.setitem(sys.modules, "keras", keras)
    with pytest.raises(RuntimeError, match=r"Keras runs on tensorflow, .* set KERAS_BACKEND=jax"):
        keras_optimizer(omp.muonplus, 0.02)
