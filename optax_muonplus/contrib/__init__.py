"""Optimizers to compare Muon+ with, QK-clip, a polar function for Hopper GPUs and a recorder.

A rule becomes an optimizer by ``omp.optimizer(omp.contrib.NorMuon(beta2=0.9), 0.02)``.
"""

from optax_muonplus.contrib._adamh import adamh as adamh
from optax_muonplus.contrib._adamuon import AdaMuon as AdaMuon
from optax_muonplus.contrib._aurora import Aurora as Aurora
from optax_muonplus.contrib._aurora import scale_by_aurora as scale_by_aurora
from optax_muonplus.contrib._hopper_polar import hopper_polar as hopper_polar
from optax_muonplus.contrib._hyperball import Hyperball as Hyperball
from optax_muonplus.contrib._hyperball import hyperball as hyperball
from optax_muonplus.contrib._hyperball import scale_by_muon as scale_by_muon
from optax_muonplus.contrib._mano import Mano as Mano
from optax_muonplus.contrib._muoneq import Balance as Balance
from optax_muonplus.contrib._muoneq import scale_by_muoneq as scale_by_muoneq
from optax_muonplus.contrib._normuon import NorMuon as NorMuon
from optax_muonplus.contrib._qk_clip import qk_clip as qk_clip
from optax_muonplus.contrib._recorder import Record as Record
from optax_muonplus.contrib._recorder import RecordState as RecordState
from optax_muonplus.contrib._recorder import read_record as read_record
from optax_muonplus.contrib._recorder import recorded as recorded
from optax_muonplus.contrib._turbo_muon import scale_by_turbo_muon as scale_by_turbo_muon
