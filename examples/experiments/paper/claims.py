"""The paper's qualitative claims, checked against the figures' numbers: a Markdown table."""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from examples.experiments.paper.curvature import NORMS
from examples.experiments.paper.records import SIDES, kinds
from examples.experiments.sweeps.grid import Method
from examples.experiments.sweeps.results import MUON, Sweep
from examples.trainer.system.tables import markdown

Row = tuple[str, bool, str]
"""A claim, whether the numbers support it, and the numbers."""

PLUS = Method("muonplus", "col_row", "jordan", "free")


def table(
    iterations: Mapping[str, Any],
    training: Mapping[str, Any],
    ranks: Mapping[str, Any],
    curvature: Mapping[str, Any] | None,
    sweeps: Sequence[Sweep],
) -> str:
    """The table of all claims."""
    rows = [
        *amplified(iterations),
        *fades(iterations),
        equal_rows(training),
        *rivals(training),
        correlated(ranks),
        *([] if curvature is None else flatter(curvature)),
        *(row for sweep in sweeps for row in in_sweep(sweep)),
    ]
    lines = [[claim, "yes" if seen else "no", numbers] for claim, seen, numbers in rows]
    return markdown(["claim of the paper", "seen here", "numbers"], lines, left=3, padded=False)


def complete_rows(*columns: Sequence[float | None]) -> Iterator[tuple[float, ...]]:
    """Rows of the columns, without those that have a missing value."""
    for row in zip(*columns, strict=True):
        values = tuple(x for x in row if x is not None)
        if len(values) == len(row):
            yield values


def amplified(data: Mapping[str, Any]) -> Iterator[Row]:
    """Section 2.1: five steps amplify the variance of the momentum."""
    for prefix, claim in (
        ("", "five Newton-Schulz steps amplify the variance of row and column norms"),
        ("relative_", "the same, relative to the mean, which they raise too (not in the paper)"),
    ):
        after = [data[kind][prefix + side] for kind in kinds(data) for side in SIDES]
        ratios = [values[5] / values[0] for values in after]
        yield (
            claim,
            min(ratios) > 1,
            f"variance after 5 steps over that of M/‖M‖: {min(ratios):.3g} to {max(ratios):.3g}, "
            f"above 1 in {sum(r > 1 for r in ratios)} of {len(ratios)} (kinds x sides)",
        )


def fades(data: Mapping[str, Any]) -> Iterator[Row]:
    """Figure 2a: many Newton-Schulz steps, on square layers and others."""
    last = data["iterations"][-1]
    square = [kind for kind in kinds(data) if len(set(data[kind]["shape"])) == 1]
    if square:
        left = {kind: max(data[kind][f"exact_{side}"] for side in SIDES) for kind in square}
        whole = [kind for kind in square if not data[kind]["missing_directions"]]
        parts = [
            f"{kind} {left[kind]:.1e}"
            + (
                ""
                if kind in whole
                else f" ({data[kind]['missing_directions']} directions are zero)"
            )
            for kind in square
        ]
        after = [data[kind][side][-1] / data[kind][side][5] for kind in square for side in SIDES]
        yield (
            "square layers: the exact polar factor has equal norms",
            all(left[kind] < 1e-6 for kind in whole),
            f"variance {', '.join(parts)}; after {last} of Jordan's steps, which do not converge "
            f"to 1, still {min(after):.2g} to {max(after):.2g} of that after 5",
        )
    others = [kind for kind in kinds(data) if kind not in square]
    if others:
        # The vectors of the longer side outnumber their dimensions, so their norms cannot be equal.
        longer = [SIDES[data[k]["shape"][0] < data[k]["shape"][1]] for k in others]
        left = [data[k][f"exact_{side}"] for k, side in zip(others, longer, strict=True)]
        yield (
            "other layers: one side stays unequal even with the exact factor",
            min(left) > 1e-6,
            f"variance of the longer side of {', '.join(others)}: {min(left):.2g} to "
            f"{max(left):.2g}",
        )


def equal_rows(data: Mapping[str, Any]) -> Row:
    """Figure 2b: Muon+ has no variance in the side normalized last, throughout training."""
    plus, muon = data[PLUS.name], data[MUON.name]
    worst = max(
        most / least
        for kind in kinds(plus)
        for most, least in complete_rows(plus[kind]["row"]["max"], muon[kind]["row"]["min"])
    )
    return (
        "Muon+ has no variance in the side normalized last, throughout training",
        worst <= 1e-6,
        f"largest of any matrix and record over the smallest of Muon's: {worst:.1e}",
    )


def rivals(data: Mapping[str, Any]) -> Iterator[Row]:
    """Figures 2b and var_trend_all: other variants do not remove imbalance."""
    for name in data:
        if name in (MUON.name, PLUS.name):
            continue
        shares = {
            side: statistics.geometric_mean(
                x / y
                for kind in kinds(data[name])
                for x, y in complete_rows(
                    data[name][kind][side]["mean"], data[MUON.name][kind][side]["mean"]
                )
            )
            for side in SIDES
        }
        numbers = ", ".join(f"{side}s {share:.2g}" for side, share in shares.items())
        yield (
            f"{name.replace('Muon polar_express', 'Polar Express')} leaves imbalance",
            min(shares.values()) > 1e-6,
            f"relative variance over Muon's, geometric mean over kinds and training: {numbers}",
        )


def correlated(data: Mapping[str, Any]) -> Row:
    """Appendix: rows that are large before the polar step are large after it."""
    found = {kind: [x for (x,) in complete_rows(data[kind]["row"]["mean"])] for kind in kinds(data)}
    means = [mean for values in found.values() for mean in values]
    by_kind = ", ".join(f"{kind} {statistics.fmean(values):.2f}" for kind, values in found.items())
    return (
        "row norms before and after Muon's polar step correlate positively throughout training",
        min(means) > 0,
        f"mean over layers: {by_kind}; lowest of a kind at a record {min(means):.2f}, positive in "
        f"{sum(m > 0 for m in means)} of {len(means)}",
    )


def flatter(data: Mapping[str, Any]) -> Iterator[Row]:
    """Theorem 1: the mean curvature along updates is lower with equal norms."""
    for side in SIDES:
        matrices = data[side].values()
        numbers, lower = [], []
        for norm in NORMS[1:]:
            ratios = {
                name: [m[norm][name] / m["none"][name] for m in matrices]
                for name in ("mean_curvature", "decrease")
            }
            mean = {name: statistics.geometric_mean(found) for name, found in ratios.items()}
            lower.append(mean["mean_curvature"] < 1)
            count = sum(r < 1 for r in ratios["mean_curvature"])
            numbers.append(
                f"{norm} {mean['mean_curvature']:.3f} (lower in {count} of {len(matrices)}; "
                f"guaranteed decrease {mean['decrease']:.3f})"
            )
        yield (
            f"Muon+ meets less curvature, in blocks that are {side}s",
            all(lower),
            f"over Muon's, layer {data['layer']}, step {data['step']}: {'; '.join(numbers)}",
        )


def in_sweep(sweep: Sweep) -> Iterator[Row]:
    """Section 2.3 and the experiments: stability at large rates, and best against best."""
    if MUON not in sweep.methods() or not sweep.plus():
        return
    plus = sweep.best_of(sweep.plus())
    rate = max(set(sweep.rates(MUON)) & set(sweep.rates(plus)), default=None)
    if rate is not None:
        rise = {
            method.name: sweep.losses(method, rate)[0] - sweep.best(method)[0]
            for method in (MUON, plus)
        }
        yield (
            f"{sweep.name}: Muon+ is more stable at large rates",
            rise[plus.name] < rise[MUON.name],
            f"loss at rate {rate:g} less that at the best rate: "
            + ", ".join(f"{name} {gap:.4f}" for name, gap in rise.items()),
        )
    gaps = sweep.gaps(plus, MUON)
    mean = statistics.fmean(gaps)
    error = statistics.stdev(gaps) / math.sqrt(len(gaps)) if len(gaps) > 1 else math.nan
    yield (
        f"{sweep.name}: Muon+ ends lower, best rate against best rate",
        mean < -2 * error,
        f"{plus.name} less Muon: {mean:+.4f}, standard error {error:.4f} over {len(gaps)} seeds",
    )
