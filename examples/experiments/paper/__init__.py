"""The paper's figures and claims about imbalance: their numbers, pictures and a table."""
