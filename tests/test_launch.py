"""``outcore launch``: what it starts where, what it refuses first, and how it ends."""

from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from fake_ssh import behind
from outcore.cli.main import main
from outcore.cli.output import Result
from outcore.errors import LinkError, UsageError
from outcore.machine.gpus import nvidia_gpus
from outcore.machine.memory import MemoryLimit, default_budget
from outcore_cluster.launch import processes
from outcore_cluster.launch.guard import on_host
from outcore_cluster.launch.hosts import Host, find_hosts, remote_command
from outcore_cluster.launch.launch import _status, check_versions
from outcore_cluster.launch.processes import Rank, RankProcesses

TOY = [sys.executable, str(Path(__file__).parent / "support" / "link_toy.py")]
ENDS_S = 60.0


@pytest.fixture
def elsewhere(tmp_path: Path) -> list[str]:
    """Flags for hosts "a" and "b", that are this one, reached through what takes the place of ssh."""
    return behind(tmp_path, "ab")


LOCAL = ["--hosts", "local,local"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "outcore", "launch", *words]


def launch(*words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*words), input=stdin, capture_output=True, text=True, timeout=150)


Here = Callable[..., tuple[int, str, str]]


@pytest.fixture
def launch_here(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Here:
    """As ``launch``, in this process, where its own start is not what is tested: its status, and what it wrote."""

    monkeypatch.setattr(sys, "stdin", io.StringIO())

    def run(*words: str) -> tuple[int, str, str]:
        return (main(["launch", *words]), *capfd.readouterr())

    return run


def started(*words: str, **options: Any) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command(*words), stdin=pipe, stdout=pipe, stderr=pipe, text=True, **options)


def below(launcher: subprocess.Popen[str], least: int) -> list[psutil.Process]:
    """All processes of a run, once there are so many."""
    end = time.monotonic() + 60
    while len(found := psutil.Process(launcher.pid).children(recursive=True)) < least:
        assert time.monotonic() < end and launcher.poll() is None
        time.sleep(0.02)
    return list(found)


def all_end(processes: list[psutil.Process], within_s: float = ENDS_S) -> None:
    _, alive = psutil.wait_procs(processes, timeout=within_s)
    for process in alive:
        process.kill()
    assert not alive


def rounds(launcher: subprocess.Popen[str], least: int) -> None:
    assert launcher.stdout is not None
    while (line := launcher.stdout.readline()) and line != f"round {least}\n":
        pass
    assert line


def test_ranks_of_other_hosts_run_together(tmp_path: Path) -> None:
    done = launch(*behind(tmp_path, "abc"), "--", *TOY, "3")
    assert (done.returncode, done.stdout, done.stderr) == (0, "round 0\nround 1\nround 2\n", "")


def test_ranks_of_this_host_run_together_and_json_tells_how_each_ended() -> None:
    done = launch(*LOCAL, "--json", "--", *TOY, "1")
    ranks = [{"rank": rank, "host": "local", "exit_status": 0} for rank in range(2)]
    assert json.loads(done.stdout) == {"launch": {"ranks": ranks, "failed": None}}
    assert (done.returncode, done.stderr) == (0, "round 0\n")


def test_a_folder_that_a_host_lacks_is_reported(elsewhere: list[str], launch_here: Here) -> None:
    status, _, said = launch_here(*elsewhere, "--cwd", "/no/such", "--", *TOY, "1")
    says = "outcore launch: rank N (H): --cwd /no/such: there is no such folder on this host\n"
    expected = [says.replace("N", str(n)).replace("H", host) for n, host in enumerate("ab")]
    assert status == 1 and said in expected


ECHO = """
import os, sys
print(os.environ["MLX_RANK"], os.environ["WORD"], os.getcwd(), flush=True)
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
"""


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_the_first_rank_has_the_launchers_streams(where: str, elsewhere: list[str], tmp_path: Path) -> None:
    hosts = elsewhere if where == "elsewhere" else LOCAL
    given = ["--env", "WORD=a 'word'", "--cwd", str(tmp_path), "--", sys.executable, "-c", ECHO]
    done = launch(*hosts, *given, stdin="one\ntwo\n")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"0 a 'word' {tmp_path}\nheard one\nheard two\n"


GPU = """
import os
with open(f"{os.environ['WHERE']}/{os.environ['MLX_RANK']}", "w") as file:
    file.write(os.environ["CUDA_VISIBLE_DEVICES"] + " " + os.environ.get("OUTCORE_MEMORY_SHARED_BY", "alone"))
"""


def test_each_rank_of_a_host_has_a_gpu_of_its_own_or_divides_one(tmp_path: Path, launch_here: Here) -> None:
    given = ["--env", f"WHERE={tmp_path}", "--env", "CUDA_VISIBLE_DEVICES=2, 5"]
    assert launch_here("--hosts", "local,localhost,local", *given, "--", sys.executable, "-c", GPU) == (0, "", "")
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["2 2", "5 2", "2 2"]


def test_a_launcher_hides_no_gpu_from_its_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    done = launch(*LOCAL, "--env", f"WHERE={tmp_path}", "--", sys.executable, "-c", GPU)
    assert (done.returncode, done.stderr) == (0, "")
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["2 alone", "5 alone"]


def test_ranks_of_one_host_divide_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no budget is given."""
    limit = MemoryLimit(10**12, 10**12, "made up")
    alone, shared = default_budget(limit), {"OUTCORE_MEMORY_SHARED_BY": "2"}
    monkeypatch.setenv(*next(iter(shared.items())))
    assert 0.45 < default_budget(limit) / alone <= 0.5
    assert on_host({}, 1, 2) == shared
    assert on_host({"CUDA_VISIBLE_DEVICES": "3"}, 1, 2) == {"CUDA_VISIBLE_DEVICES": "3"} | shared
    assert on_host({"CUDA_VISIBLE_DEVICES": "3,5"}, 1, 2) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert on_host({"CUDA_VISIBLE_DEVICES": "3,5"}, 2, 3) == {"CUDA_VISIBLE_DEVICES": "3"} | shared


COMMAND = """
import os, sys
from outcore.cli.main import main
status = main(["completion", "bash"])
print(status, os.environ["CUDA_VISIBLE_DEVICES"], file=sys.stderr)
"""


def test_every_other_command_sees_the_first_alone() -> None:
    """MLX fails to copy from the host where it sees several (``machine.gpus``)."""
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "2, 5"}
    done = subprocess.run([sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.split() == ["0", "2"]


def test_one_gpu_is_left_to_all(tmp_path: Path) -> None:
    (tmp_path / "nvidia0").touch()
    (tmp_path / "nvidiactl").touch()
    assert nvidia_gpus({}, tmp_path) == ["0"] and on_host({"CUDA_VISIBLE_DEVICES": "3"}, 1, 1) == {
        "CUDA_VISIBLE_DEVICES": "3"
    }
    (tmp_path / "nvidia1").touch()
    assert nvidia_gpus({}, tmp_path) == ["0", "1"]
    assert nvidia_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


FAILS = """
import os, sys, time
if os.environ["MLX_RANK"] == "1":
    print("no luck", file=sys.stderr)
    os.kill(os.getpid(), 9)
time.sleep(600)
"""


def test_a_rank_that_fails_is_named_with_its_last_words(elsewhere: list[str], launch_here: Here) -> None:
    """By a signal; by a status, test_the_rank_at_fault_may_end_after_the_ranks_that_heard_of_it."""
    began = time.monotonic()
    status, _, said = launch_here(*elsewhere, "--", sys.executable, "-c", FAILS)
    assert status == 1 and time.monotonic() - began < ENDS_S
    assert said == "rank 1 (b): no luck\noutcore launch: rank 1 (b) was ended by SIGKILL\n"


def test_misuse_is_its_status_also_where_a_rank_was_too_slow_to_see_it(capsys: pytest.CaptureFixture[str]) -> None:
    """It is ended a second and a half after the one that was first. What ended otherwise by itself is a failure."""
    for slow, program, status in ((-15, False, 2), (None, False, 2), (1, False, None), (-15, True, None)):
        ranks = RankProcesses(lambda *_: None)
        for number, ended in enumerate((slow, 2, slow)):
            ranks.ranks.append(rank := Rank(number, Host("a", "127.0.0.1")))
            rank.ended = ended
        ranks.failed = ranks.ranks[1]
        ranks.failed.lines.append("outcore plan: --a: not alike")
        args = argparse.Namespace(result=Result(io.StringIO(), False), program=program)
        if status is None:
            with pytest.raises(LinkError, match=r"rank 1 \(a\) ended with status 2"):
                _status(ranks, args)
        else:
            assert _status(ranks, args) == status
        assert capsys.readouterr().err == "rank 1 (a): outcore plan: --a: not alike\n"


@pytest.mark.parametrize("name", ["local", "a"])
def test_wrong_usage_is_the_status_also_with_a_slow_rank(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """And was ended by its link, with 1. What a first rank here says is not seen here."""
    ranks = RankProcesses(lambda *_: None)
    for number, ended in enumerate((1, 2)):
        ranks.ranks.append(rank := Rank(number, Host(name, "127.0.0.1")))
        rank.ended = ended
    ranks.failed = ranks.ranks[1]
    ranks.failed.lines.append("outcore generate: --max-tokens 0")
    if name != "local":
        ranks.ranks[0].lines.append(f"outcore: rank 1 ({name}): --max-tokens 0")
    result = Result(io.StringIO(), False)
    assert _status(ranks, argparse.Namespace(result=result, program=False)) == 2
    assert capsys.readouterr().err == f"rank 1 ({name}): outcore generate: --max-tokens 0\n"
    assert (result.record["error"], result.record["exit_status"]) == ("--max-tokens 0", 2)


STOPPED = """
import os, signal, sys, time
if os.environ["MLX_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGSTOP)
time.sleep(2)
print(time.time(), flush=True)
sys.exit(1)
"""


def test_a_rank_that_was_stopped_when_it_began_is_not_waited_for_longer(
    elsewhere: list[str],
) -> None:
    began = time.monotonic()
    code = STOPPED.replace("sleep(2)", "sleep(200)")
    done = launch(*elsewhere, "--", sys.executable, "-c", code)
    assert done.returncode == 1 and "rank 1 (b): has been suspended for 5 s" in done.stderr
    assert time.monotonic() - began < 2 * ENDS_S


@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_nothing_outlives_a_launcher_that_is_killed(where: str, elsewhere: list[str]) -> None:
    launcher = started(*(elsewhere if where == "elsewhere" else LOCAL), "--", *TOY, "1000000")
    rounds(launcher, 5)
    processes = below(launcher, 4)
    launcher.kill()
    # Before anybody would miss its beats.
    all_end(processes, 3.0)
    launcher.communicate()


def test_nothing_outlives_a_launcher_that_is_stopped(elsewhere: list[str]) -> None:
    launcher = started(*elsewhere, "--", *TOY, "1000000")
    rounds(launcher, 5)
    processes = below(launcher, 4)
    launcher.send_signal(signal.SIGSTOP)
    try:
        end = time.monotonic() + ENDS_S
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            assert time.monotonic() < end
            time.sleep(0.1)
    finally:
        launcher.kill()
        launcher.communicate()
        all_end(processes)


STARTS = """
import subprocess, time
subprocess.run("sleep 99 & echo $!", shell=True)
child = subprocess.Popen(["sleep", "99"])
print(child.pid, flush=True)
time.sleep(600)
"""


def test_what_a_rank_has_started_ends_with_it(elsewhere: list[str]) -> None:
    launcher = started(*elsewhere, "--", sys.executable, "-c", STARTS)
    assert launcher.stdout is not None
    sleeping = [psutil.Process(int(launcher.stdout.readline())) for _ in range(2)]
    end = time.monotonic() + 60
    while [process.name() for process in sleeping] != ["sleep", "sleep"]:  # a shell becomes it
        assert time.monotonic() < end
        time.sleep(0.01)
    launcher.send_signal(signal.SIGTERM)
    all_end(sleeping)
    launcher.communicate()


INTERRUPTED = """
import sys, time
try:
    print("round 0", flush=True)
    time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""

DEAF = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("round 0", flush=True)
time.sleep(600)
"""


def test_ctrl_c_ends_all_with_130(elsewhere: list[str]) -> None:
    """Here, test_launch_models.py's test_ctrl_c_ends_a_text_on_all_ranks."""
    launcher = started(*elsewhere, "--", sys.executable, "-c", INTERRUPTED)
    rounds(launcher, 0)
    processes = below(launcher, 4)
    launcher.send_signal(signal.SIGINT)
    _, errors = launcher.communicate(timeout=ENDS_S)
    assert (launcher.returncode, errors) == (130, "\noutcore launch: interrupted\n")
    all_end(processes)


def test_ctrl_c_before_there_are_ranks_ends_all(tmp_path: Path) -> None:
    """A guard on its way, which answers nothing."""
    run = started(*behind(tmp_path, "ab", "exec sleep 15"), "--", *TOY)
    processes = below(run, 2)
    run.send_signal(signal.SIGINT)
    run.communicate(timeout=ENDS_S)
    assert run.returncode == 130
    all_end(processes)


def test_ctrl_c_while_a_guard_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Between its start and its being known: it would have stayed."""
    made: list[subprocess.Popen[bytes]] = []

    class Interrupted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)
            if len(made) == 2:
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("subprocess.Popen", Interrupted)
    assert main(["launch", *behind(tmp_path, "abc", "exec sleep 30"), "--", *TOY]) == 130
    ended = [guard.poll() is not None for guard in made]
    for guard in made:
        guard.kill()
        guard.wait()
        for pipe in (guard.stdin, guard.stdout, guard.stderr):
            assert pipe is not None
            pipe.close()
    assert ended == [True, True]


def test_a_second_ctrl_c_ends_what_does_not_hear_the_first(elsewhere: list[str]) -> None:
    code = DEAF
    launcher = started(*elsewhere, "--", sys.executable, "-c", code)
    rounds(launcher, 0)
    processes = below(launcher, 4)
    launcher.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert launcher.poll() is None
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=30)
    assert launcher.returncode == 130
    all_end(processes)


AT_FAULT = """
import os, sys, time
rank, name, folder = int(os.environ["MLX_RANK"]), *sys.argv[1:]
def until(file):
    while not os.path.exists(f"{folder}/{file}"):
        time.sleep(0.01)
if rank == 1:
    open(f"{folder}/begun", "w").close()
    until("heard")
    time.sleep(0.3)
    print("toy: broke", file=sys.stderr)
else:
    until("begun")
    print(f"toy: rank 1 ({name}): broke", file=sys.stderr)
    open(f"{folder}/heard", "w").close()
sys.exit(1)
"""


def test_the_rank_at_fault_may_end_after_the_ranks_that_heard_of_it(
    elsewhere: list[str], tmp_path: Path, launch_here: Here
) -> None:
    for where in (LOCAL, elsewhere):
        name = "local" if where is LOCAL else "b"
        (folder := tmp_path / f"where-{name}").mkdir()
        status, _, errors = launch_here(*where, "--", sys.executable, "-c", AT_FAULT, name, str(folder))
        assert status == 1
        lines = errors.splitlines()
        assert f"rank 1 ({name}): toy: broke" in lines
        # What a rank 0 here prints is not seen by its launcher.
        assert f"rank {'0' if where is LOCAL else '1'} ({name}) ended with status 1" in lines[-1]


def test_the_key_stands_in_no_list_of_processes() -> None:
    code = (
        "import os\nfrom outcore_cluster import environment as e\nme = e._key(os.environ)\n"
        "print(me.decode(), flush=True)\nimport time; time.sleep(600)"
    )
    launcher = started(*LOCAL, "--", sys.executable, "-c", code)
    assert launcher.stdout is not None
    key = launcher.stdout.readline().strip()
    assert len(key) == 64
    processes = [psutil.Process(launcher.pid), *below(launcher, 4)]
    seen = [text for p in processes for text in (*p.cmdline(), *p.environ().values())]
    launcher.kill()
    launcher.communicate()
    assert len(seen) > 20 and not [text for text in seen if key in text]


# What is refused before anything runs


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--", "generate"], "give --hosts"),
        (["--hosts", "local,,local", "--", "generate"], "a host without a name"),
        (["--hosts=-oProxyCommand=x", "--", "generate"], "begins with -"),
        (["--hosts", "local", "-n", "0", "--", "generate"], "give 1 or more"),
        (["--hosts", "local,local"], "give what to run behind --"),
        (["--hosts", "local,local", "--", "launch"], "give what to run behind --"),
        (["--hosts", "local,local", "--", "genrate"], "no command 'genrate' (did you mean generate?)"),
        (["--hosts", "local,local", "--", "generate", "--nonsense"], "no flag --nonsense"),
        (
            ["--memory", "4GB", "--hosts", "a,b", "--", "generate"],
            "no flag --memory; flags of the launched command go after its name",
        ),
        (["--hosts", "local,no-such-host.invalid", "--", "generate", "m"], "has no address here"),
        # Before anybody looks for the hosts.
        (["--hosts", "local,x.invalid", "--", "generate", "m", "--draft", "mtp"], "--draft mtp: does not work over"),
        (["--hosts", "local,x.invalid", "--", "plan", "m", "--device", "m4-pro"], "--device: does not work over"),
        (["--hosts", "local,x.invalid", "--", "bench", "m"], "bench: does not work over several machines"),
        (["--hosts", "local,x.invalid", "--", "chat", "--session", "a"], "--session: does not work over"),
        (["--hosts", "local,x.invalid", "--", "generate", "m", "--kv-disk", "on"], "--kv-disk on: does not work over"),
        (["--hosts", "local,x.invalid", "--", "serve", "m", "--exact-batch"], "--exact-batch: does not work over"),
        (["--hosts", "local,local", "--env", "A", "--", "generate", "m"], "give NAME=VALUE"),
        (["--hostfile", "no.json", "--", "generate", "m"], "no.json: No such file"),
    ],
)
def test_what_cannot_be_meant_is_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", *words]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "{", "3", "{}", '["a"]', '[{"ips": []}]', '{"hosts": [{"ssh": "a"}], "envs": ["x"]}']
)
def test_a_hostfile_that_is_none_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(UsageError):
        find_hosts(None, str(tmp_path / "hosts"), 1)


def test_hosts_are_found_as_mlx_launch_finds_them(tmp_path: Path) -> None:
    hosts = {"hosts": [{"ssh": "a", "ips": ["10.0.0.1", "10.0.1.1"], "rdma": []}, {"ssh": "b", "ips": ["10.0.0.2"]}]}
    (tmp_path / "hosts").write_text(json.dumps(hosts | {"envs": ["X=1"]}))
    found = find_hosts(None, str(tmp_path / "hosts"), 2)
    assert found.hosts == [Host("a", "10.0.0.1")] * 2 + [Host("b", "10.0.0.2")] * 2
    assert found.variables == {"X": "1"}
    assert find_hosts("local,me@127.0.0.1", None, 1).hosts[1] == Host("me@127.0.0.1", "127.0.0.1")
    (tmp_path / "hosts").write_text('[{"ssh": "127.0.0.1"}]')
    assert find_hosts(None, str(tmp_path / "hosts"), 1).hosts == [Host("127.0.0.1", "127.0.0.1")]


def test_ssh_is_given_one_word_that_a_shell_takes_apart_again(tmp_path: Path) -> None:
    python = tmp_path / "a b'c" / "py thon"
    python.parent.mkdir()
    python.write_text('#!/bin/sh\npwd; echo "$@"\n')
    python.chmod(0o700)
    *_, name, there = remote_command("ssh -p 22", "host", str(python.parent), str(python))
    done = subprocess.run(["sh", "-c", there], capture_output=True, text=True)
    assert (name, done.stdout) == ("host", f"{python.parent}\n-m outcore_cluster.launch.guard\n")


def test_a_host_that_cannot_be_reached_is_named(tmp_path: Path, launch_here: Here) -> None:
    where = behind(tmp_path, ["local", "b"], "echo 'ssh: no route' >&2\nexit 255")
    assert launch_here(*where, "--", "/bin/true") == (1, "", "outcore launch: rank 1 (b): ssh: no route\n")


def test_what_is_stopped_before_it_has_answered_is_not_waited_for_as_long_as_what_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launch_here: Here
) -> None:
    monkeypatch.setattr(processes, "SILENCE_S", 1.0)
    where, began = behind(tmp_path, ["local", "b"], "kill -STOP $$"), time.monotonic()
    says = "outcore launch: rank 1 (b): the process that starts it has been suspended for 1 s\n"
    assert launch_here(*where, "--", "/bin/true") == (1, "", says) and time.monotonic() - began < ENDS_S


def test_the_error_for_a_host_without_that_python_names_the_flag(tmp_path: Path) -> None:
    """And a terminal shows meanwhile whose rank is waited for."""
    words = [*behind(tmp_path, "ab", "sleep 1; exec no-such-python"), "--", "generate", "m", "-p", "hi"]
    terminal, end_of_it = pty.openpty()
    with os.fdopen(terminal, "rb", 0) as shown, os.fdopen(end_of_it, "wb", 0) as errors:
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
        done = subprocess.run(command(*words), stdin=subprocess.DEVNULL, stderr=errors, env=environment, timeout=60)
        seen = shown.read(100_000).decode()
    assert done.returncode == 1 and "waiting for a" in seen, seen
    assert re.search(r"rank [01] \([ab]\): .*; --python PATH says", seen), seen


def test_versions_that_differ_are_reported() -> None:
    ranks = [Rank(number, Host(f"h{number}", "127.0.0.1")) for number in range(2)]
    same = {"outcore": "1", "mlx": "2", "mlx-lm": "3", "python": "3.11"}
    ranks[0].ready = {"versions": same}
    ranks[1].ready = {"versions": same | {"python": "3.12"}}
    check_versions(ranks)
    for name in ("outcore", "mlx", "mlx-lm"):
        ranks[1].ready = {"versions": same | {name: "9"}}
        with pytest.raises(LinkError, match=rf"^rank 1 \(h1\) has {name} 9, rank 0 \(h0\) "):
            check_versions(ranks)


AT_A_TERMINAL = """
import os, sys, time
if os.environ["MLX_RANK"] != "0":
    time.sleep(600)
print("a terminal:", sys.stdin.isatty(), sys.stdout.isatty(), flush=True)
try:
    print("heard", input(), flush=True)
    for _ in range(600):
        time.sleep(0.1)  # one that comes just before a sleep begins is noticed behind it
except KeyboardInterrupt:
    print("interrupted once", flush=True)
    time.sleep(0.5)  # in which a second one would come
    sys.exit(130)
"""


OWN_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, sys.argv[1:])
"""


def test_the_first_rank_has_the_terminal_and_its_ctrl_c() -> None:
    terminal, end_of_it = pty.openpty()
    launcher = subprocess.Popen(
        [sys.executable, "-c", OWN_TERMINAL, *command(*LOCAL, "--", sys.executable, "-c", AT_A_TERMINAL)],
        stdin=end_of_it,
        stdout=end_of_it,
        stderr=end_of_it,
        start_new_session=True,
    )
    os.close(end_of_it)
    seen = ""

    def until(text: str) -> None:
        nonlocal seen
        end = time.monotonic() + 60
        while text not in seen:
            assert time.monotonic() < end, seen
            if select.select([terminal], [], [], 0.1)[0]:
                seen += os.read(terminal, 1000).decode()

    until("a terminal: True True")
    processes = psutil.Process(launcher.pid).children(recursive=True)
    assert len(processes) == 4
    os.write(terminal, b"words\n")
    until("heard words")
    os.write(terminal, b"\x03")
    until("interrupted once")
    until("outcore launch: interrupted")
    assert launcher.wait(30) == 130
    os.close(terminal)
    all_end(processes)
