"""A cache of a model's engines, for later calls that need the same ones."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Protocol, TypeVar, cast

MAX_ENGINES = 8


class Engine(Protocol):
    """An object that serves one call at a time."""

    @property
    def nbytes(self) -> int:
        """The memory that the engine holds, in bytes."""

    def rest(self) -> None:
        """Forget the model, so that the idle engine does not keep it alive."""


T = TypeVar("T")
E = TypeVar("E", bound=Engine)


class Prepared:
    """Idle engines, the least recently used first, and the data that they share.

    It is thread-safe: an engine that one thread has taken is not available to others. A copied or
    unpickled cache starts empty.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[tuple[Hashable, Engine]] = []
        self._shared: dict[Hashable, object] = {}
        self.stamp = object()
        """A new object after each clear()."""
        _all.add(self)

    def __reduce__(self) -> tuple[type[Prepared], tuple[()]]:
        return Prepared, ()

    def clear(self) -> bool:
        """Discard everything; return whether there was anything."""
        with self._lock:
            had_any = bool(self._waiting or self._shared)
            self._waiting, self._shared, self.stamp = [], {}, object()
            return had_any

    def lend(
        self, key: Hashable, make: Callable[[], E], begin: Callable[[E], None], room: int
    ) -> tuple[E, Callable[[], None]]:
        """Return an engine for one caller, and a function that stores it afterwards; see put().

        It is an idle engine with that key, after begin(), or else the result of make().
        """
        stamp, idle = self.stamp, self.take(key)
        if idle is None:
            engine = make()
        else:
            engine = cast("E", idle)
            begin(engine)

        def keep() -> None:
            engine.rest()
            self.put(key, engine, stamp, room)

        return engine, keep

    def take(self, key: Hashable) -> Engine | None:
        """Remove and return an idle engine with that key, or return None."""
        with self._lock:
            for index, (known, engine) in enumerate(self._waiting):
                if known == key:
                    del self._waiting[index]
                    return engine
            return None

    def put(self, key: Hashable, engine: Engine, stamp: object, room: int) -> None:
        """Store an idle engine, unless it exceeds `room` bytes or clear() was called since `stamp`.

        The oldest are dropped while there are more than MAX_ENGINES, or all exceed `room` together.
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
        """Return make()'s result for that key; make() is called only the first time."""
        with self._lock:
            if key not in self._shared:
                self._shared[key] = make()
            return self._shared[key]  # type: ignore[return-value]


_all: weakref.WeakSet[Prepared] = weakref.WeakSet()


def clear_all() -> bool:
    """Discard the engines of all models; return whether there was anything."""
    cleared = [prepared.clear() for prepared in list(_all)]
    return any(cleared)
