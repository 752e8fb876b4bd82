"""How `omp.describe` reads a host's model, to compare with what a person judged."""

import re

import optax_muonplus as omp


def readings(params, *rules, **settings):
    """By path as `describe` folds it: "adam", "?" or the matrices as out x in x batch."""
    lines = omp.describe(params, *rules, **settings).splitlines()[2:]
    found = {}
    for line in lines:
        if re.match(r"muon: \d", line):
            break
        path, _, group, *rest = re.split(r" {2,}", line)
        found[path] = rest[0] if group == "muon" else group
    return found


def assert_falls(losses, to):
    """To less than a share of the first one."""
    losses = [float(loss) for loss in losses]
    assert losses[-1] < to * losses[0], losses
