"""What the runs of benchmarks/under_pressure.py say of each promise."""

from __future__ import annotations

from benchmark import Result
from judge import Claim
from outcore.sizes import format_size

RATIO = 0.9


def judge(results: Result) -> list[Claim]:
    """What the runs say of each promise; what was not run is left out."""
    claims = []
    expected = results["unpressed"]["tokens"]

    def survived(what: str, run: Result) -> None:
        if "failed" in run:
            claims.append(Claim(f"{what}: survives", str(run["failed"]), "not killed, no error", False))
            return
        peak = f"{format_size(run['cgroup_peak_bytes'])} at most of {format_size(run['limit_bytes'])}"
        claims.append(Claim(f"{what}: survives", peak, "not killed, no error", not run["killed"]))
        same = run["tokens"] == expected[: len(run["tokens"])]
        claims.append(
            Claim(f"{what}: tokens", f"{len(run['tokens'])} " + ("equal" if same else "differ"), "equal", same)
        )

    for n, r in enumerate(results.get("lowered", {}).get("rounds", []), 1):
        survived(f"lowered {n}", r["under"])
        took = (r["under"].get("lowered") or {}).get("seconds")
        shown = f"after {took:.1f} s" if took is not None else "never"
        claims.append(Claim(f"lowered {n}: the kernel takes the limit", shown, "taken", took is not None))
        if r["ratio"] is not None:
            measured = (f"{r['ratio']:.3f} ({r['s_per_token']:.3f} s a token with {r['resident_units']} resident, "
                        f"planned {r['planned_s_per_token']:.3f} s with {r['planned_resident_units']})")  # fmt: skip
            claims.append(Claim(f"lowered {n}: speed over that of a run planned for B", measured, "", True))
    if "lowered" in results:
        ratio = results["lowered"]["ratio"]
        shown = f"{ratio:.3f}" if ratio is not None else "none"
        claims.append(Claim("lowered: median of these", shown, f"≥ {RATIO}", ratio is not None and ratio >= RATIO))
    for name in ("neighbour", "cliff"):
        if name in results:
            survived(name, results[name])
            acts = [f"{d['pass']}: " + (f"-{d['shed']}" if d["shed"] else f"+{d['regrow']}")
                    for d in results[name].get("decisions", [])]  # fmt: skip
            if "failed" not in results[name]:
                planned, loaded = (results[name][f"{when}_resident_units"] for when in ("planned", "loaded"))
                least = min(results[name]["resident_units"])
                measured = f"{planned} planned, {loaded} loaded, {least} at least; " + ", ".join(acts)
                claims.append(Claim(f"{name}: comes down", measured, "by itself", least < planned))
    if "neighbour" in results:
        grown = [d["regrow"] for d in results["neighbour"].get("decisions", []) if d["regrow"]]
        claims.append(Claim("neighbour: regrows", f"{sum(grown)} layers", "some", bool(grown)))
    for name, run in results.get("impossible", {}).items():
        line = run["stderr"][-1] if run["stderr"] else ""
        claims.append(Claim(f"impossible, {name}: not killed", f"exit status {run['exit']}", "1", run["exit"] == 1))
        claims.append(
            Claim(f"impossible, {name}: answer so far", f"{run['pieces']} pieces", "printed", run["pieces"] > 3)
        )
        one = len(run["stderr"]) == 1 and "memory ran out" in line
        claims.append(Claim(f"impossible, {name}: one clear line", line, "what, how much, where", one))
    return claims
