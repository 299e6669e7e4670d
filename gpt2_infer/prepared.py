"""What generation has prepared for a model, kept for the next call that needs the same."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar

T = TypeVar("T")

MAX_ENGINES = 8


class Engine(Protocol):
    """Something that one call at a time uses."""

    @property
    def nbytes(self) -> int:
        """The memory that it holds."""


class Prepared:
    """Engines that wait for a call, the least recently used first, and what they share.

    All of it was made for one state of the model's weights. Threads may use it at once: an engine
    that one has taken is not there for another. A copy, or a pickled one, begins empty.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._weights: object = None
        self._waiting: list[tuple[Hashable, Engine]] = []
        self._shared: dict[Hashable, object] = {}
        self.stamp = object()
        """A new object after each clear()."""
        _all.add(self)

    def __reduce__(self) -> tuple[type[Prepared], tuple[()]]:
        return Prepared, ()

    def check(self, weights: object) -> None:
        """Forget everything if it was made for other weights."""
        with self._lock:
            if self._weights != weights:
                self.clear()
                self._weights = weights

    def clear(self) -> bool:
        """Forget everything; return whether there was anything."""
        with self._lock:
            had_any = bool(self._waiting or self._shared)
            self._waiting, self._shared, self.stamp = [], {}, object()
            return had_any

    def take(self, key: Hashable) -> Engine | None:
        """Remove and return an engine that was put for that key."""
        with self._lock:
            for index, (known, engine) in enumerate(self._waiting):
                if known == key:
                    del self._waiting[index]
                    return engine
            return None

    def put(self, key: Hashable, engine: Engine, stamp: object, room: int) -> None:
        """Let an engine wait, unless everything was forgotten since `stamp`.

        Older ones go if there are MAX_ENGINES, or if together they need more than room, in bytes.
        """
        with self._lock:
            if stamp is not self.stamp or engine.nbytes > room:
                return
            self._waiting.append((key, engine))
            while len(self._waiting) > MAX_ENGINES or (
                sum(waiting.nbytes for _, waiting in self._waiting) > room
            ):
                del self._waiting[0]

    def share(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return what make() made for that key the first time."""
        with self._lock:
            if key not in self._shared:
                self._shared[key] = make()
            return self._shared[key]  # type: ignore[return-value]


_all: weakref.WeakSet[Prepared] = weakref.WeakSet()


def clear_all() -> bool:
    """Forget what was prepared for any model; return whether there was anything."""
    cleared = [prepared.clear() for prepared in list(_all)]
    return any(cleared)
