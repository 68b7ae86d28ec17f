"""Who is called at a moment of a sweep: several at once, each once, and none that has left."""

from __future__ import annotations

from outcore.engine.observers import Observers


def test_observers_join_and_leave_without_harm_to_others() -> None:
    heard: list[str] = []
    observers = Observers()
    calls = {name: (lambda name=name: heard.append(name)) for name in "abc"}
    for name in ("a", "b", "a", "c"):
        observers.join(calls[name])
    observers()
    observers.leave(calls["b"])
    observers.leave(calls["b"])
    observers()
    assert "".join(heard) == "abcac"


def test_one_may_leave_while_it_is_called() -> None:
    heard: list[str] = []
    observers = Observers()

    def once() -> None:
        heard.append("once")
        observers.leave(once)

    observers.join(once)
    observers.join(lambda: heard.append("always"))
    observers()
    observers()
    assert heard == ["once", "always", "always"]
