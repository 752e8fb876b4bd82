"""Rows of a table that are written as they come, so that the same command goes on after a stop."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import records
from examples.trainer.system.errors import UserError

Row = dict[str, Any]


def measured(
    out: Path | None,
    name: str,
    record: dict[str, Any],
    tasks: Sequence[dict[str, str]],
    measure: Callable[..., Row],
) -> list[Row]:
    """Measures the tasks in order, but for those whose rows an equal run has written.

    Args:
      out: folder of the JSON file, or None for no file.
      name: of the file, without its ending.
      record: what the file says beside the rows. Rows of another record are measured again.
      tasks: arguments of ``measure``, for each row; the row has them too, and is known by them.
      measure: makes the rest of a row, which JSON can hold.
    """
    known = [] if out is None else kept(out / f"{name}.json", record)
    rows = []
    for task in tasks:
        row = next((row for row in known if task.items() <= row.items()), None)
        if row is None:
            row = {**task, **measure(**task)}
            known.append(row)
            print(*task.values(), "done", flush=True)
            records.write(out, name, {**record, "rows": known}, said=False)
        rows.append(row)
    others = [row for row in known if row not in rows]
    records.write(out, name, {**record, "rows": [*rows, *others]})
    return rows


def kept(path: Path, record: dict[str, Any]) -> list[Row]:
    """Reads the rows that a run with this record has written."""
    if not path.exists():
        return []
    try:
        before = json.loads(path.read_text())
        rows = before.pop("rows")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{path} has no rows of a table ({error!r}): move it away.") from None
    return rows if before == json.loads(json.dumps(record)) else []
