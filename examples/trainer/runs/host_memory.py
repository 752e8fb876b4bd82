"""Keeps the memory of the host from growing with every save.

TensorStore 0.1.86 makes Python objects of JSON whose parts are never freed: it gives
`PyDict_SetItem` the references that it owns, which that function does not take over
(google/tensorstore @059955b, python/tensorstore/json_type_caster.cc, `JsonToPyObject`). On a save
Orbax 0.12 has such objects made for every array, of a path that it has just written itself, and
three times of counters that it only logs: 53 kB in all for the smallest model. Here Orbax gets
that path back as it gave it, and no counters. What a checkpoint holds is the same.

What is freed stays with the process otherwise. glibc makes up to eight heaps for each core, which
the threads of saves and compilers fill by turns: over 600 saves a run grew by 4.3 MB, by 1.7 with
four heaps, and by nothing with two.
"""

import contextlib
import ctypes
import os
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import tensorstore as ts

MENDED = {"tensorstore": "0.1.86", "orbax-checkpoint": "0.12."}
"""The versions that grow."""
M_ARENA_MAX = -8
"""As in glibc's malloc.h."""
HEAPS = 2


def spec(json: Any) -> Any:
    """The spec of a store; that of files only says its JSON, which is what it was made of."""
    if json.keys() == {"driver", "path"} and json["driver"] == "file":
        return SimpleNamespace(to_json=lambda: dict(json))
    return ts.KvStore.Spec(json)


def with_own(original: Any, **own: Any) -> SimpleNamespace:
    """What has the attributes of the original, but for those that are given."""
    return SimpleNamespace(**{name: getattr(original, name) for name in dir(original)} | own)


def mend() -> None:
    """Changes the module of Orbax that asks TensorStore for JSON; it is not public.

    Other versions, with which this was not seen to work, are left as they are.
    """
    if any(not version(name).startswith(known) for name, known in MENDED.items()):
        return
    with contextlib.suppress(ImportError):
        from orbax.checkpoint._src.serialization import tensorstore_utils as orbax

        setattr(orbax, "ts", with_own(ts, KvStore=with_own(ts.KvStore, Spec=spec)))  # noqa: B010
        setattr(orbax, "get_tensorstore_raw_bytes", lambda *_: 0)  # noqa: B010


def share_heaps() -> None:
    """Makes threads that begin from now on share two heaps, where the C library is glibc.

    `MALLOC_ARENA_MAX` in the environment is another limit of the user's own.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).mallopt(M_ARENA_MAX, HEAPS)


def give_back() -> None:
    """Gives freed memory back to the system, where the C library is glibc."""
    with contextlib.suppress(AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
