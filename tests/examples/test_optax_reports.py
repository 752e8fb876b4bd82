"""Each report on `optax.contrib.muon` still holds; one that does not is taken off the page."""

import re
from pathlib import Path

import pytest

from examples.submissions.optax import muon_reports

PAGE = (Path(muon_reports.__file__).parent / "README.md").read_text()
NAMES = [report.__name__ for report in muon_reports.REPORTS]


@pytest.mark.parametrize("report", muon_reports.REPORTS, ids=NAMES)
def test_the_installed_optax_has_the_defect(report):
    try:
        report()
    except Exception:
        return
    pytest.fail(f"Optax has mended it: take {report.__name__} off the page and out of REPORTS")


def test_the_page_lists_every_report():
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.M)) == sorted(NAMES)
