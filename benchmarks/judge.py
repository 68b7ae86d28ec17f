"""What the measurements of benchmarks/claims.py say of each claim, and the table that shows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from benchmark import Result
from outcore.sizes import format_size

MARGIN = 1.10
MEMORY_MARGIN = 150_000_000
BUSY_PERCENT = 10  # of all cores, by others
DRIFT = 1.10  # compute time at one end of the run over that at the other


@dataclass(frozen=True)
class Claim:
    """One line of the table; ``holds`` is None where nothing was promised, and the line is there to compare with."""

    claim: str
    measured: str
    bound: str
    holds: bool | None


def judge(results: Result) -> list[Claim]:
    """What the measurements say of each claim; claims that were not measured are left out."""
    runs = {name: r for name, r in results.items() if name != "disk"}
    got = {name: r for name, r in runs.items() if "failed" not in r and "skipped" not in r}
    compute = _compute_s(got)
    claims = [_missing(name, r) for name, r in runs.items() if name not in got]
    if "resident_one" in got:
        claims.append(_at_least("everything resident, 1 CPU stream, against mlx-lm", got["resident_one"], 0.99))
    if "resident_all" in got:
        streams = got["resident_all"]["cpu_streams"]
        claims.append(
            _at_least(f"everything resident, {streams} CPU streams, against mlx-lm", got["resident_all"], 1.7)
        )
    for name, what in (
        ("limited", "limit of 40 %"),
        ("limited_told", "limit of 40 %, told"),
        ("streamed", "nothing resident"),
        ("small", "limit of 800 MB"),
    ):
        if name in got:
            claims += _speed(what, got[name], compute)
    if "streamed" in got:
        claims += _memory(got["streamed"])
    for name in ("streamed", "sweeps"):
        if name in got:
            claims.append(_sweeps(got[name]))
    for name, ours, what in (
        ("plain_limited", "limited", "limit of 40 %"),
        ("plain", "streamed", "nothing resident, no limit"),
    ):
        if name in got:
            claims.append(_plain(what, got[name], got.get(ours)))
    digests = {name: r["digests"] for name, r in got.items() if r.get("prompt_tokens", 3) == 3}
    if len(digests) > 1:
        claims.append(_same(digests, got))
    return claims


def _compute_s(got: Result) -> float | None:
    return min(_compute_times(got), default=None)


def _compute_times(results: Result) -> list[float]:
    runs = [results.get(name, {}) for name in ("resident_all", "resident_all_again")]
    return [r["ours_s"] for r in runs if "ours_s" in r]


def _missing(name: str, result: Result) -> Claim:
    if "skipped" in result:
        return Claim(f"{name}: runs", f"not measured: {result['skipped']}", "", None)
    # That the plain way does not survive a limit breaks no promise.
    return Claim(f"{name}: runs", result["failed"], "", None if name.startswith("plain") else False)


def _at_least(what: str, result: Result, bound: float) -> Claim:
    ratio = result["speed_ratio"]
    measured = f"{ratio:.3f} × ({result['ours_s']:.3f} s, mlx-lm {result['plain_s']:.3f} s)"
    return Claim(what, measured, f"≥ {bound} ×", ratio >= bound)


def _speed(what: str, r: Result, compute: float | None) -> list[Claim]:
    shown = f"{r['resident_units']} resident, {r['streamed_units']} streamed, {r['slots']} slots"
    claims = []
    if r["limit_bytes"]:
        peak = f"{format_size(r['cgroup_peak_bytes'])} at most" if r.get("cgroup_peak_bytes") else "not killed"
        asked = r["attempts"][-1]["options"]
        how = "".join(f", {k}={v}" for k, v in asked.items())
        refused = "; ".join(["", *(a["outcome"] for a in r["attempts"][:-1])])
        claims.append(
            Claim(
                f"{what}: runs, budget {format_size(r['budget_bytes'])}{how}",
                f"{peak}; {shown}{refused}",
                f"{format_size(r['limit_bytes'])}, page cache counted",
                True,
            )
        )
    disk_s = r["bytes_per_token"] / statistics.mean(r["disk_gbps"]) / 1e9
    parts = f"disk {disk_s:.3f} s ({r['bytes_per_token'] / 1e9:.2f} GB at {_gbps(r['disk_gbps'])})"
    if compute is None:
        return [*claims, Claim(f"{what}: seconds per token ({shown})", f"{r['s_per_token']:.3f} s", parts, None)]
    ceiling = max(disk_s, compute)
    over = r["s_per_token"] / ceiling
    measured = f"{r['s_per_token']:.3f} s = {over:.2f} × ceiling, {100 / over:.0f} % of it"
    return [
        *claims,
        Claim(
            f"{what}: seconds per token ({shown})",
            f"{measured} (fastest {min(r['seconds']):.3f} s)",
            f"≤ {MARGIN:.2f} × max({parts}, compute {compute:.3f} s)",
            over <= MARGIN,
        ),
    ]


def _gbps(rates: Sequence[float]) -> str:
    return " and ".join(f"{r:.2f}" for r in rates) + " GB/s"


def _memory(r: Result) -> list[Claim]:
    slots = r["slots"] * r["slot_bytes"]
    bound = r["non_layer_bytes"] + slots + MEMORY_MARGIN
    parts = f"≤ {format_size(r['non_layer_bytes'])} non-layer + {format_size(slots)} slots + 150 MB"
    shown = f"{parts} = {format_size(bound)}"
    peak, process, base = r["peak_memory_bytes"], r["peak_rss_bytes"], r["baseline_rss_bytes"]
    over = process - base
    return [
        Claim("memory, nothing resident: MLX peak", format_size(peak), shown, peak <= bound),
        Claim("memory, nothing resident: process peak RSS", format_size(process), shown, process <= bound),
        Claim(
            "memory, nothing resident: the same above what imports take",
            f"{format_size(over)} ({format_size(base)} after imports)",
            shown,
            over <= bound,
        ),
    ]


def _sweeps(r: Result) -> Claim:
    n = len(r["tokens"])
    after = r["sweeps_after_each_token"]
    holds = after == list(range(1, n + 1)) and r["sweeps"] == n
    return Claim(
        f"sweeps, prompt of {r['prompt_tokens']} tokens, {n} generated",
        f"{after[0]} for the prompt, {r['sweeps']} in all",
        f"1, {n}",
        holds,
    )


def _plain(what: str, r: Result, ours: Result | None) -> Claim:
    ratio = f" = {r['s_per_token'] / ours['s_per_token']:.2f} × ours" if ours else ""
    return Claim(f"the plain way, {what}: seconds per token", f"{r['s_per_token']:.3f} s{ratio}", "", None)


def _same(digests: dict[str, list[str]], got: Result) -> Claim:
    shortest = min(len(d) for d in digests.values())
    alike = {tuple(d[:shortest]) for d in digests.values()}
    holds = len(alike) == 1 and all(r.get("same", True) for r in got.values())
    measured = f"{shortest} tokens, {len(digests)} runs: " + ("equal" if holds else "different")
    return Claim("log-probabilities of greedy tokens: mlx-lm, ours, plain way", measured, "equal bit for bit", holds)


def show(document: Result, claims: Sequence[Claim], console: Console) -> None:
    """The table that the run ends with."""
    m, versions = document["machine"], document["machine"]["versions"]
    rates = [r["best_gbps"] for r in document["measurements"]["disk"]]
    kinds = {"direct" if r["direct"] else "cached" for r in document["measurements"]["disk"]}
    runs = [*document["measurements"]["disk"], *_runs(document)]
    others = [r["others_cpu_percent"] for r in runs if "others_cpu_percent" in r]
    console.print(
        f"{document['model']['folder']}: {format_size(document['model']['nbytes'])}; {m['cpu']}, {m['cores']} cores,"
        f" {format_size(m['memory_bytes'])}; {m['filesystem']}; MLX {versions['mlx']},"
        f" mlx-lm {versions['mlx-lm']}\n"
        f"disk, {' and '.join(sorted(kinds))} reads, from beginning to end: {', '.join(f'{r:.2f}' for r in rates)}"
        " GB/s; the model's files were dropped from the page cache before each measurement\n"
        f"CPU that others used right before each: {min(others):.0f} to {max(others):.0f} % of all cores",
        highlight=False,
    )
    times = _compute_times(document["measurements"])
    if max(others) > BUSY_PERCENT or (times and max(times) > DRIFT * min(times)):
        shown = " and ".join(f"{t:.3f}" for t in times)
        drift = f"; compute took {shown} s per token" if shown else ""
        console.print(f"[bold red]The machine was busy[/]{drift}. Quote no number of this run.", highlight=False)
    console.print(table_of(claims))


def table_of(claims: Sequence[Claim]) -> Table:
    """A line for each claim."""
    table = Table("claim", "measured", "bound", "holds", show_lines=True)
    for claim in claims:
        holds = {True: "[green]yes", False: "[bold red]no", None: ""}[claim.holds]
        table.add_row(claim.claim, claim.measured, claim.bound, holds)
    return table


def _runs(document: Result) -> list[Result]:
    return [r for name, r in document["measurements"].items() if name != "disk"]
