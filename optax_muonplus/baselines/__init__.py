"""The optimizers that Muon+ is compared with, in its form: same partition, same keywords."""

from optax_muonplus.baselines._adamuon import adamuon as adamuon
from optax_muonplus.baselines._adamuon import scale_by_adamuon as scale_by_adamuon
from optax_muonplus.baselines._mano import mano as mano
from optax_muonplus.baselines._mano import scale_by_mano as scale_by_mano
from optax_muonplus.baselines._normuon import normuon as normuon
from optax_muonplus.baselines._normuon import scale_by_normuon as scale_by_normuon
from optax_muonplus.baselines._turbo_muon import turbo_muon as turbo_muon
