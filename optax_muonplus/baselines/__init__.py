"""The optimizers that Muon+ is compared with, with the same partition, and their links."""

from optax_muonplus.baselines._adamh import AdamH as AdamH
from optax_muonplus.baselines._adamuon import AdaMuon as AdaMuon
from optax_muonplus.baselines._adamuon import adamuon as adamuon
from optax_muonplus.baselines._aurora import Aurora as Aurora
from optax_muonplus.baselines._aurora import aurora as aurora
from optax_muonplus.baselines._aurora import scale_by_aurora as scale_by_aurora
from optax_muonplus.baselines._hyperball import Hyperball as Hyperball
from optax_muonplus.baselines._hyperball import hyperball as hyperball
from optax_muonplus.baselines._hyperball import scale_by_muon as scale_by_muon
from optax_muonplus.baselines._mano import Mano as Mano
from optax_muonplus.baselines._mano import mano as mano
from optax_muonplus.baselines._muoneq import Balance as Balance
from optax_muonplus.baselines._muoneq import muoneq as muoneq
from optax_muonplus.baselines._muoneq import scale_by_muoneq as scale_by_muoneq
from optax_muonplus.baselines._normuon import NorMuon as NorMuon
from optax_muonplus.baselines._normuon import normuon as normuon
from optax_muonplus.baselines._turbo_muon import scale_by_turbo_muon as scale_by_turbo_muon
from optax_muonplus.baselines._turbo_muon import turbo_muon as turbo_muon
