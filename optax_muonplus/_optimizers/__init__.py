"""Muon+ and Muon for whole models, and the table that says what each parameter gets."""

from optax_muonplus._optimizers.describe import describe as describe
from optax_muonplus._optimizers.muon import muon as muon
from optax_muonplus._optimizers.muonplus import muonplus as muonplus
