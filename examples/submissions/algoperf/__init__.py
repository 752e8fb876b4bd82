"""A submission to AlgoPerf's self-tuning ruleset: one file, and the trees that it is tested on."""
