"""mlx-lm patched: its functions stream, within one budget, and every name is given back."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.chat
import mlx_lm.server
import mlx_lm.utils
import pytest
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore import BudgetError, UsageError
from outcore.decode import generate as ours
from outcore_compat.mlx_lm import apply_patch, main, remove_patch
from outcore_compat.patched_calls import PAIRS
from outcore_packs.full_copy import pack_model
from test_pack import original
from test_random_state import adapter

PROMPT = "def f(x):\n"
IDS = [3, 4, 5, 6, 7]


@pytest.fixture(scope="module")
def before() -> dict[tuple[str, str], int]:
    return names()


@pytest.fixture(autouse=True)
def as_it_was(before: dict[tuple[str, str], int]) -> Iterator[None]:
    yield
    remove_patch()
    found, ours = names(), {id(new) for _, new in PAIRS}
    assert {key: found.get(key) for key in before} == before
    assert not [key for key, value in found.items() if value in ours and key not in before]


def names() -> dict[tuple[str, str], int]:
    """Every name of mlx-lm's modules, and of those that have any of the functions that are replaced."""
    replaced = {id(each) for pair in PAIRS for each in pair}
    return {
        (name, key): id(value)
        for name, module in list(sys.modules.items())
        if issubclass(type(module), types.ModuleType)
        for key, value in list(vars(module).items())
        if name.startswith("mlx_lm") or (id(value) in replaced and not name.startswith("outcore"))
    }


def module(name: str, code: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A loaded module of somebody's."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(code, vars(made))
    return made


class OnlySays:
    """Says that it is a module, as what stands for one until it is imported may, and has no names."""

    __slots__ = ()
    __class__ = types.ModuleType  # type: ignore[assignment]


@pytest.fixture(scope="module")
def served(quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers that know the demo model's form of a chat."""
    folder = Path(shutil.copytree(quick_models(3), tmp_path_factory.mktemp("models") / "chats"))
    shutil.copy(demo_model / "chat_template.jinja", folder)
    return folder


@pytest.fixture(scope="module")
def plain(served: Path) -> Any:
    return mlx_lm.load(str(served))


def tokens(responses: Any) -> list[int]:
    return [r.token for r in responses]


# Names


def test_names_are_replaced_wherever_they_are_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "from mlx_lm import load, stream_generate as write; import mlx_lm; other = len"
    monkeypatch.setitem(sys.modules, "only_says", OnlySays())
    early = module("early", code, monkeypatch)
    before = {name: vars(m).copy() for name, m in sys.modules.items() if name.startswith("mlx_lm")}
    originals = vars(early).copy()
    apply_patch(resident=1)
    late = module("late", code + "\nfrom mlx_lm.server import BatchGenerator", monkeypatch)
    assert early.load is late.load is mlx_lm.utils.load is mlx_lm.chat.load is mlx_lm.server.load
    assert early.load is not originals["load"] and early.write is not originals["write"] and early.other is len
    assert ours.generate_resident is originals["write"], "our own modules keep mlx-lm's"
    assert early.load.__doc__ == originals["load"].__doc__ and early.load.__name__ == "load"
    remove_patch()
    remove_patch()
    assert early.load is late.load is mlx_lm.load is originals["load"]
    assert late.BatchGenerator is before["mlx_lm.generate"]["BatchGenerator"]
    assert {name: vars(sys.modules[name]) for name in before} == before


def test_what_somebody_else_puts_there_meanwhile_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    somebodys = module("somebodys", "from mlx_lm import load", monkeypatch)
    apply_patch(resident=1)
    somebodys.load = print
    remove_patch()
    assert somebodys.load is print


def test_the_patch_that_was_applied_last_counts_until_it_is_removed(served: Path) -> None:
    def slots() -> int:
        model, _ = mlx_lm.load(str(served))
        with model.outcore as session:
            return session.plan.slots

    original = mlx_lm.load
    outer = apply_patch(resident=1, slots=2)
    with apply_patch(resident=1, slots=3):
        assert slots() == 3
    assert slots() == 2
    inner = apply_patch(resident=1, slots=3)
    outer.remove()
    outer.remove()
    assert slots() == 3
    inner.remove()
    assert mlx_lm.load is original
    apply_patch(resident=1)
    apply_patch(resident=1)
    remove_patch()
    assert mlx_lm.load is original, "remove_patch ends all"


def test_patches_of_many_threads_leave_nothing_behind() -> None:
    original = mlx_lm.load

    def work() -> None:
        for _ in range(2):
            with apply_patch(resident=1):
                assert mlx_lm.load is not original

    threads = [threading.Thread(target=work) for _ in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert mlx_lm.load is original


def test_a_function_that_somebody_kept_is_mlx_lms_again(served: Path, plain: Any) -> None:
    with apply_patch(resident=1):
        load, write = mlx_lm.load, mlx_lm.stream_generate
    model, tokenizer = load(str(served))
    assert not hasattr(model, "outcore")
    assert tokens(write(model, tokenizer, PROMPT, max_tokens=3)) == tokens(
        mlx_lm.stream_generate(*plain, PROMPT, max_tokens=3)
    )


def test_what_cannot_be_meant_is_refused_before_anything_is_replaced() -> None:
    original = mlx_lm.load
    with pytest.raises(UsageError, match="slots"):
        apply_patch(slots=1)
    assert mlx_lm.load is original


# Functions


def test_mlx_lms_batch_generator_takes_mlx_lms_models_alone(served: Path, plain: Any) -> None:
    with apply_patch(resident=1):
        model, _ = mlx_lm.load(str(served))
        with model.outcore, pytest.raises(UsageError, match="use batch_generate"):
            mlx_lm.server.BatchGenerator(model)
        mlx_lm.server.BatchGenerator(plain[0], max_tokens=1).close()


def test_a_dtype_is_given_to_load_and_not_set_later(served: Path) -> None:
    with apply_patch(resident=1, dtype="float32"):
        model, _ = mlx_lm.load(str(served))
        with model.outcore:
            model.set_dtype(mx.float32)  # as mlx-lm's own tests do
            assert model(mx.array([IDS])).dtype == mx.float32
            with pytest.raises(UsageError, match="load it with dtype='bfloat16'"):
                model.set_dtype(mx.bfloat16)


def test_every_function_gives_mlx_lms_texts(served: Path, plain: Any) -> None:
    whole = mlx_lm.generate(*plain, PROMPT, max_tokens=5)
    several = mlx_lm.batch_generate(*plain, [IDS, IDS[:2]], max_tokens=[2, 3], return_token_ids=True)
    with apply_patch(resident=1, context=128):
        model, tokenizer, config = mlx_lm.load(str(served), return_config=True)
        assert config["model_type"] == "qwen3_5"
        with model.outcore:
            assert "".join(r.text for r in mlx_lm.stream_generate(model, tokenizer, PROMPT, 5, None)) == whole
            assert mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=5, num_draft_tokens=3) == whole
            found = mlx_lm.batch_generate(
                model, tokenizer, [IDS, IDS[:2]], max_tokens=[2, 3], return_token_ids=True, prefill_batch_size=2
            )
            assert found.token_ids == several.token_ids
            with pytest.raises(UsageError, match="max_kv_size"):
                mlx_lm.batch_generate(model, tokenizer, [IDS], max_kv_size=16)
            with pytest.raises(ValueError, match="max_tokens"):
                next(iter(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=0)))


@pytest.fixture
def zoo_model(demo_model: Path, tmp_path: Path) -> Callable[[str], Path]:
    def made(model_type: str) -> Path:
        folder = zoo.save_checkpoint(model_type, tmp_path / model_type)
        shutil.copy(demo_model / "tokenizer.json", folder)
        settings = json.loads((demo_model / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": None}))
        return folder

    return made


def test_other_kinds_of_models_too(zoo_model: Callable[[str], Path]) -> None:
    folder = zoo_model("mamba2")
    plain = mlx_lm.load(str(folder))
    expected = tokens(mlx_lm.stream_generate(*plain, IDS, max_tokens=4))
    with apply_patch(resident=1, context=64, cpu_streams=1):
        model, tokenizer = mlx_lm.load(folder)
        with model.outcore as session:
            assert session.streaming is not None
            assert tokens(mlx_lm.stream_generate(model, tokenizer, IDS, max_tokens=4)) == expected


def test_models_that_were_loaded_before_are_mlx_lms_and_those_loaded_meanwhile_go_on(served: Path, plain: Any) -> None:
    expected = tokens(mlx_lm.stream_generate(*plain, PROMPT, max_tokens=4))
    with apply_patch(resident=1, context=64):
        assert tokens(mlx_lm.stream_generate(*plain, PROMPT, max_tokens=4)) == expected
        assert mlx_lm.generate(*plain, PROMPT, max_tokens=2) and mlx_lm.batch_generate(*plain, [IDS], max_tokens=2)
        model, tokenizer = mlx_lm.load(str(served))
    with model.outcore as session:
        assert tokens(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=4)) == expected
        assert session.metrics.sweeps > 4


def test_a_prompt_cache_is_filled_as_mlx_lm_fills_it(served: Path, plain: Any) -> None:
    def turns(model: Any, tokenizer: Any, **options: Any) -> list[int]:
        cache = make_prompt_cache(model)
        first = tokens(mlx_lm.stream_generate(model, tokenizer, PROMPT, max_tokens=4, prompt_cache=cache))
        return first + tokens(
            mlx_lm.stream_generate(model, tokenizer, "\n", max_tokens=6, prompt_cache=cache, **options)
        )

    expected = turns(*plain)
    with apply_patch(resident=1, context=64):
        model, tokenizer = mlx_lm.load(str(served))
        with model.outcore:
            assert turns(model, tokenizer) == expected


def test_what_drafts_has_its_caches_behind_the_models(zoo_model: Callable[[str], Path]) -> None:
    folder = str(zoo_model("llama"))
    model, tokenizer = mlx_lm.load(folder)
    expected = tokens(mlx_lm.stream_generate(model, tokenizer, IDS, max_tokens=8))
    with apply_patch(memory="40MB", context=64):
        model, tokenizer = mlx_lm.load(folder)
        other, _ = mlx_lm.load(folder)
        cache = make_prompt_cache(model) + make_prompt_cache(other)
        given = list(cache)
        with model.outcore, other.outcore:
            found = list(
                mlx_lm.stream_generate(
                    model, tokenizer, IDS, max_tokens=8, draft_model=other, num_draft_tokens=2, prompt_cache=cache
                )
            )
        assert tokens(found) == expected and any(r.from_draft for r in found)
        assert cache == given and cache[0].offset == len(IDS) + 8 and cache[-1].offset == 0


# One budget


def test_models_share_one_budget(zoo_model: Callable[[str], Path]) -> None:
    folder = zoo_model("llama")
    alone = outcore.plan_model(str(folder), context=64)
    smallest, whole = alone.smallest_budget_bytes, alone.peak_bytes
    with apply_patch(memory=int(whole + 1.5 * smallest), context=64, draft="none", govern=False):
        first, _ = mlx_lm.load(folder)
        assert first.outcore.streaming is None
        second, _ = mlx_lm.load(folder)
        sessions = [first.outcore, second.outcore]
        assert sum(s.plan.budget_bytes for s in sessions) <= int(whole + 1.5 * smallest)
        assert all(s.plan.peak_bytes <= s.plan.budget_bytes for s in sessions)
        before = [s.plan.budget_bytes for s in sessions]
        with pytest.raises(BudgetError, match=r"3 models share .* leave .* needs"):
            mlx_lm.load(zoo_model("qwen3_next"))
        assert [s.plan.budget_bytes for s in sessions] == before, "they keep what they had"
        second.outcore.close()
        del second, sessions
        gc.collect()
        third, _ = mlx_lm.load(folder)
        first.outcore.close()
        third.outcore.close()


def behind_load(**arguments: Any) -> list[int]:
    """The random state behind a load, which began with a state that no small seed gives."""
    mx.random.seed(2**40 + 5)
    mx.random.uniform()
    model = mlx_lm.load(**arguments)[0]
    found: Any = mx.random.state
    if hasattr(model, "outcore"):
        model.outcore.close()
    return found[0].tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["quantized", "adapter", "overlay", "draft", "packed"])
def test_load_leaves_the_random_state_where_mlx_lms_load_does(
    kind: str, served: Path, demo_model: Path, zoo_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, arguments, options = served, dict[str, Any](), dict[str, Any](resident=1, context=64)
    if kind == "quantized":
        folder = zoo.save_checkpoint("llama", tmp_path / "quantized", quantize={"bits": 4, "group_size": 32})
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model / name, folder)
    elif kind == "adapter":
        folder = zoo_model("llama")
        arguments["adapter_path"] = str(adapter(folder, tmp_path / "adapter"))
    elif kind == "overlay":
        folder = original(tmp_path / "overlay")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(demo_model / name, folder)
    elif kind == "draft":
        options["draft"] = "self:4"
    elif kind == "packed":
        pack_model(served, None)
    theirs = behind_load(path_or_hf_repo=str(folder), **arguments)
    with apply_patch(**options):
        assert behind_load(path_or_hf_repo=str(folder), **arguments) == theirs


# Programs


@pytest.mark.parametrize("options", [["--resident", "1"], ["--memory", "200MB"]], ids=["streamed", "resident"])
def test_a_seed_gives_the_text_that_it_gives_unpatched(
    options: list[str], served: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["--model", str(served), "--prompt", PROMPT, "--max-tokens", "6", "--ignore-chat-template"]
    words += ["--seed", "7", "--temp", "0.8"]
    monkeypatch.setattr(sys, "argv", ["mlx_lm.generate", *words])
    mlx_lm.generate.__globals__["main"]()
    theirs = capsys.readouterr().out.split("==========")[1]
    main([*options, "--context", "64", "-m", "mlx_lm.generate", *words])
    assert capsys.readouterr().out.split("==========")[1] == theirs
    assert len(set(theirs)) > 3


def test_a_program_runs_patched_without_a_changed_line(
    served: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import sys\nfrom mlx_lm import load, generate\nimport beside\n"
        "model, tokenizer = load(sys.argv[1])\nprint(model.outcore.plan.slots, __name__, beside.X)\n"
        f"print(generate(model, tokenizer, {PROMPT!r}, max_tokens=3))\nmodel.outcore.close()\n"
    )
    (tmp_path / "beside.py").write_text("X = 7\n")
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    main(["--resident", "1", "--slots=2", "--context", "64", str(script), str(served)])
    assert capsys.readouterr().out.startswith("2 __main__ 7\n")
    words = ["--model", str(served), "--prompt", PROMPT, "--max-tokens", "3", "--ignore-chat-template"]
    outputs = []
    for program in (["-m", "mlx_lm.generate"], ["-m", "mlx_lm", "generate"]):
        main(["--resident", "1", "--context", "64", *program, *words])
        outputs.append(capsys.readouterr().out.split("==========")[1])
    assert outputs[0] == outputs[1] and outputs[0].strip()


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        ([], 2, "name a program"),
        (["--memory", "4GB", "-m"], 2, "name a program"),
        (["--slots", "1", "-m", "mlx_lm.chat"], 2, "--slots"),
        (["--nonsense", "1", "-m", "mlx_lm.chat"], 2, "--nonsense"),
        (["-m", "mlx_lm.server", "--model", "x"], 2, "outcore serve"),
        (["bin/mlx_lm", "server", "--model", "x"], 2, "outcore serve"),
        (["-m", "mlx_lm", "server"], 2, "outcore serve"),
        (["--memory", "1kB", "-m", "mlx_lm.generate", "--model", "MODEL", "--prompt", "x"], 1, "too small"),
    ],
)
def test_what_goes_wrong_is_said(
    words: list[str], status: int, says: str, served: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "argv", [])
    with pytest.raises(SystemExit) as end:
        main([str(served) if w == "MODEL" else w for w in words])
    assert end.value.code == status and says in capsys.readouterr().err


def test_mlx_lms_chat_and_evaluation_stream(
    served: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = iter([PROMPT, "again", "q"])
    shown: list[str] = []

    class UI:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __enter__(self) -> UI:
            return self

        def __exit__(self, *_: Any) -> None: ...

        def __getattr__(self, _: str) -> Callable[..., None]:
            return lambda *_: None

        def prompt(self) -> str:
            return next(said)

        def stream_token(self, text: str) -> None:
            shown.append(text)

    evaluate = with_harness(monkeypatch)
    monkeypatch.setattr(sys, "argv", ["chat", "--model", str(served), "--max-tokens", "4", "--temp", "0"])
    sweeps = []
    with apply_patch(resident=1, context=128, batch=2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mlx_lm.chat, "ChatUI", UI)
            mlx_lm.chat.main()
        harness = evaluate.MLXLM(str(served), max_tokens=4, batch_size=2, use_chat_template=False)
        session = harness._model.outcore
        sweeps.append(session.metrics.sweeps)
        requests = [types.SimpleNamespace(args=(p, {"until": ["\n\n"]})) for p in (PROMPT, "x = 1")]
        got = harness.generate_until(requests)
        sweeps.append(session.metrics.sweeps)
        scored = harness.loglikelihood([types.SimpleNamespace(args=(PROMPT, "    return"))])
        sweeps.append(session.metrics.sweeps)
        session.close()
    assert len(shown) == 8 and sweeps == sorted(set(sweeps))
    theirs = evaluate.MLXLM(str(served), max_tokens=4, batch_size=2, use_chat_template=False)
    assert not hasattr(theirs._model, "outcore")
    assert got == theirs.generate_until(requests)
    assert scored == theirs.loglikelihood([types.SimpleNamespace(args=(PROMPT, "    return"))])


def with_harness(monkeypatch: pytest.MonkeyPatch) -> Any:
    """mlx_lm.evaluate, with as much of the evaluation harness as it needs to be imported."""
    harness, api = types.ModuleType("lm_eval"), types.ModuleType("lm_eval.api")
    model: Any = types.ModuleType("lm_eval.api.model")
    registry: Any = types.ModuleType("lm_eval.api.registry")
    model.LM, registry.register_model = object, lambda _: lambda cls: cls
    for each in (harness, api, model, registry):
        monkeypatch.setitem(sys.modules, each.__name__, each)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    import mlx_lm.evaluate

    monkeypatch.setitem(sys.modules, "mlx_lm.evaluate", mlx_lm.evaluate)
    return mlx_lm.evaluate


def test_a_patched_models_memory_stays_within_the_budget(served: Path) -> None:
    # Given a budget that a prompt is too long for, by what was planned.
    planned = outcore.plan_model(str(served), context=32)
    budget = (planned.smallest_budget_bytes + planned.peak_bytes) // 2
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    with apply_patch(memory=budget, context=32):
        model, tokenizer = mlx_lm.load(str(served))
        with model.outcore as session:
            mx.reset_peak_memory()
            assert session.plan.streams
            # When it comes.
            assert len(list(mlx_lm.stream_generate(model, tokenizer, [7 + n % 90 for n in range(60)], 3))) == 3
            # Then there is room made for it.
            assert mx.get_peak_memory() - others <= budget and session.plan.context > 60
