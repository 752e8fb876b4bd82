"""The paper in numbers: amplification regions, Lemma 1, imbalance, ranks, and the descent bound.

Source: Zhang et al., Muon+, arXiv:2602.21545.
"""
