"""`python -m lab.benchmarks.compiled_table` writes the table of compiled programs in speed.md.

Its figures change with the version. They are read from the records that
`lab.benchmarks.collectives` and `lab.benchmarks.accelerators` write with
`--out lab/results/benchmarks/compiled`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lab.benchmarks import columns

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "lab/results/benchmarks/compiled"
PAGE = ROOT / "docs/explain/speed.md"
BEGIN, END = "<!-- compiled -->", "<!-- end of compiled -->"

COLUMNS = (
    columns.word("model, devices", "program"),
    columns.word("update", "name"),
    columns.number("collectives", "count", 0),
    columns.number("MB received", "received_bytes", 1, 1e6),
    columns.number("temporary MB", "temporary_bytes", 1, 1e6),
    columns.number("GB beside products", "bytes_beside_products", 2, 1e9),
    columns.number("kernels", "kernels", 0),
    columns.number("million cycles", "estimated_cycles", 1, 1e6),
)


def programs() -> dict[str, dict[str, Any]]:
    """Reads the records, by their model and devices."""
    records = [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]
    return {
        f"{config.get('model') or config['tree']}, {config.get('target') or config['mesh']}": record
        for record in records
        for config in [record["config"]]
    }


def rows() -> Iterator[columns.Row]:
    """Lists the updates of each program, which is named at the first one."""
    for program, record in programs().items():
        for index, (name, row) in enumerate(record["rows"].items()):
            yield {"program": "" if index else program, "name": name, **figures(row)}


def figures(row: columns.Row) -> columns.Row:
    """Takes what a kind of program has: collectives, and kernels of a GPU or cycles of a TPU."""
    keys = ["temporary_bytes"]
    if row["collectives"]:
        keys.append("received_bytes")
    if row.get("estimated_cycles"):
        keys.append("estimated_cycles")
    elif "kernels" in row:
        keys += ["bytes_beside_products", "kernels"]
    moved = {"count": sum(row["collectives"].values())} if row["collectives"] else {}
    return moved | {key: row[key] for key in keys}


def with_table(page: str) -> str:
    """Replaces what stands between the two marks of a page by the table and its commands."""
    before, _, rest = page.partition(BEGIN)
    table = columns.table(rows(), COLUMNS, left=2)
    commands = [
        f"- {program}: `{record['command']}` at commit {record['machine']['commit'][:8]}"
        for program, record in programs().items()
    ]
    written = "\n\n".join([BEGIN, table, "\n".join(commands), END])
    return f"{before}{written}{rest.partition(END)[2]}"


def main() -> None:
    """Writes the page."""
    PAGE.write_text(with_table(PAGE.read_text()))


if __name__ == "__main__":
    main()
