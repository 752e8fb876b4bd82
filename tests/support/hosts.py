"""How `omp.describe` reads a host's model, to compare with what a person judged."""

import re

import optax_muonplus as omp


def readings(params, *rules, **settings):
    """By path as `describe` folds it: "adam", "?" or the matrices as out x in x batch."""
    header, _, *lines = omp.describe(params, *rules, **settings).splitlines()
    group, matrices, end = (header.index(name) for name in ("group", "out x in", "scale"))
    found = {}
    for line in lines:
        if re.match(r"muon: \d", line):
            break
        label = line[group:matrices].strip()
        found[line.split()[0]] = line[matrices:end].strip() if label == "muon" else label
    return found


def assert_falls(losses, to):
    """To less than a share of the first one."""
    losses = [float(loss) for loss in losses]
    assert losses[-1] < to * losses[0], losses
