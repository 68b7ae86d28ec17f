"""What a process takes at most to plan for a context, against the context: the same for 1k and 128k tokens.

    python benchmarks/planning_memory.py MODEL --contexts 1024,4096,16384,131072 --json FILE

``outcore info`` and ``plan`` for each context, and a short answer generated in room for each; each in a process of its
own, on a copy of the model's configuration that allows the longest. What a process took beyond what MLX held is to be
flat.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from outcore.checkpoint.find_model import resolve_model
from outcore.loading.preparation import prepare
from result_file import write_result

RUN = (
    "import sys\nfrom outcore.cli.main import main\nfrom outcore.machine.memory import peak_rss\n"
    "status = main(sys.argv[1:])\nprint()\nprint(status, peak_rss(), 0)"
)

GENERATE = """
import sys
import mlx.core as mx
import outcore
from outcore.machine.memory import peak_rss
import _support  # noqa: F401
from stand_ins import TokensOnly
folder, context, memory, dtype = sys.argv[1:]
model, _ = outcore.load_model(
    folder, context=int(context), prompt=64, memory=int(memory), resident=0, dtype=dtype or None, govern=False
)
with model.outcore:
    ids = [5 + i for i in range(64)]
    tokens = list(outcore.stream_generate(model, TokensOnly(), ids, max_tokens=4))
    print(4 - len(tokens), peak_rss(), mx.get_peak_memory() + mx.get_cache_memory())
"""


def with_context(model: Path, folder: Path, longest: int) -> Path:
    """The model under another name, made for longer contexts as its configuration says; its weights are linked."""
    folder.mkdir()
    for file in model.iterdir():
        if file.is_file() and file.name != "config.json":
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "max_position_embeddings" in part:
            part["max_position_embeddings"] = longest
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def measure(command: str, folder: Path, context: int, dtype: str | None) -> dict[str, object]:
    """One command in a process of its own: its most resident memory, and what MLX held of it, in bytes."""
    code, argv = RUN, [command, str(folder), "--context", str(context), *(["--dtype", dtype] if dtype else [])]
    if command == "generate":
        wanted = prepare(
            folder, memory=1, least=True, context=context, prompt=64, draft="auto", dtype=dtype, resident=0
        )
        code = GENERATE
        argv = [str(folder), str(context), str(wanted.planning.smallest), dtype or ""]
    elif command == "plan":
        argv.append("--no-calibrate")
    out = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True).stdout
    status, process, held = map(int, out.splitlines()[-1].split())
    assert status == 0
    return {
        "command": command, "context": context, "process_bytes": process, "mlx_bytes": held,
        "beside_bytes": process - held,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="What planning takes, against the context.")
    parser.add_argument("model")
    parser.add_argument("--contexts", default="1024,4096,16384,131072")
    parser.add_argument("--commands", default="info,plan,generate")
    parser.add_argument("--dtype")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    contexts = [int(c) for c in args.contexts.split(",")]
    rows = []
    with tempfile.TemporaryDirectory() as root:
        folder = with_context(resolve_model(args.model), Path(root) / "model", max(contexts))
        for command in args.commands.split(","):
            for context in contexts:
                rows.append(measure(command, folder, context, args.dtype))
                print(json.dumps(rows[-1]), flush=True)
    spread = {
        c: max(mine) / min(mine)
        for c in args.commands.split(",")
        if (mine := [int(str(r["beside_bytes"])) for r in rows if r["command"] == c])
    }
    print(json.dumps({"largest_over_smallest": spread}))
    write_result(args.json, "planning_memory", Path.cwd(), largest_over_smallest=spread, rows=rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
