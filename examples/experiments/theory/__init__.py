"""The paper's theory in numbers: amplification regions, Lemma 1, and the descent bound.

Source: Zhang et al., Muon+, arXiv:2602.21545.
"""
