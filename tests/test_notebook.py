"""What notebooks show: progress, names, and one short KeyboardInterrupt."""

from __future__ import annotations

import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import outcore
from outcore.decode import loader


@pytest.fixture
def loaded(quick_models: Callable[..., Path]) -> Iterator[Any]:
    model, tokenizer = outcore.load(str(quick_models(3)), memory="100MB", resident=1, draft="none", govern=False)
    with model.outcore:
        yield model, tokenizer


def test_tab_lists_what_the_docs_name(loaded: Any) -> None:
    session = loaded[0].outcore
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    section = page.partition("`model.outcore` is a `Session`")[2].partition("A `prompt_cache`")[0]
    assert dir(session) == sorted(re.findall(r"^\| `(\w+)", section, re.M))
    assert {"budget_bytes", "peak_bytes", "resident", "streams"} <= {*dir(session.plan)}
    for shown in (session, session.plan, outcore):
        assert all(hasattr(shown, name) for name in dir(shown))
    assert not {"run_s", "predicted", "split"} & {*dir(session.plan)}


def test_progress_is_a_bar_in_notebooks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, int, bool]] = []

    class Bar:
        def __init__(self, *, desc: str, total: int, **_: Any) -> None:
            self.n, self._desc = 0, desc

        def update(self, more: int) -> None:
            self.n += more
            shown.append((self._desc, self.n, False))

        def close(self) -> None:
            shown.append((self._desc, self.n, True))

    shell = type("ZMQInteractiveShell", (), {})
    monkeypatch.setitem(sys.modules, "tqdm.auto", SimpleNamespace(tqdm=Bar))
    for kind in (None, object, shell):
        if kind is not None:
            monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=kind))
        show = loader.notebook_bar()
        show("weights", 5, 10)
        assert bool(shown) == (kind is shell)
    show("packing", 1, 2)
    show("packing", 2, 2)
    assert shown == [
        ("weights", 5, False), ("weights", 5, True), ("packing", 1, False), ("packing", 2, False), ("packing", 2, True),
    ]  # fmt: skip


def test_ctrl_c_is_one_short_keyboard_interrupt(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*_: Any) -> Any:
        try:
            raise OSError
        except OSError:
            signal.raise_signal(signal.SIGINT)
        raise KeyboardInterrupt

    monkeypatch.setattr(loader, "_loaded", pressed)
    model, tokenizer = loaded
    model.outcore.streaming.after_unit.append(pressed)
    for call in (
        lambda: outcore.generate(model, tokenizer, "hi", max_tokens=4),
        lambda: outcore.batch_generate(model, tokenizer, [[5, 6]], max_tokens=4),
        lambda: outcore.load_model("anywhere"),
    ):
        with pytest.raises(KeyboardInterrupt) as e:
            call()
        assert "During handling" not in "".join(traceback.format_exception(e.value))
        assert len(traceback.extract_tb(e.tb)) <= 7
    model.outcore.streaming.after_unit.clear()
    assert outcore.generate(model, tokenizer, "hi", max_tokens=2)
